from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines.diagnosis import KNOWN, Noticing, diagnose

SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "engines" / "log_samples"

LINES = [
    ("vllm serve: error: unrecognized arguments: --swap-space 4", "bad-flag", "this version does not know the argument --swap-space 4"),
    ("error: unknown argument: --flash", "bad-flag", "this version does not know the argument --flash"),
    ("error: invalid argument: --flashy", "bad-flag", "this version does not know the argument --flashy"),
    ("serve: error: argument --dtype: invalid choice: 'bf16' (choose from 'auto')", "bad-value", "--dtype does not take bf16"),
    ("vllm serve: error: argument --max-num-seqs: invalid int value: 'many'", "bad-value", "--max-num-seqs has no value that it takes: invalid int value many"),
    ("launch_server.py: error: argument --tp-size: expected one argument", "bad-value", "--tp-size has no value that it takes: expected one argument"),
    ('error while handling argument "--threads": stoi', "bad-value", "--threads has no value that it takes: stoi"),
    ('error while handling argument "--split-mode": invalid value', "bad-value", "--split-mode has no value that it takes: invalid value"),
    ("TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser", "tool-parser", None),
    ("ValueError: Total number of attention heads (40) must be divisible by tensor parallel size (3).", "heads", "the model's 40 attention heads cannot be divided by tp 3"),
    ("ValueError: output_size is not divisible by weight quantization block_n = 128", "quant-block", None),
    ("World size (4) is larger than the number of available GPUs (2) in this node", "world-size", "it needs 4 GPUs and sees 2"),
    ("Value error, Unknown quantization method: zzz. Must be one of", "quantization", "this engine does not know the quantization zzz"),
    ("The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 80.", "capability", None),
    ("User-specified max_model_len (9000) is greater than the derived max_model_len (max_position_embeddings=4096 or", "context-too-long", "context_length 9000 is more than the model's own 4096"),
    ("Please pass the argument `trust_remote_code=True` to allow custom code to be run.", "remote-code", None),
    ("model type `foo` but Transformers does not recognize this architecture", "architecture", "this version does not know the model's architecture foo"),
    ("Model architectures ['BarForCausalLM'] are not supported for now.", "architecture", "this version does not know the model's architecture BarForCausalLM"),
    ("error loading model: unknown model architecture: 'baz'", "architecture", "this version does not know the model's architecture baz"),
    ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", "gated", None),
    ("LocalEntryNotFoundError: outgoing traffic has been disabled", "not-cached", None),
    ("HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/none'. Use", "no-path", "there is nothing at /models/none"),
    ("E gguf_init_from_file: failed to open GGUF file '/models/a.gguf' (No such file or directory)", "no-path", "there is nothing at /models/a.gguf"),
    ("E gguf_init_from_reader: invalid magic characters: '<htm', expected 'GGUF'", "not-gguf", None),
    ("RepositoryNotFoundError: 404 Client Error", "no-repository", None),
    ("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered", "truncated", None),
    ("RuntimeError: Cannot find any model weights with `/models/x`", "no-weights", None),
    ("ValueError: Couldn't instantiate the backend tokenizer from one of:", "no-tokenizer", None),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", "driver-old", None),
    ("CUDA error: no kernel image is available for execution on the device", "no-kernel", None),
    ("OSError: [Errno 28] No space left on device", "disk-full", None),
    ("OSError: [Errno 24] Too many open files", "open-files", None),
    ("accept: Too many open files", "open-files", None),
    ("ibv_reg_mr_iova2 failed with error Cannot allocate memory", "memlock", None),
    ("OSError: [Errno 98] Address already in use", "port", None),
    ("couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port", None),
    ("Free memory on device cuda:0 (3.2/79.6 GiB) on startup is less than desired GPU memory utilization (0.9, 71.6 GiB)", "memory-held", "something else holds the device's memory: 3.2/79.6 GiB free"),
    ("Based on the available memory, the estimated maximum model length is 8192. Try increasing", "kv-too-small", "the KV cache is too small for the context length: 8192 tokens fit"),
    ("To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed", "kv-too-small", None),
    ("ValueError: No available memory for the cache blocks.", "no-kv", None),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "static-memory", None),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out-of-memory", None),
    ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7", "nccl-timeout", None),
    ("No available shared memory broadcast block found in 60 seconds", "nccl-timeout", None),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp, ncclRemoteError: A call failed", "nccl", None),
    ("Engine core initialization failed. See root cause above. Failed core proc(s): {}", "host-memory", None),
    ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}", "core-start", None),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "cause"), LINES)
def test_each_known_failure(line: str, code: str, cause: str | None) -> None:
    found = diagnose(["INFO fine", f"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m ERROR 12-01 {line}", "INFO later"])
    assert found is not None
    assert found.code == code
    assert cause is None or found.cause == cause
    assert found.remedy
    assert "{" not in found.cause + found.remedy
    assert "\x1b" not in found.line


def test_every_entry_of_the_table_is_reached() -> None:
    # nccl-tcp needs two lines, and has its test below
    assert {code for _, code, _ in LINES} | {"nccl-tcp"} == {known.code for known in KNOWN}


def test_the_particular_wins_over_what_an_engine_says_last() -> None:
    found = diagnose(
        ["ERROR torch.OutOfMemoryError: CUDA out of memory", "Engine core initialization failed. See root cause above."]
    )
    assert found is not None
    assert found.code == "out-of-memory"
    both = diagnose(["the estimated maximum model length is 100", "No available memory for the cache blocks"])
    assert both is not None
    assert both.code == "kv-too-small"


def test_what_another_try_may_mend_is_not_final() -> None:
    def final(line: str) -> bool:
        found = diagnose([line])
        assert found is not None
        return found.final

    assert final("error: unrecognized arguments: --x")
    assert not final("OSError: [Errno 98] Address already in use")
    assert not final("CUDA out of memory")
    assert final("Total number of attention heads (4) must be divisible by tensor parallel size (3)")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO Application startup complete.",
        "WARNING ulimit is 20000 and stays so. This may lead to errors like `OSError: [Errno 24] Too many open files`.",
        "GET /v1/models 200",
    ],
)
def test_what_is_no_failure(line: str) -> None:
    assert diagnose([line]) is None


@given(st.lists(st.text(max_size=80) | st.sampled_from([line for line, _, _ in LINES]), max_size=20))
def test_any_log(lines: list[str]) -> None:
    found = diagnose(lines)
    assert found is None or (found.cause and found.remedy)


@pytest.mark.parametrize(
    "piece",
    [
        "HFValidationError: Repo id must be in the form",
        "Model architecture ['",
        "Free memory on device ",
        "tensor '",
        "error: argument --",
        "(",
    ],
)
def test_a_flood_takes_no_time(piece: str) -> None:
    began = time.process_time()
    diagnose([piece * 20_000] * 400)
    assert time.process_time() - began < 5


@pytest.mark.skipif(not SAMPLES.exists(), reason="no samples here")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("badarch", "architecture"), ("badchoice", "bad-value"), ("badflag", "bad-flag"), ("badquant", "quantization"),
        ("badtp", "heads"), ("nopath", "no-path"), ("notok", "no-tokenizer"), ("offlinerepo", "not-cached"),
        ("portinuse", "port"), ("remotecode", "remote-code"), ("toolong", "context-too-long"),
        ("toolparser", "tool-parser"), ("noweights", "core-start"), ("truncated", "core-start"),
        ("kill_server", None), ("drain_new", None), ("mn_r0", None), ("mn_r1", None),
    ],
)  # fmt: skip
def test_real_logs(name: str, code: str | None) -> None:
    (path,) = SAMPLES.glob(f"vllm-*-{name}.log")
    found = diagnose(path.read_text(errors="replace").splitlines())
    assert (found.code if found is not None else None) == code


@pytest.mark.parametrize(
    "said",
    [
        "Using network Socket",
        "NET/Socket : Using [0]eth0:10.1.0.5<0>",
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
    ],
)
@pytest.mark.parametrize("failure", ["", "torch.distributed.DistBackendError: NCCL error in: x, ncclRemoteError"])
def test_nccl_over_tcp_is_a_failure_where_a_fabric_was_asked_for(said: str, failure: str) -> None:
    asked = "node1:7:9 [0] NCCL INFO NCCL_IB_HCA set to =mlx5_0:1,mlx5_3:1"
    fell = f"node1:7:9 [0] NCCL INFO {said}"
    found = diagnose([asked, fell, failure])
    assert found is not None
    assert (found.code, found.final, found.line) == ("nccl-tcp", False, fell)
    assert "=mlx5_0:1,mlx5_3:1" in found.cause
    assert "llmgw doctor" in found.remedy
    alone = diagnose([fell, failure])
    assert (alone.code if alone else "") == ("nccl" if failure else "")
    assert diagnose([asked, "node1:7:9 [0] NCCL INFO Using network IB"]) is None


def test_nccl_over_tcp_is_noticed_while_the_engine_runs() -> None:
    asked = "node1:7:9 [0] NCCL INFO NCCL_IB_HCA set by environment to =mlx5_0:1"
    fell = "\x1b[0;36m(EngineCore pid=7)\x1b[0m node1:7:9 [0] NCCL INFO Using network Socket"
    noticing = Noticing()
    assert not noticing.read(["Loading weights took 3 s", asked, "CUDA out of memory"])
    assert noticing.found is None
    assert noticing.read([fell, "more"])
    assert noticing.found is not None
    assert (noticing.found.code, "=mlx5_0:1" in noticing.found.cause) == ("nccl-tcp", True)
    assert not noticing.read([asked, fell]), "it is told once"
    flooded = Noticing()
    for _ in range(1000):
        assert not flooded.read([asked])
    assert len(flooded._kept) <= 100
