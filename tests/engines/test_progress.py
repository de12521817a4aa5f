from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.engines.progress import progress
from llmgw.settings.catalog import EngineKind

LOGS = Path(__file__).resolve().parents[3] / "shared" / "engines" / "log_samples"


@pytest.mark.parametrize(
    ("line", "phase", "fraction"),
    [
        (
            "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]",
            "loading weights, file 2 of 4",
            0.5,
        ),
        ("(Worker pid=1) INFO Starting to load model /w...", "loading weights", None),
        ("INFO Loading weights took 3.2 seconds", "weights loaded", None),
        ("INFO GPU KV cache size: 100 tokens", "KV cache allocated", None),
        ("INFO CPU KV cache size: 100 tokens", "KV cache allocated", None),
        ("(Worker pid=2) INFO Explicitly set (2.0/9.5) GiB for KV cache on node 1.", "KV cache allocated", None),
        ("INFO Using cache directory: /c/1 for vLLM's torch.compile", "compiling", None),
        ("INFO Compiling a graph for dynamic shape takes 3 s", "compiling", None),
        ("INFO torch.compile takes 21.5 s in total", "compiling", None),
        ("INFO torch.compile took 4.50 s in total", "compiling", None),
        ("Capturing CUDA graphs (decode, FULL):  40%|####", "capturing CUDA graphs", 0.4),
        ("load_tensors: loading model tensors, this can take a while", "loading weights", None),
        ("0.00.010 I srv    load_model: loading model '/models/a.gguf'", "loading weights", None),
        ("0.00.368 I srv    load_model: initializing, n_slots = 2", "KV cache allocated", None),
        ("main: server is listening on http://127.0.0.1:1", "serving", None),
        ("0.00.370 I srv  llama_server: listening on http://127.0.0.1:1", "serving", None),
    ],
)
def test_lines(line: str, phase: str, fraction: float | None) -> None:
    said = progress(EngineKind.VLLM, line)
    assert said is not None
    assert (said.phase, said.fraction) == (phase, fraction)


@pytest.mark.parametrize(
    "line",
    [
        'INFO: 127.0.0.1 - "GET /health HTTP/1.1" 200 OK',
        "WARNING Enforce eager is set, disabling torch.compile and CUDAGraphs",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert progress(EngineKind.VLLM, line) is None


@given(st.text())
def test_any_line(line: str) -> None:
    said = progress(EngineKind.VLLM, line)
    assert said is None or said.fraction is None or 0 <= said.fraction <= 1


@pytest.mark.skipif(not LOGS.exists(), reason="no logs here")
def test_real_logs_show_progress() -> None:
    shown = 0
    for path in LOGS.glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            shown += progress(EngineKind.VLLM, line) is not None
    assert shown > 5
