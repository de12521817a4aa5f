"""llama-server under llmgw: how it starts, serves, is stopped, dies, and is adopted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fakes import tiny_model
from llmgw.cli.demo_files import DemoEngine, Engine
from tests.e2e.real import Keeper, Real, cut, members, program, real
from tests.e2e.test_operators import llmgw

pytestmark = pytest.mark.real_engine

LAYERS = 64
"""So deep is the model that an answer of some hundred tokens takes a second or more."""

PATIENT_S = 60.0
"""A drain that no stream here outlasts."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny_model.write(folder, LAYERS)
    return folder / "tiny.gguf"


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Keeper]:
    engine = Engine(DemoEngine.LLAMA, program("LLMGW_TEST_LLAMA_SERVER"))

    def make(folder: Path) -> AbstractContextManager[Real]:
        return real(folder, engine, f"weights: {weights}, context_length: 4096, args: [--threads, '1']")

    kept = Keeper(make, tmp_path_factory)
    yield kept
    kept.close()


@pytest.fixture
def llama(keeper: Keeper, request: pytest.FixtureRequest) -> Iterator[Real]:
    with keeper.lend(request.session) as made:
        yield made


def test_from_start_to_ready_to_an_idle_stop(llama: Real) -> None:
    seen = llama.start()
    assert seen[-1]["reason"] == "/v1/models lists tiny"
    assert {row["state"] for row in seen} <= {"placed", "starting", "loading", "ready"}
    llama.is_sound()
    took = llama.stopped_within(5)
    print(f"idle stop {took:.1f} s")
    assert any("exit code 0" in reason for reason in llama.decisions("forget", seen[-1]["id"]))


def test_a_stream_that_ends_in_time_is_waited_for(llama: Real) -> None:
    llama.serving(PATIENT_S)
    whole = llama.stream(300).result()
    stream = llama.stream(300)
    llama.configure(0, PATIENT_S)
    assert stream.result() == whole
    llama.stopped_within(10)


def test_a_stream_that_does_not_end_is_cut_and_the_engine_goes(llama: Real) -> None:
    llama.serving()
    stream = llama.stream(4000)
    took = llama.stopped_within(2 + 5 + 5)
    print(f"stop with a stream {took:.1f} s; {cut(stream)}")


def test_a_killed_server_is_started_again(llama: Real) -> None:
    before = llama.serving()
    stream = llama.stream(4000)
    os.kill(before["pid"], signal.SIGKILL)
    print(cut(stream))
    assert not members(before["pid"])
    llama.until("the restart to be decided", lambda: llama.decisions("restart", before["id"]))
    (reason,) = llama.decisions("restart", before["id"])
    assert "ended without being asked while ready: killed by signal 9" in reason
    assert llama.ready_again(before["generation"] + 1)["pid"] != before["pid"]
    assert llama.stream(5).result()


def test_the_agent_is_killed_mid_stream_and_its_successor_adopts(llama: Real) -> None:
    before = llama.serving()
    whole = llama.stream(300).result()
    stream = llama.stream(300)
    llama.run.kill_agent()
    assert stream.result() == whole
    llama.run.start_agent()
    llama.until("the node to be back", lambda: llama.run.node_state() == "connected" and llama.run.all_ready())
    after = llama.replica
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])
    llama.stopped_within(5)


@pytest.mark.parametrize(
    ("content", "cause", "remedy"),
    [
        (None, "there is nothing at", "correct the profile's weights"),
        (b"<html>moved</html>", "not a GGUF file", "name a .gguf file"),
        (b"", "cut off or damaged", "fetch it again"),
    ],
    ids=["missing", "not-gguf", "cut"],
)
def test_weights_that_cannot_be_are_named(
    llama: Real, weights: Path, tmp_path: Path, content: bytes | None, cause: str, remedy: str
) -> None:
    wrong = tmp_path / "wrong.gguf"
    if content is not None:
        wrong.write_bytes(content or weights.read_bytes()[:300_000])
    llama.begin(profile=llama.profile.replace(str(weights), str(wrong)))
    llama.until("the failure", lambda: llama.replica.get("generation") == 2, 30)
    reason = llama.replica["reason"]
    assert cause in reason
    assert remedy in reason
    said = llmgw("ctl", "--config", str(llama.system.demo.server_yaml), "replicas").stdout
    assert cause in said
    assert remedy in said
