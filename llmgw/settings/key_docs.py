"""What every key of the settings means, with an example that loads. A test holds this table against the classes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen


@frozen
class KeyDoc:
    """``example`` and ``wrong`` are YAML; ``along`` are paths and values that an example needs beside it.

    ``wrong`` is a value of the right type that is refused. ``unit`` is given where the key's name does not say it.
    """

    meaning: str
    example: str
    wrong: str = ""
    unit: str = ""
    along: tuple[tuple[str, str], ...] = ()


_P = "models.NAME.profiles[]"
_TWO = ((f"{_P}.gpus", "2"),)

SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "models": "The catalog: what clients may ask for, by name. A name has letters, digits and `. _ - / :`, at most 128.",
        "scaling": "What a model's own `scaling` leaves out. A model without one does not follow its load.",
        "router": "How requests are treated. It holds from the next request on.",
        "keys": "What holds for API keys from now on; keys that there are stay as they are.",
        "nodes": "Where models may go, by the id of a node.",
        "quotas": "How many devices the models of a group may have, by device class.",
        "liveness": "When a silent node stops counting as there, and when the control plane suspects itself.",
        "weights": "What nodes may fetch.",
        "tracing": "Spans of requests. Router processes take a change over without a restart.",
        "doctor": "What `llmgw doctor` leaves out on every node whose `agents` say nothing else.",
        "agents": "What agents are told beside their `agent.yaml`. `agents.nodes.ID` takes the same keys for one node, and "
        "is laid over `agents.default`: mappings key by key, lists and single values replace, `null` goes back to the "
        "built-in default. An agent takes a change over without touching its engines.",
    }
)

DOCS: Mapping[str, KeyDoc] = MappingProxyType(
    {
        "models.NAME.replicas": KeyDoc("How many are wanted; 0 stops it.", "2", "-1"),
        "models.NAME.endpoints": KeyDoc(
            "Addresses of engines that somebody else runs: the model is only routed. Instead of `profiles`.",
            "[http://10.0.0.7:8000]", "[https://h]",
        ),
        "models.NAME.placement.policy": KeyDoc(
            "`pack` keeps whole NVLink domains and nodes free, `spread` keeps replicas apart.", "spread"
        ),
        "models.NAME.placement.nodes": KeyDoc("Labels that a node must have.", "{zone: a}"),
        "models.NAME.placement.tolerate": KeyDoc("Taints that a node may have.", "[reserved]"),
        "models.NAME.placement.per_node": KeyDoc("The most replicas of the model on one node.", "1", "0"),
        "models.NAME.priority": KeyDoc("A model of a higher one takes the devices of one of a lower.", "10"),
        "models.NAME.min_run_s": KeyDoc("So long a replica keeps its devices whatever has a higher priority.", "600", "-1"),
        "models.NAME.group": KeyDoc("Whose `quotas` its devices count against.", "g"),
        "models.NAME.update": KeyDoc(
            "An edited profile: `surge` starts the new replica beside the old one where there is room, `replace` stops the "
            "old one first.", "replace",
        ),
        "models.NAME.scaling.min": KeyDoc("The fewest replicas; 0 lets the last one go.", "0", "-1"),
        "models.NAME.scaling.max": KeyDoc("The most replicas.", "4", "0"),
        "models.NAME.scaling.target": KeyDoc("Each replica shall have about so many requests.", "32", "0", "requests"),
        "models.NAME.scaling.up_s": KeyDoc("More replicas once the load asked for it for so long.", "30", "0"),
        "models.NAME.scaling.down_s": KeyDoc("Fewer once the load asked for it for so long.", "600", "0"),
        "models.NAME.scaling.idle_s": KeyDoc("With `min: 0`, the last one goes after so long without a request.", "900", "0"),
        "models.NAME.scaling.cooldown_s": KeyDoc("Between two changes is at least this.", "120", "-1"),
        "models.NAME.scaling.hold_s": KeyDoc("So long a request waits for the replica that it brings back.", "300", "0"),
        "models.NAME.routing.balance": KeyDoc(
            "`prefix` keeps a conversation with the replica that has its beginning cached, `least` takes the less loaded of "
            "two.", "least",
        ),
        "models.NAME.routing.concurrency": KeyDoc("The most requests at one engine at a time.", "64", "0", "requests"),
        "models.NAME.routing.queue": KeyDoc("How many wait for an engine, before others are refused.", "512", "-1", "requests"),
        "models.NAME.routing.queue_s": KeyDoc("How long one waits.", "10", "0"),
        "models.NAME.routing.connect_timeout_s": KeyDoc("As in `router`, for this model.", "5", "0"),
        "models.NAME.routing.first_byte_timeout_s": KeyDoc("As in `router`, for this model.", "60", "0"),
        "models.NAME.routing.idle_timeout_s": KeyDoc("As in `router`, for this model.", "30", "0"),
        "models.NAME.routing.total_timeout_s": KeyDoc("As in `router`, for this model.", "600", "0"),
        "models.NAME.aliases": KeyDoc(
            "Other names that clients may ask for it by; keys, limits, prices and metrics know the model's own.",
            "[chat]", "[m]",
        ),
        f"{_P}.name": KeyDoc("The profile's name, unique in the model. Profiles are tried in their order.", "one-h100", "a b"),
        f"{_P}.engine": KeyDoc("What runs it.", "sglang"),
        f"{_P}.weights": KeyDoc(
            "A folder or file below the node's `weights_dir`, `org/name` for the engine to fetch, or `hf:org/name[@revision]"
            "[:file]` for the agent to.", "/models/llama-3.1-8b", "--x",
        ),
        f"{_P}.device_class": KeyDoc(
            "One class of devices or several, most wanted first; see `llmgw agent inventory`.", "[h100-80g, a100-80g]",
            "[H100]",
        ),
        f"{_P}.gpus": KeyDoc("Devices on each node; `nodes x gpus` must be `dp x tp x pp`.", "2", "0", "devices", ((f"{_P}.tp", "2"),)),
        f"{_P}.nodes": KeyDoc("Nodes that one replica runs over.", "2", "0", "nodes", ((f"{_P}.pp", "2"),)),
        f"{_P}.tp": KeyDoc("Tensor parallelism.", "2", "0", "devices", _TWO),
        f"{_P}.pp": KeyDoc("Pipeline parallelism.", "2", "0", "devices", _TWO),
        f"{_P}.dp": KeyDoc("Groups of `tp x pp` devices, each with requests of its own.", "2", "0", "groups", _TWO),
        f"{_P}.expert_parallel": KeyDoc("Spread the experts of a mixture over all devices.", "true", "", "", (*_TWO, (f"{_P}.tp", "2"))),
        f"{_P}.task": KeyDoc("What the model is asked for.", "embed"),
        f"{_P}.lora": KeyDoc("Adapters by name, and where they are; clients ask for `MODEL:NAME`.", "{fr: /adapters/fr}"),
        f"{_P}.memory_gib": KeyDoc("The least device memory; stands in for the estimate.", "20", "0"),
        f"{_P}.context_length": KeyDoc("The longest context; else the engine's own.", "16384", "0", "tokens"),
        f"{_P}.quantization": KeyDoc("As the engine calls it; else what the weights say.", "fp8"),
        f"{_P}.gpu_memory_utilization": KeyDoc("The share of the memory that the engine takes.", "0.85", "1.5"),
        f"{_P}.parameters": KeyDoc("How many the model has, for the estimate until a node has the weights.", "8.03e9", "0"),
        f"{_P}.concurrency": KeyDoc("How many whole contexts the estimate has room for; the engine is not told.", "4", "0", "contexts"),
        f"{_P}.args": KeyDoc("Further arguments of the engine; what llmgw sets itself is refused.", '[--max-num-seqs, "64"]', "[--port]"),
        f"{_P}.allow_args": KeyDoc("Arguments in `args` that llmgw does not know and you vouch for.", "[--brand-new]", "", "", ((f"{_P}.args", "[--brand-new]"),)),
        f"{_P}.env": KeyDoc("Further environment variables; shown nowhere.", '{OMP_NUM_THREADS: "4"}'),
        f"{_P}.limits.start_s": KeyDoc("At most so long in `starting`.", "300", "0"),
        f"{_P}.limits.load_s": KeyDoc("At most so long in `loading` without a step forward.", "3600", "0"),
        f"{_P}.limits.hang_s": KeyDoc("At most so long in `ready` with requests and no token.", "60", "0"),
        f"{_P}.limits.drain_s": KeyDoc("So long streams may go on before a stop.", "120", "0"),
        f"{_P}.limits.stop_s": KeyDoc("Between SIGTERM and SIGKILL.", "10", "0"),
        "scaling.min": KeyDoc("The fewest replicas.", "0", "-1"),
        "scaling.max": KeyDoc("The most replicas.", "8", "0"),
        "scaling.target": KeyDoc("Each replica shall have about so many requests.", "32", "0", "requests"),
        "scaling.up_s": KeyDoc("More replicas once the load asked for it for so long.", "30", "0"),
        "scaling.down_s": KeyDoc("Fewer once the load asked for it for so long.", "600", "0"),
        "scaling.idle_s": KeyDoc("With `min: 0`, the last one goes after so long without a request.", "900", "0"),
        "scaling.cooldown_s": KeyDoc("Between two changes is at least this.", "120", "-1"),
        "scaling.hold_s": KeyDoc("So long a request waits for the replica that it brings back.", "300", "0"),
        "router.max_body_bytes": KeyDoc("The largest request.", "16777216", "10"),
        "router.max_media_bytes": KeyDoc("The largest request of routes that take recordings and images.", "134217728", "10"),
        "router.media_hosts": KeyDoc(
            "Hosts that addresses of media in requests may name; `.example.org` is all below it, none is every public one.",
            "[cdn.example.org, .example.com]", "['a/b']",
        ),
        "router.connect_timeout_s": KeyDoc("To reach an engine.", "1", "0"),
        "router.first_byte_timeout_s": KeyDoc("Until an engine's first byte.", "300", "0"),
        "router.idle_timeout_s": KeyDoc("Between two pieces of an answer.", "60", "0"),
        "router.total_timeout_s": KeyDoc("A request in all.", "7200", "0"),
        "router.auth": KeyDoc("`keys`: clients need an API key; `open`: whoever reaches the router may use every model.", "keys"),
        "router.prices.MODEL.prompt": KeyDoc("What a million tokens of prompts cost.", "0.5", "-1", "your unit"),
        "router.prices.MODEL.completion": KeyDoc("What a million tokens of answers cost.", "1.5", "-1", "your unit"),
        "keys.limits.requests_per_minute": KeyDoc("For new keys that say nothing else: requests in any 60 s.", "600", "-1", "requests"),
        "keys.limits.tokens_per_minute": KeyDoc("The same: tokens in any 60 s, prompts and answers.", "100000", "-1", "tokens"),
        "keys.limits.concurrent": KeyDoc("The same: requests under way at once.", "8", "-1", "requests"),
        "keys.limits.budget_tokens": KeyDoc("The same: tokens in a budget period.", "5000000", "-1", "tokens"),
        "keys.limits.budget_cost": KeyDoc("The same: cost in a budget period.", "20", "-1", "of `router.prices`"),
        "keys.limits.budget_period": KeyDoc("The same: when the budget begins anew (UTC).", "week"),
        "keys.longest_days": KeyDoc(
            "The latest end that a key can be given, counted from then; a new key without an end gets it.", "90", "0"
        ),
        "nodes.ID.labels": KeyDoc("What `placement.nodes` of models can ask for.", "{zone: a}"),
        "nodes.ID.taints": KeyDoc("What keeps out every model that does not tolerate it.", "[reserved]", "['a b']"),
        "quotas.GROUP.CLASS": KeyDoc("The most devices of this class that the models of the group have.", "4", "-1", "devices"),
        "liveness.heartbeat_s": KeyDoc("How often agents say that they are there.", "2", "0"),
        "liveness.unreachable_s": KeyDoc("Nothing new is placed on a node that was silent for so long.", "20", "1"),
        "liveness.lost_s": KeyDoc("What ran there is placed elsewhere after so long.", "120", "10"),
        "liveness.brake_share": KeyDoc(
            "Nothing is replaced while more than this share of the nodes fell silent together.", "0.5", "0"
        ),
        "liveness.brake_nodes": KeyDoc("And at least so many of them.", "5", "0", "nodes"),
        "liveness.brake_window_s": KeyDoc("Together is within so long.", "30", "0"),
        "weights.sources": KeyDoc("What nodes may fetch: `hf:org/name`, or `hf:org/*` for all of it.", '["hf:org/*"]', "[org/x]"),
        "weights.mirror": KeyDoc("The address that is asked instead of the hub's.", "https://hf-mirror.example", "ftp://h"),
        "weights.offline": KeyDoc("Ask nobody; what is in a node's cache must do.", "true"),
        "tracing.endpoint": KeyDoc(
            "Where spans go, OTLP over HTTP; needs `llmgw[tracing]`.", "http://localhost:4318/v1/traces", "h:4318"
        ),
        "tracing.share": KeyDoc("How much of what no caller traces already becomes a span.", "0.1", "2", "", (("tracing.endpoint", "http://h/v1/traces"),)),
        "doctor.skip": KeyDoc("Ids of checks, or how ids begin; see docs/doctor.md.", "[port, gpu.xid.reset]", "[A b]"),
        "agents.default.ports": KeyDoc("The ports that engines may take.", "21000-21999", "80-90"),
        "agents.default.weights_dir": KeyDoc("What all weights and adapters are below.", "/models"),
        "agents.default.discovery.source": KeyDoc("How GPUs are read; `discovery: nvml` is short for it.", "nvml"),
        "agents.default.discovery.root": KeyDoc("The hardware is read from this folder.", "/"),
        "agents.default.discovery.nvidia_smi": KeyDoc("The program, else it is looked for in `PATH`.", "/usr/bin/nvidia-smi"),
        "agents.default.discovery.interval_s": KeyDoc("How often the hardware is read again.", "30", "0"),
        "agents.default.discovery.timeout_s": KeyDoc("How long each program may take.", "10", "0"),
        "agents.default.fabrics.LABEL.adapters": KeyDoc("Ports of this network by their adapters.", "[mlx5_0, 'mlx5_1:1']", "['mlx5_*']"),
        "agents.default.fabrics.LABEL.link_layer": KeyDoc("Ports of this network by their kind.", "infiniband"),
        "agents.default.fabrics.LABEL.subnets": KeyDoc("Ports of this network by their addresses.", "[10.30.0.0/16]", "[10.30]"),
        "agents.default.weights.cache": KeyDoc("Where weights that are fetched are kept; may be shared.", "/shared/hub"),
        "agents.default.weights.token_file": KeyDoc("The file with the hub's token, 0600.", "/etc/llmgw/hf-token"),
        "agents.default.weights.reserve_gib": KeyDoc("What stays free on the cache's disk.", "50", "-1"),
        "agents.default.engines.KIND.command": KeyDoc(
            "The command that starts an engine; a list alone is short for it.", "[/opt/vllm/bin/vllm, serve]", "[]"
        ),
        "agents.default.engines.KIND.version": KeyDoc(
            "Its version, so that flags are left out that it lacks.", '"0.11.0"', "", "", (("agents.default.engines.KIND.command", "[vllm, serve]"),)
        ),
        "agents.default.log.level": KeyDoc("The least serious line that is written.", "debug"),
        "agents.default.log.format": KeyDoc("`auto` is text on a terminal and JSON elsewhere.", "json"),
        "agents.default.doctor.skip": KeyDoc("As `doctor.skip`, and instead of it.", "[mem.host]", "[A b]"),
    }
)  # fmt: skip
