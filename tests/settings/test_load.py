from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.settings.catalog import EngineKind, Profile, Task
from llmgw.settings.daemon import Address, GpuSource, Issuing
from llmgw.settings.digest import profile_digest
from llmgw.settings.faults import ConfigError
from llmgw.settings.load import kind_of, load_server, load_settings
from llmgw.settings.load_agent import load_agent
from llmgw.settings.quantization import least_capability

GOOD = """\
models:
  org/llama:3:
    replicas: 2
    profiles:
      - name: one
        engine: vllm
        weights: /models/llama
        device_class: h100-80g
        gpus: 2
        tp: 2
        limits: {load_s: 7200}
      - name: small
        engine: llamacpp
        weights: llama.gguf
        device_class: [l40s-45g, l4-22g]
  elsewhere:
    endpoints: [http://10.0.0.7:8000]
router: {idle_timeout_s: 30}
liveness: {lost_s: 90}
"""

PROFILE = {
    "name": "p", "engine": "vllm", "weights": "/w", "device_class": "h100-80g", "gpus": 1, "tp": 1,
}  # fmt: skip


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(text, "s.yaml")
    return [str(f) for f in caught.value.faults]


def with_profile(**changes: object) -> str:
    return json.dumps({"models": {"m": {"profiles": [{**PROFILE, **changes}]}}})


def test_a_whole_document() -> None:
    settings = load_settings(GOOD)
    llama, elsewhere = settings.models
    assert (llama.name, llama.replicas) == ("org/llama:3", 2)
    assert llama.profiles[0].limits.load_s == 7200.0
    assert llama.profiles[1].engine is EngineKind.LLAMACPP
    assert llama.profiles[1].device_class == ("l40s-45g", "l4-22g")
    assert elsewhere.endpoints == ("http://10.0.0.7:8000",)
    assert settings.liveness.lost_s == 90.0
    assert settings.needs_control_plane
    assert load_settings("") == load_settings("{}")


def test_every_fault_at_once_with_its_place() -> None:
    text = GOOD.replace("replicas: 2", "replicas: two").replace("gpus: 2", "gpuz: 2").replace("lost_s: 90", "lost: 90")
    assert faults(text) == [
        "s.yaml:3:5: models.org/llama:3.replicas: expected a whole number, found the text 'two'",
        "s.yaml:9:9: models.org/llama:3.profiles[0].gpuz: unknown key (did you mean gpus?)",
        "s.yaml:19:12: liveness.lost: unknown key (did you mean lost_s?)",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 4, "tp": 2}, "gpus: 1 node x 4 gpus = 4 devices, but tp 2 x pp 1 = 2"),
        ({"tp": 0}, "tp: expected at least 1, found 0"),
        ({"device_class": "a100-80g-mig-3g.40gb", "gpus": 2, "tp": 2}, "has exactly one MIG instance"),
        ({"device_class": "a100-80g", "quantization": "fp8"}, "fp8 needs compute capability 8.9, a100-80g has 8.0"),
        ({"device_class": "H100"}, "H100 is not a device class"),
        ({"device_class": ["l4-22g", "l4-22g"]}, "l4-22g stands here twice"),
        ({"device_class": []}, "device_class: is empty"),
        ({"args": ["--host", "0.0.0.0"]}, "args[0]: --host is llmgw's own"),
        ({"args": ["--api_key=x"]}, "args[0]: --api_key=x is llmgw's own (--api-key)"),
        ({"args": ["--served-mod", "x"]}, "args[0]: --served-mod is llmgw's own (--served-model-name)"),
        ({"args": ["-t", "4"], "allow_args": ["-t"]}, "args[0]: -t is llmgw's own (-tp)"),
        ({"args": ["--", "x"], "allow_args": ["--"]}, "args[0]: -- is llmgw's own (--model)"),
        ({"args": ["--disable-log-stats"]}, "args[0]: --disable-log-stats is llmgw's own"),
        ({"args": ["-asc", "4"]}, "args[0]: -asc is llmgw's own"),
        ({"args": ["--shutdown-timeout=0"]}, "args[0]: --shutdown-timeout=0 is llmgw's own (--shutdown-timeout)"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "env.CUDA_VISIBLE_DEVICES: is llmgw's own"),
        ({"env": {"LD_PRELOAD": "x"}}, "env.LD_PRELOAD: is llmgw's own"),
        ({"env": {"a-b": "x"}}, "env.a-b: is not a name of a variable"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: expected more than 0 and at most 1, found 1.5"),
        ({"limits": {"stop_s": 0}}, "limits.stop_s: expected more than 0 seconds, found 0"),
        ({"engine": "llamacpp", "nodes": 2, "tp": 2}, "nodes: llama.cpp runs on one node here"),
        ({"engine": "tgi"}, "engine: expected one of vllm, sglang, llamacpp, found the text 'tgi'"),
        ({"weights": "/w\nx"}, "weights: contains a control character"),
        ({"weights": "--evil"}, "weights: is not a path or repository"),
        ({"weights": None}, "weights: expected text, found nothing"),
        ({"name": "a b"}, "name: is not a profile name"),
        ({"memory_gib": 0}, "memory_gib: expected more than 0, found 0"),
        ({"context_length": 0}, "context_length: expected at least 1, found 0"),
        ({"gpus": 4, "dp": 2}, "gpus: 1 node x 4 gpus = 4 devices, but dp 2 x tp 1 x pp 1 = 2"),
        ({"dp": 0}, "dp: expected at least 1, found 0"),
        (
            {"device_class": "a100-80g-mig-3g.40gb", "gpus": 2, "dp": 2},
            "dp: is 2, but a replica on a100-80g-mig-3g.40gb",
        ),
        (
            {"nodes": 2, "dp": 1, "tp": 2, "gpus": 1, "task": "embeddings"},
            "task: expected one of generate, embed, rerank",
        ),
        ({"nodes": 4, "gpus": 1, "dp": 2, "tp": 2}, "dp: a group of tp 2 x pp 1 would reach over nodes of 1 gpus"),
        ({"engine": "sglang", "nodes": 2, "dp": 2}, "dp: SGLang has dp on several nodes only for the attention"),
        ({"engine": "llamacpp", "gpus": 2, "dp": 2}, "dp: llama.cpp has no data parallelism"),
        ({"engine": "llamacpp", "expert_parallel": True}, "expert_parallel: llama.cpp has no expert parallelism"),
        ({"engine": "llamacpp", "lora": {"a": "b"}}, "lora: llama.cpp gives an adapter no name to ask for"),
        ({"expert_parallel": 1}, "expert_parallel: expected true or false, found the number 1"),
        ({"lora": {"a:b": "/x"}}, "lora.a:b: is not an adapter's name"),
        ({"lora": {"a": "/x=y"}}, "lora.a: '/x=y' is not a path"),
        ({"lora": {"a": "-x"}}, "lora.a: '-x' is not a path"),
        ({"lora": {"a": ""}}, "lora.a: '' is not a path"),
        ({"args": ["--lora-modules", "a=/x"]}, "args[0]: --lora-modules is llmgw's own"),
        ({"args": ["-dp", "2"]}, "args[0]: -dp is llmgw's own"),
        ({"args": ["--enable-exp"]}, "args[0]: --enable-exp is llmgw's own (--enable-expert-parallel)"),
        ({"engine": "sglang", "args": ["--attn-dp-size", "2"]}, "args[0]: --attn-dp-size is llmgw's own"),
        ({"engine": "llamacpp", "args": ["--rerank"]}, "args[0]: --rerank is llmgw's own"),
        ({"engine": "llamacpp", "args": ["--agent"]}, "args[0]: --agent is llmgw's own"),
        ({"engine": "llamacpp", "args": ["--mcp-servers-json", "{}"]}, "args[0]: --mcp-servers-json is llmgw's own"),
        ({"engine": "sglang", "args": ["--enable-custom-logit-processor"]}, "is llmgw's own"),
        ({"args": ["--tool-server", "http://h"]}, "args[0]: --tool-server is llmgw's own"),
        ({"args": ["--api-key.x=known"]}, "args[0]: --api-key.x=known is llmgw's own (--api-key)"),
        ({"args": ["--tool_ser.x", "http://h"]}, "args[0]: --tool_ser.x is llmgw's own (--tool-server)"),
        ({"args": ["-n", "2"]}, "args[0]: -n is llmgw's own"),
        ({"args": ["-r=1"]}, "args[0]: -r=1 is llmgw's own (-r)"),
        ({"args": ["-n8"], "allow_args": ["-n8"]}, "args[0]: -n8 is llmgw's own (-n)"),
        ({"args": ["-t", "2"], "allow_args": ["-t"]}, "args[0]: -t is llmgw's own (-tp)"),
        ({"args": ["--no-enable-expert-parallel"]}, "args[0]: --no-enable-expert-parallel is llmgw's own"),
        ({"args": ["--hf-token", "hf_x"]}, "args[0]: --hf-token is llmgw's own"),
        ({"engine": "sglang", "args": ["--attention-data-parallel-size", "2"]}, "is llmgw's own"),
        ({"engine": "llamacpp", "args": ["-ag"]}, "args[0]: -ag is llmgw's own"),
        ({"engine": "llamacpp", "args": ["-hft", "hf_x"]}, "args[0]: -hft is llmgw's own"),
        ({"engine": "llamacpp", "args": ["-dr", "gemma3"]}, "args[0]: -dr is llmgw's own"),
        (
            {"engine": "llamacpp", "args": ["--fim-qwen-1.5b-default"]},
            "args[0]: --fim-qwen-1.5b-default is llmgw's own",
        ),
        ({"engine": "llamacpp", "args": ["--models-dir", "/m"]}, "args[0]: --models-dir is llmgw's own"),
        ({"env": {"PYTHONPATH": "/tmp"}}, "env.PYTHONPATH: is llmgw's own"),
        ({"env": {"NCCL_IB_HCA": "mlx5_0"}}, "env.NCCL_IB_HCA: is llmgw's own"),
        ({"env": {"GGML_VK_VISIBLE_DEVICES": "0"}}, "env.GGML_VK_VISIBLE_DEVICES: is llmgw's own"),
        ({"env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}}, "env.VLLM_ALLOW_RUNTIME_LORA_UPDATING: is llmgw's own"),
        ({"device_class": "t4-15g", "quantization": "mxfp4"}, "mxfp4 needs compute capability 8.0, t4-15g has 7.5"),
    ],
)
def test_rules_of_a_profile(change: dict[str, object], said: str) -> None:
    assert any(said in f for f in faults(with_profile(**change))), faults(with_profile(**change))


def test_names_that_adapters_make() -> None:
    def written(name: str, **change: object) -> str:
        return json.dumps(
            {"models": {name: {"profiles": [{**PROFILE, **change}]}, "m:sql": {"endpoints": ["http://h:1"]}}}
        )

    assert any(
        "models.m.profiles[0].lora.sql: m:sql is also a model" in f for f in faults(written("m", lora={"sql": "x"}))
    )
    assert any("is longer than a model's name may be" in f for f in faults(written("m" * 125, lora={"sql": "x"})))
    said = "models.m:1.profiles[0].engine: SGLang reads what follows the colon in m:1 as the name of an adapter"
    assert any(said in f for f in faults(written("m:1", engine="sglang")))
    (model, _) = load_settings(written("m", lora={"law": "lora/law"}, dp=2, gpus=2, task="rerank")).models
    assert (model.profiles[0].lora, model.profiles[0].task) == ({"law": "lora/law"}, Task.RERANK)


def test_a_profile_that_uses_nothing_new_keeps_its_digest() -> None:
    plain = Profile("p", EngineKind.VLLM, "/w", ("h100-80g",), gpus=2, tp=2, env={"A": "b"})
    assert profile_digest("m", plain) == "b1daa3081acd7d05"
    changed: list[dict[str, Any]] = [{"dp": 2}, {"expert_parallel": True}, {"task": Task.EMBED}, {"lora": {"a": "b"}}]
    assert len({profile_digest("m", attrs.evolve(plain, **change)) for change in [{}, *changed]}) == 5


@pytest.mark.parametrize(
    ("engine", "quantization", "least"),
    [
        (EngineKind.VLLM, "gptq_marlin", 75),
        (EngineKind.SGLANG, "gptq_marlin", 80),
        (EngineKind.VLLM, "FP8", 89),
        (EngineKind.SGLANG, "w4afp8", 90),
        (EngineKind.SGLANG, "mxfp8", 100),
        (EngineKind.VLLM, "compressed-tensors", None),
        (EngineKind.VLLM, "modelopt-fp4", 75),
        (EngineKind.LLAMACPP, "gguf", None),
    ],
)
def test_the_card_that_a_quantization_needs(engine: EngineKind, quantization: str, least: int | None) -> None:
    assert least_capability(engine, quantization) == least


def test_sglang_and_llama_flags_of_ours() -> None:
    for engine, argument in (("sglang", "--tp"), ("sglang", "--model"), ("llamacpp", "-m"), ("llamacpp", "-c")):
        assert "llmgw's own" in faults(with_profile(engine=engine, args=[argument, "x"]))[0]
    assert load_settings(with_profile(args=["--max-num-seqs", "8", "--trust-remote-code"]))


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (
            {"args": ["--max-num-seqz", "8"]},
            "args[0]: no version of vllm up to 0.33.0 has --max-num-seqz (did you mean --max-num-seqs?",
        ),
        ({"args": ["--max-num-seqs 8"]}, "args[0]: '--max-num-seqs 8' is not an argument"),
        ({"args": ["--max-num-seqs"]}, "args[0]: --max-num-seqs needs a value"),
        ({"args": ["--trust-remote-code", "8080"]}, "args[1]: '8080' belongs to no argument"),
        ({"args": ["--new", "1"], "allow_args": ["--port"]}, "allow_args[0]: --port is llmgw's own"),
    ],
)
def test_arguments_that_no_engine_understands(profile: dict[str, Any], said: str) -> None:
    assert any(said in fault for fault in faults(with_profile(**profile)))


@pytest.mark.parametrize(
    ("engine", "args", "flag"),
    [
        ("vllm", ["--worker-cls", "mine.Worker"], "--worker-cls"),
        ("vllm", ["--worker_extension_cls=mine.Worker"], "--worker-extension-cls"),
        ("vllm", ["--kv-transfer-config.kv_connector_module_path", "mine"], "--kv-transfer-config"),
        ("vllm", ["--allowed-local-media-path", "/"], "--allowed-local-media-path"),
        ("vllm", ["--download-dir", "/etc"], "--download-dir"),
        ("sglang", ["--forward-hooks", "[]"], "--forward-hooks"),
        ("sglang", ["--delete-ckpt-after-loading"], "--delete-ckpt-after-loading"),
        ("llamacpp", ["--log-file", "/etc/passwd"], "--log-file"),
        ("llamacpp", ["--mmproj-url", "http://h/x"], "--mmproj-url"),
    ],
)
def test_what_runs_code_or_reaches_files_needs_a_word(engine: str, args: list[str], flag: str) -> None:
    (said,) = faults(with_profile(engine=engine, args=args))
    assert f"args[0]: {flag} runs other code, reaches other files or fetches more" in said
    assert f"list {flag} in allow_args" in said
    assert load_settings(with_profile(engine=engine, args=args, allow_args=[flag]))


def test_an_argument_that_the_operator_vouches_for() -> None:
    assert load_settings(with_profile(args=["--brand-new", "1", "2", "--seed", "7"], allow_args=["--brand-new"]))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("a: {}", "models.a: has neither profiles nor endpoints"),
        (f"a: {{endpoints: ['http://h:1'], profiles: [{json.dumps(PROFILE)}]}}", "stand beside profiles"),
        ("a: {endpoints: ['https://h:1']}", "https endpoints are not supported by this version"),
        ("a: {endpoints: ['http://h:1/v1']}", "has more than host and port"),
        ("a: {endpoints: ['http://h:x']}", "is not a URL"),
        ("a: {endpoints: ['http://h:1', 'http://h:1']}", "stands here twice"),
        ("a b: {endpoints: ['http://h:1']}", "is not a model name"),
        ("../x: {endpoints: ['http://h:1']}", "is not a model name"),
        ("a: {name: b, endpoints: ['http://h:1']}", "the name is the key of the mapping"),
        ("a: []", "expected a mapping, found a list"),
        ("a: {replicas: -1, endpoints: ['http://h:1']}", "expected at least 0, found -1"),
    ],
)
def test_rules_of_a_model(model: str, said: str) -> None:
    assert any(said in f for f in faults(f"models:\n  {model}\n"))


def test_liveness_and_router() -> None:
    assert "less than two heartbeats" in faults("liveness: {heartbeat_s: 10, unreachable_s: 15}")[0]
    assert "not more than unreachable_s" in faults("liveness: {unreachable_s: 30, lost_s: 30}")[0]
    assert "expected more than 0 seconds" in faults("router: {connect_timeout_s: 0}")[0]
    assert "expected one of open, keys" in faults("router: {auth: none}")[0]
    assert "nope: is no model of the catalog" in faults("router: {prices: {nope: {prompt: 1}}}")[0]
    served = "models: {m: {endpoints: ['http://h:1']}}\nrouter: {auth: keys, prices: {m: {prompt: %s, completion: 2}}}"
    assert "expected at least 0, found -1" in faults(served % -1)[0]
    router = load_settings(served % 1.5).router
    assert (router.auth.value, router.prices["m"].of(2, 1)) == ("keys", 5)


SERVER = """\
state_dir: state
settings: settings.yaml
router: {listen: 0.0.0.0:8000}
link:
  listen: "[::]:8443"
  tls: {certificate: c.pem, key: /k.pem, ca: ../ca.pem}
"""
ISSUING = "  nodes: [gpu-1, gpu-2]\n  issuing: {ca: ca, node_hours: 12, renew_expired_days: 0}\n"


def test_a_server_that_issues() -> None:
    plain, config = load_server(SERVER, "", "/etc/llmgw").link, load_server(SERVER + ISSUING, "", "/etc/llmgw").link
    assert plain is not None
    assert (plain.issuing, plain.nodes) == (None, None)
    assert config is not None
    assert config.issuing == Issuing("/etc/llmgw/ca", 12.0, 0.0)
    assert config.nodes == ("gpu-1", "gpu-2")


def test_server() -> None:
    config = load_server(SERVER, "server.yaml", "/etc/llmgw")
    assert (config.state_dir, config.settings) == ("/etc/llmgw/state", "/etc/llmgw/settings.yaml")
    assert config.link is not None
    assert config.link.listen == Address("::", 8443)
    assert (config.link.tls.key, config.link.tls.ca) == ("/k.pem", "/etc/ca.pem")
    more = "router: {tls: {certificate: c.pem, key: /k.pem}, cors: {origins: ['*', 'https://a.example:8443']}"
    router = load_server(SERVER.replace("router: {", f"{more}, "), "server.yaml", "/etc/llmgw").router
    assert router.tls is not None
    assert (router.tls.certificate, router.tls.key) == ("/etc/llmgw/c.pem", "/k.pem")
    assert router.cors.origins == ("*", "https://a.example:8443")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.0.0.0:8000", "8000", "router.listen: expected host:port, found the number 8000"),
        ("0.0.0.0:8000", "h:99999", "router.listen: expected host:port"),
        ("0.0.0.0:8000", "127.0.0.1:8001", "admin.listen: 127.0.0.1:8001 is also router's"),
        ("settings: settings.yaml", "", "settings: is missing"),
        ("state_dir:", "statedir:", "statedir: unknown key (did you mean state_dir?)"),
        ('listen: "[::]:8443"', "connections_per_address: 0", "link.connections_per_address: expected at least 1"),
        ("{certificate: c.pem,", "{", "link.tls.certificate: is missing"),
        ("node_hours: 12", "node_hours: 0", "link.issuing.node_hours: expected 0.1 to 8760 hours, found 0"),
        ("days: 0", "days: 31", "link.issuing.renew_expired_days: expected 0 to 30 days, found 31"),
        ("ca: ca,", "", "link.issuing.ca: is missing"),
        ("gpu-2]", "a/b]", "link.nodes[1]: 'a/b' is not a node id"),
        ("8000}", "8000, workers: 0}", "router.workers: expected 1 to 8, found 0 (leave it out for one a core)"),
        ("8000}", "8000, tls: {key: k.pem}}", "router.tls.certificate: is missing"),
        (
            "8000}",
            "8000, cors: {origins: [https://a.example/chat]}}",
            "router.cors.origins[0]: 'https://a.example/chat' is no",
        ),
        (
            "8000}",
            "8000, tracing: {endpoint: 'http://h/v1'}}",
            "router.tracing: belongs in the settings (write it there as tracing, beside models)",
        ),
    ],
)
def test_server_faults(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_server((SERVER + ISSUING).replace(old, new), "server.yaml", "/etc")
    assert any(said in str(f) for f in caught.value.faults), caught.value


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mysql://u:sesame@h/d", "'mysql' begins no address of a PostgreSQL database"),
        ("/var/lib/llmgw.db", "begins no address of a PostgreSQL database"),
        ("postgresql://u:sesame@h/d", "a password must not stand here"),
        ("postgresql://u:ses/am@e@h/d", "a password must not stand here"),
        ("postgresql://u@h/d?password=sesame", "a password must not stand here"),
        ("postgresql://u@h/d?sslmode=require&sslpassword=sesame", "a password must not stand here"),
    ],
)
def test_a_store_s_address_has_no_password(address: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_server(SERVER + f"store: {address}\n", "server.yaml", "/etc")
    (fault,) = caught.value.faults
    assert said in str(fault)
    assert "sesame" not in str(fault)
    assert "postgresql://USER@HOST/DATABASE" in str(fault)


@pytest.mark.parametrize(
    "address", ["postgresql://u@h:5432,i:5432/d?passfile=/p", "postgresql://h:1/d?x=a@b", "postgresql://[::1]:5432/d"]
)
def test_a_store_s_address(address: str) -> None:
    assert load_server(SERVER + f"store: {address}\n", "server.yaml", "/etc").store == address
    assert load_server(SERVER, "server.yaml", "/etc").store is None


AGENT = """\
id: node-1
control_planes: [cp.example:8443]
tls: {certificate: c.pem, key: k.pem, ca: ca.pem}
state_dir: /var/lib/llmgw
ports: 20000-20010
engines:
  vllm: [vllm, serve]
  llamacpp: {command: [llama-server], version: b11434}
"""


def test_agent() -> None:
    config = load_agent(AGENT, "agent.yaml", "/etc/llmgw")
    assert (config.port_first, config.port_last) == (20000, 20010)
    vllm = config.engine(EngineKind.VLLM)
    assert vllm is not None
    assert vllm.command == ("vllm", "serve")
    assert config.engine(EngineKind.SGLANG) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("20000-20010", "20010-20000", "ports: 20010-20000 is not a range within 1024-65535"),
        ("20000-20010", "20000", "ports: expected first-last, found the number 20000"),
        ("id: node-1", "id: ../x", "id: '../x' is not a node id"),
        ("[cp.example:8443]", "[]", "control_planes: is empty"),
        ("  vllm:", "  vlm:", "engines.vlm: unknown engine (did you mean vllm?)"),
        ("[vllm, serve]", "[]", "engines.vllm.command: is empty"),
        ("ports:", "port_first:", "port_first: unknown key (did you mean ports?)"),
    ],
)
def test_agent_faults(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(AGENT.replace(old, new), "agent.yaml", "/etc")
    assert any(said in str(f) for f in caught.value.faults), caught.value


DISCOVERY = """\
discovery: {source: nvidia-smi, interval_s: 30}
fabrics:
  rack-1: {link_layer: infiniband}
  rails: {subnets: [10.30.0.0/16], link_layer: ethernet}
  storage: {adapters: ["mlx5_8:1", mlx5_9]}
  one: {adapters: mlx5_0, subnets: 10.1.0.0/16}
"""


def test_discovery_and_fabrics() -> None:
    config = load_agent(AGENT + DISCOVERY, "agent.yaml", "/etc")
    assert (config.discovery.source, config.discovery.interval_s) == (GpuSource.NVIDIA_SMI, 30)
    assert config.fabrics == (
        FabricRule("rack-1", link_layer=LinkLayer.INFINIBAND),
        FabricRule("rails", link_layer=LinkLayer.ETHERNET, subnets=("10.30.0.0/16",)),
        FabricRule("storage", adapters=("mlx5_8:1", "mlx5_9")),
        FabricRule("one", adapters=("mlx5_0",), subnets=("10.1.0.0/16",)),
    )
    assert load_agent(f"{AGENT}discovery: none\n", "agent.yaml", "/etc").discovery.source is GpuSource.NONE
    assert load_agent(AGENT, "agent.yaml", "/etc").discovery.source is GpuSource.AUTO


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "source: nvidia-smi",
            "source: magic",
            "discovery.source: expected one of auto, nvml, nvidia-smi, none, found the text 'magic'",
        ),
        ("{source: nvidia-smi, interval_s: 30}", "magic", "expected one of auto, nvml, nvidia-smi, none"),
        ("{source: nvidia-smi, interval_s: 30}", "[nvml]", "discovery: expected a mapping, found a list"),
        ("link_layer: infiniband", "link_layer: ib", "fabrics.rack-1.link_layer: expected one of infiniband, ethernet"),
        (
            "link_layer: infiniband",
            "linklayer: infiniband",
            "fabrics.rack-1.linklayer: unknown key (did you mean link_layer?)",
        ),
        ("{link_layer: infiniband}", "{}", "fabrics.rack-1: says nothing about which ports it has"),
        ("link_layer: infiniband", "label: x", "fabrics.rack-1.label: unknown key"),
        ("10.30.0.0/16", "10.30.0.0/99", "fabrics.rails.subnets[0]: '10.30.0.0/99' is not a network"),
        ("10.30.0.0/16", "10.30.0.1/16", "has host bits set"),
        ("mlx5_9", '"mlx5_*"', "fabrics.storage.adapters[1]: 'mlx5_*' is not an adapter's name"),
        ("mlx5_9", "mlx5_8:1", "fabrics.storage.adapters[1]: mlx5_8:1 stands here twice"),
        ("rack-1:", '"rack 1":', "is not a label"),
    ],
)
def test_discovery_and_fabric_faults(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(AGENT + DISCOVERY.replace(old, new, 1), "agent.yaml", "/etc")
    assert any(said in str(f) for f in caught.value.faults), caught.value


def test_kind_of() -> None:
    assert [kind_of(t, "a.yaml") for t in (SERVER, AGENT, GOOD)] == ["server", "agent", "settings"]
    with pytest.raises(ConfigError) as caught:
        kind_of("x: 1", "odd.yaml")
    assert "odd.yaml:1:1: neither server.yaml" in str(caught.value.faults[0])
    with pytest.raises(ConfigError) as caught:
        kind_of("a: 1\na: 2", "odd.yaml")
    assert str(caught.value.faults[0]).startswith("odd.yaml:2:1: ")
