"""What an engine's log says went wrong: a cause, a remedy, and whether another try could help. Pure.

Patterns: messages of vLLM 0.11 to 0.33, SGLang 0.4.6 to 0.5.23, llama.cpp b11434, PyTorch, NCCL and huggingface_hub.
They are asked in order, and the first that is found anywhere wins: the particular before the general, since engines
end with "see root cause above".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import frozen

_LONGEST_LINE = 2000
_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")


@frozen
class Diagnosis:
    """Why an engine failed. ``final`` says that the same profile on the same node will fail again."""

    code: str
    cause: str
    remedy: str
    final: bool
    line: str


@frozen
class _Known:
    """``cause`` and ``remedy`` may name the pattern's groups: ``{heads}``. Some line must show ``beside`` too."""

    code: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    final: bool = True
    beside: re.Pattern[str] = re.compile("")


def _known(code: str, pattern: str, cause: str, remedy: str, *, final: bool = True, beside: str = "") -> _Known:
    return _Known(code, re.compile(pattern), cause, remedy, final, re.compile(beside))


KNOWN: Sequence[_Known] = (
    # What was asked of it is wrong.
    _known("bad-flag", r"error: unrecognized arguments: (?P<what>\S[^\n]{0,120})|error: (?:unknown|invalid) argument: (?P<llama>\S{1,80})",
           "this version does not know the argument {what}{llama}", "remove it from the profile's args, or use another engine version"),
    _known("bad-value", r"error: argument (?P<flag>\S{1,60}): invalid choice: (?P<value>\S{1,60})",
           "{flag} does not take {value}", "correct the profile's args"),
    _known("bad-value", r"error: argument (?P<flag>\S{1,60}): (?P<said>invalid \S{1,40} value|expected[^\n]{0,80})(?:: '(?P<value>[^'\n]{1,60}))?|error while handling argument \"(?P<llama>[^\"\n]{1,60})\": (?P<why>[^\n]{1,120})",
           "{flag}{llama} has no value that it takes: {said}{why} {value}", "correct the profile's args"),
    _known("tool-parser", r"--enable-auto-tool-choice requires --tool-call-parser",
           "automatic tool choice needs a parser", "add --tool-call-parser to the profile's args"),
    _known("heads", r"Total number of attention heads \((?P<heads>\d{1,6})\) must be divisible by tensor parallel size \((?P<tp>\d{1,4})\)",
           "the model's {heads} attention heads cannot be divided by tp {tp}", "choose a tp that divides {heads}"),
    _known("quant-block", r"not divisible by weight quantization block_",
           "the quantised weights cannot be divided by this tp", "choose a smaller tp, or expert parallelism"),
    _known("world-size", r"World size \((?P<size>\d{1,5})\) is larger than the number of available GPUs \((?P<gpus>\d{1,5})\)",
           "it needs {size} GPUs and sees {gpus}", "make gpus x nodes equal to tp x pp, and give it that many"),
    _known("quantization", r"Unknown quantization method: (?P<name>\S{1,40}?)\.",
           "this engine does not know the quantization {name}", "choose one that it knows, or take the setting out"),
    _known("capability", r"quantization method (?P<name>\S{1,40}) is not supported for the current GPU\. Minimum capability: (?P<least>\d{1,4})",
           "quantization {name} needs compute capability {least}/10 and this card has less", "use newer cards, or another quantization"),
    _known("context-too-long", r"User-specified max_model_len \((?P<asked>\d{1,9})\) is greater than the derived max_model_len \(max_position_embeddings=(?P<most>[0-9.]{1,12})",
           "context_length {asked} is more than the model's own {most}", "lower context_length to {most}"),
    _known("remote-code", r"trust_remote_code=True|contains custom code which must be executed",
           "the model brings code of its own, which is not run unasked", "review it, then add --trust-remote-code to the profile's args"),
    _known("architecture", r"(?:model type `(?P<type>[^`\n]{1,60})` but )?Transformers does not recognize this architecture|Model architectures? \[?'?(?P<arch>[\w']{1,60})'?\]? (?:are|is) not supported|unknown model architecture: '(?P<gguf>[^'\n]{1,60})'",
           "this version does not know the model's architecture {type}{arch}{gguf}", "use a newer engine"),
    # What it was given is not there, or not whole.
    _known("gated", r"GatedRepoError|(?:401|403) Client Error[^\n]{0,200}huggingface|Access to model \S{1,120} is restricted",
           "the hub refuses these weights: gated, or the token is missing or wrong", "accept the model's terms, and name a token's file as weights.token_file in agent.yaml"),
    _known("not-cached", r"LocalEntryNotFoundError|outgoing traffic has been disabled",
           "the weights are not in the cache, and it may not fetch them", "fetch them first, or name a path that has them"),
    _known("no-path", r"HFValidationError: Repo id must be in the form[^\n]{0,80}: '(?P<path>/[^'\n]{1,300})'|failed to open GGUF file '(?P<gguf>[^'\n]{1,300})' \(No such file",
           "there is nothing at {path}{gguf}", "correct the profile's weights, or mount them on this node"),
    _known("no-repository", r"RepositoryNotFoundError|404 Client Error[^\n]{0,200}huggingface",
           "the hub does not have this repository", "correct the profile's weights; a private one looks the same without a token"),
    _known("truncated", r"SafetensorError[^\n]{0,120}|incomplete metadata, file not fully covered|tensor '?[^'\n]{0,80}'? data is not within the file bounds",
           "a file of the weights is cut off or damaged", "fetch it again and compare its size"),
    _known("no-weights", r"Cannot find any model weights|failed to load model[^\n]{0,40}No such file|gguf_init_from_file: failed to open",
           "the folder has no weights in a format that it reads", "look whether they were fetched whole, and under which names"),
    _known("not-gguf", r"gguf_init_from_\w{1,20}: invalid magic characters",
           "the weights are not a GGUF file", "name a .gguf file in the profile's weights; what a hub's page was saved as is none"),
    _known("no-tokenizer", r"Couldn't instantiate the backend tokenizer",
           "the tokenizer's files are missing", "fetch them too, or name another one with --tokenizer"),
    # The node.
    _known("driver-old", r"driver on your system is too old|Error 803|CUDA driver version is insufficient",
           "the NVIDIA driver is older than this engine's CUDA", "upgrade the driver, or use an engine built for an older CUDA"),
    _known("no-kernel", r"no kernel image is available",
           "this engine has no code for this card's generation", "use an engine version that supports the card"),
    _known("disk-full", r"\[Errno 28\]|No space left on device",
           "a disk or /dev/shm is full", "free space for caches, /tmp and the weights; /dev/shm needs 10 GB", final=False),
    _known("open-files", r"(?<!`OSError: )\[Errno 24\]|(?<!\[Errno 24\] )Too many open files",
           "it may not open more files", "raise LimitNOFILE of the agent's unit", final=False),
    _known("memlock", r"ibv_(?:create_cq|reg_mr\w{0,20})[^\n]{0,80}Cannot allocate memory",
           "it may not lock memory for RDMA", "set LimitMEMLOCK=infinity in the agent's unit, reload and restart it"),
    _known("port", r"\[Errno 98\]|[Aa]ddress already in use|couldn't bind HTTP server socket|Port \S{0,12} ?is already in use",
           "its port is taken by another process", "the next start takes another one", final=False),
    # Memory.
    _known("memory-held", r"Free memory on device[^\n]{0,40}\((?P<free>[0-9.]{1,9}/[0-9.]{1,9} GiB)\)[^\n]{0,60}less than desired GPU memory utilization",
           "something else holds the device's memory: {free} free", "find what holds it (nvidia-smi), or lower gpu_memory_utilization", final=False),
    _known("kv-too-small", r"estimated maximum model length is (?P<fits>\d{1,9})",
           "the KV cache is too small for the context length: {fits} tokens fit", "set context_length to {fits}, or use more or larger devices"),
    _known("kv-too-small", r"To serve at least one request[^\n]{0,200}KV cache is needed",
           "the KV cache is too small for one request of the context length", "lower context_length, or use more or larger devices"),
    _known("no-kv", r"No available memory for the cache blocks",
           "the weights leave no memory for the KV cache", "raise gpu_memory_utilization, use more or larger devices, or quantise"),
    _known("static-memory", r"Not enough memory\. Please try to increase --mem-fraction-static",
           "weights and KV cache do not fit into their share of the memory", "raise gpu_memory_utilization, or use more or larger devices"),
    _known("out-of-memory", r"CUDA out of memory|OutOfMemoryError|cudaMalloc failed: out of memory|failed to allocate (?:CUDA\d|buffer)",
           "the device's memory ran out", "use more or larger devices, quantise, or lower --max-num-seqs and the context length", final=False),
    # Several processes.
    # NCCL says nothing worse than this, and goes on over TCP. It logs the variable where the agent asked for a fabric.
    _known("nccl-tcp", r"NCCL INFO (?:Using network Socket|NET/Socket ?: Using )|NCCL INFO [^\n]{0,120} via NET/Socket/",
           "NCCL speaks TCP although it was given the fabric {hca}", "run llmgw doctor on this node: /dev/infiniband, the locked memory of the agent and the adapters' names",
           final=False, beside=r"NCCL_IB_HCA set (?:by environment )?to (?P<hca>\S{1,200})"),
    _known("nccl-timeout", r"Watchdog caught collective operation timeout|broadcast block found in 60 seconds",
           "a rank died or hangs: the others waited for it in vain", "see the other ranks' logs; all of them start again together", final=False),
    _known("nccl", r"ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|NCCL error[^\n]{0,80}|Call to ibv_modify_qp failed",
           "NCCL could not connect the ranks", "check the fabric (llmgw agent inventory), firewalls between the nodes, and /dev/shm", final=False),
    _known("host-memory", r"Failed core proc\(s\): \{\}",
           "the host's memory ran out while it compiled", "give the node more memory, or set MAX_JOBS lower", final=False),
    _known("core-start", r"Engine core initialization failed",
           "its core did not start, and its last lines do not say why", "look for the first error in its log", final=False),
)  # fmt: skip
"""Every failure that is recognised, the particular before the general."""


GOES_ON = frozenset({"nccl-tcp"})
"""Failures in spite of which an engine serves: what it would be told of at its end is told while it runs."""

NOTICED_WORD = b"NCCL"
"""What every line has that tells of one of :data:`GOES_ON`."""

_GOING_ON = tuple(known for known in KNOWN if known.code in GOES_ON)
_NOTED_LINES = 100


class Noticing:
    """What an engine's log shows of :data:`GOES_ON`, as it comes in."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self.found: Diagnosis | None = None

    def read(self, lines: Iterable[str]) -> bool:
        """Whether these lines, with those before them, show something that was not known."""
        news = [line for line in lines if any(k.pattern.search(line) or k.beside.search(line) for k in _GOING_ON)]
        if self.found is not None or not news:
            return False
        self._kept = (self._kept + news)[:_NOTED_LINES]
        self.found = _first(self._kept, _GOING_ON)
        return self.found is not None


def diagnose(lines: Iterable[str]) -> Diagnosis | None:
    """The first known failure that these lines of a log show, or ``None``."""
    return _first(lines, KNOWN)


def _first(lines: Iterable[str], table: Sequence[_Known]) -> Diagnosis | None:
    clean = [_ESCAPE.sub("", line[:_LONGEST_LINE]) for line in lines]
    for known in table:
        beside = next((found for line in clean if (found := known.beside.search(line)) is not None), None)
        if beside is None:
            continue
        for line in clean:
            if (match := known.pattern.search(line)) is not None:
                groups = beside.groupdict() | match.groupdict()
                said = {name: (value or "").strip("'\"") for name, value in groups.items()}
                cause = " ".join(known.cause.format(**said).split())
                return Diagnosis(known.code, cause, known.remedy.format(**said), known.final, line.strip()[:300])
    return None
