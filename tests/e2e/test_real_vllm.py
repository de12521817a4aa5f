"""vLLM's CPU build under llmgw: how it starts, serves, is stopped, dies, and is adopted.

The order makes one start serve several tests; each of them also runs alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fakes import tiny_model
from llmgw.cli.demo_files import DemoEngine, Engine
from tests.e2e.real import VLLM_ON_CPU, Keeper, Real, cut, members, program, real, shared_memory
from tests.e2e.test_operators import llmgw

pytestmark = pytest.mark.real_engine

LAYERS = 24
"""So deep is the model that an answer of some hundred tokens takes a second or more."""

PATIENT_S = 60.0
"""A drain that no stream here outlasts."""


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    engine = Engine(DemoEngine.VLLM, program("LLMGW_TEST_VLLM"))
    weights = tmp_path_factory.mktemp("weights")
    tiny_model.write(weights, LAYERS)

    def make(folder: Path) -> AbstractContextManager[Real]:
        return real(folder, engine, f"weights: {weights / 'hf'}, {VLLM_ON_CPU}")

    kept = Keeper(make, tmp_path_factory)
    yield kept
    kept.close()


@pytest.fixture
def vllm(keeper: Keeper, request: pytest.FixtureRequest) -> Iterator[Real]:
    with keeper.lend(request.session) as made:
        yield made


def test_from_start_to_ready(vllm: Real) -> None:
    seen = vllm.start(PATIENT_S)
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


def test_the_agent_is_killed_mid_stream_and_its_successor_adopts(vllm: Real) -> None:
    before = vllm.serving(PATIENT_S)
    whole = vllm.stream(300).result()
    stream = vllm.stream(300)
    vllm.run.kill_agent()
    assert stream.result() == whole
    vllm.run.start_agent()
    vllm.until("the node to be back", lambda: vllm.run.node_state() == "connected" and vllm.run.all_ready())
    after = vllm.replica
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])


def killed(vllm: Real, part: str, how: str) -> None:
    """SIGKILL to a part of an engine with a stream open: nothing of it is left, and it is started again."""
    before = vllm.replica
    first, generation = before["pid"], before["generation"]
    stream = vllm.stream(4000)
    memory = shared_memory(members(first))
    victim = next((pid for pid, line in members(first).items() if line.startswith(part)), 0) if part else first
    os.kill(victim, signal.SIGKILL)
    took = vllm.until("every process of the engine to be gone", lambda: not members(first), 15)
    assert not [path for path in memory if path.exists()]
    print(f"all gone {took:.1f} s after {part or 'the API server'}; {cut(stream)}")
    vllm.until("the restart to be decided", lambda: vllm.decisions("restart", before["id"]))
    (reason,) = vllm.decisions("restart", before["id"])
    assert "ended without being asked while ready" in reason
    assert how in reason
    assert vllm.ready_again(generation + 1)["pid"] != first
    assert vllm.stream(5).result()


def test_a_killed_api_server_takes_the_rest_with_it(vllm: Real) -> None:
    vllm.serving(PATIENT_S)
    killed(vllm, "", "killed by signal 9")


def test_a_stream_that_ends_in_time_is_waited_for(vllm: Real) -> None:
    vllm.serving(PATIENT_S)
    whole = vllm.stream(200).result()
    stream = vllm.stream(200)
    vllm.configure(0, PATIENT_S)
    assert stream.result() == whole
    vllm.stopped_within(12)


def test_a_killed_engine_core_takes_the_rest_with_it(vllm: Real) -> None:
    vllm.serving()
    killed(vllm, "VLLM::EngineCore", "exit code 0")


def test_a_stream_that_does_not_end_is_cut_and_the_engine_goes(vllm: Real) -> None:
    vllm.serving()
    stream = vllm.stream(4000)
    took = vllm.stopped_within(2 + 5 + 5)
    print(f"stop with a stream {took:.1f} s; {cut(stream)}")


def test_a_killed_worker_takes_the_rest_with_it(vllm: Real) -> None:
    vllm.serving()
    killed(vllm, "VLLM::Worker", "exit code 0")


def test_an_idle_stop(vllm: Real) -> None:
    name = vllm.serving()["id"]
    print(f"idle stop {vllm.stopped_within(10):.1f} s")
    assert any("exit code 0" in reason for reason in vllm.decisions("forget", name))
    vllm.until("its folder to be gone", lambda: not list(vllm.system.demo.agent_state.glob("shards/*")))


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
    vllm.begin(profile=vllm.profile.replace(*wrong))
    vllm.until("the failure", lambda: vllm.replica.get("generation") == 2, 60)
    row = vllm.replica
    assert cause in row["reason"]
    assert remedy in row["reason"]
    assert row["state"] == "waiting"
    said = llmgw("ctl", "--config", str(vllm.system.demo.server_yaml), "replicas").stdout
    assert cause in said
    assert remedy in said
