"""vLLM's CPU build under llmgw: how it starts, serves, is stopped, dies, and is adopted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import tiny_model
from llmgw.cli.demo_files import DemoEngine, Engine
from tests.e2e.real import LAYERS, Real, cut, members, program, real, shared_memory
from tests.e2e.test_operators import llmgw

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny_model.write(folder, LAYERS)
    return folder / "hf"


@pytest.fixture
def vllm(tmp_path: Path, weights: Path) -> Iterator[Real]:
    profile = (
        f"weights: {weights}, context_length: 4096, "
        "args: [--enforce-eager, --dtype, bfloat16, --max-num-seqs, '8'], "
        "env: {VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '1'}"
    )
    with real(tmp_path / "d", Engine(DemoEngine.VLLM, program("LLMGW_TEST_VLLM")), profile) as made:
        yield made


def test_from_start_to_ready_to_an_idle_stop(vllm: Real) -> None:
    seen = vllm.start()
    states = list(dict.fromkeys(row["state"] for row in seen))
    assert states[-3:] == ["starting", "loading", "ready"], states
    phases = {row["reason"] for row in seen if row["state"] == "loading"}
    assert phases & {"loading weights", "weights loaded", "KV cache allocated", "engine initialised"}, phases

    parts = members(vllm.replica["pid"]).values()
    assert any(p.startswith("VLLM::EngineCore") for p in parts), parts
    assert any(p.startswith("VLLM::Worker") for p in parts), parts
    vllm.is_sound()
    state = vllm.system.demo.agent_state
    assert any(path.is_socket() for path in state.glob("shards/*/*")), "its sockets are in its own folder"

    took = vllm.stopped_within(10)
    print(f"idle stop {took:.1f} s")
    assert any("exit code 0" in reason for reason in vllm.decisions("forget"))
    assert not list(state.glob("shards/*"))


def test_a_stream_that_ends_in_time_is_waited_for(vllm: Real) -> None:
    vllm.configure(drain_s=40)
    vllm.start()
    whole = vllm.stream(200).result()
    stream = vllm.stream(200)
    vllm.configure(0, drain_s=40)
    assert stream.result() == whole
    vllm.until("every process of the engine to be gone", lambda: not vllm.left(), 12)


def test_a_stream_that_does_not_end_is_cut_and_the_engine_goes(vllm: Real) -> None:
    vllm.start()
    stream = vllm.stream(4000)
    took = vllm.stopped_within(2 + 5 + 5)
    print(f"stop with a stream {took:.1f} s")
    print(repr(cut(stream)))


@pytest.mark.parametrize("part", ["", "VLLM::EngineCore", "VLLM::Worker"], ids=["server", "core", "worker"])
def test_a_killed_part_takes_the_rest_with_it(vllm: Real, part: str) -> None:
    vllm.start()
    stream = vllm.stream(4000)
    first = vllm.replica["pid"]
    memory = shared_memory(members(first))
    victim = next((pid for pid, line in members(first).items() if line.startswith(part)), 0) if part else first
    os.kill(victim, signal.SIGKILL)
    took = vllm.until("every process of the engine to be gone", lambda: not members(first), 15)
    assert not [path for path in memory if path.exists()]
    print(f"all gone {took:.1f} s after {part or 'the API server'}")
    print(repr(cut(stream)))
    vllm.until("the restart to be decided", lambda: vllm.decisions("restart"))
    (reason,) = vllm.decisions("restart")
    assert "ended without being asked while ready" in reason
    assert ("exit code 0" if part else "killed by signal 9") in reason
    assert vllm.ready_again(2)["pid"] != first
    assert vllm.stream(5).result()


def test_the_agent_is_killed_mid_stream_and_its_successor_adopts(vllm: Real) -> None:
    vllm.start()
    whole = vllm.stream(300).result()
    before = vllm.replica
    stream = vllm.stream(300)
    vllm.run.kill_agent()
    assert stream.result() == whole
    vllm.run.start_agent()
    vllm.until("the node to be back", lambda: vllm.run.node_state() == "connected" and vllm.run.all_ready())
    assert (vllm.replica["pid"], vllm.replica["generation"]) == (before["pid"], 1)
    vllm.stopped_within(10)


@pytest.mark.parametrize(
    ("wrong", "cause", "remedy"),
    [
        (("context_length: 4096", "context_length: 9000"), "context_length 9000 is more than the model's own 4096",
         "lower context_length to 4096"),
        (("engine: vllm", "engine: vllm, quantization: no-such-thing"), "does not know the quantization no-such-thing",
         "choose one that it knows"),
    ],
    ids=["context", "quantization"],
)  # fmt: skip
def test_a_start_that_cannot_be_says_why_and_what_to_do(
    vllm: Real, wrong: tuple[str, str], cause: str, remedy: str
) -> None:
    vllm.profile = vllm.profile.replace(*wrong)
    vllm.configure()
    vllm.run.start_server()
    vllm.run.start_agent()
    vllm.until("the failure", lambda: vllm.replica.get("generation") == 2, 60)
    reason = vllm.replica["reason"]
    assert cause in reason
    assert remedy in reason
    assert vllm.replica["state"] == "waiting"
    said = llmgw("ctl", "--config", str(vllm.system.demo.server_yaml), "replicas").stdout
    assert cause in said
    assert remedy in said
