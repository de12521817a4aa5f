"""llama-server under llmgw: how it starts, serves, is stopped, dies, and is adopted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import tiny_model
from llmgw.cli.demo_files import DemoEngine, Engine
from tests.e2e.real import LAYERS, Real, cut, members, program, real
from tests.e2e.test_operators import llmgw

pytestmark = pytest.mark.real_engine


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny_model.write(folder, LAYERS)
    return folder / "tiny.gguf"


@pytest.fixture
def llama(tmp_path: Path, weights: Path) -> Iterator[Real]:
    profile = f"weights: {weights}, context_length: 4096, args: [--threads, '1']"
    with real(tmp_path / "d", Engine(DemoEngine.LLAMA, program("LLMGW_TEST_LLAMA_SERVER")), profile) as made:
        yield made


def test_from_start_to_ready_to_an_idle_stop(llama: Real) -> None:
    seen = llama.start()
    assert seen[-1]["reason"] == "/v1/models lists tiny"
    assert {row["state"] for row in seen} <= {"placed", "starting", "loading", "ready"}
    llama.is_sound()
    took = llama.stopped_within(5)
    print(f"idle stop {took:.1f} s")
    assert any("exit code 0" in reason for reason in llama.decisions("forget"))


def test_a_stream_that_ends_in_time_is_waited_for(llama: Real) -> None:
    llama.configure(drain_s=40)
    llama.start()
    whole = llama.stream(300).result()
    stream = llama.stream(300)
    llama.configure(0, drain_s=40)
    assert stream.result() == whole
    llama.until("every process of the engine to be gone", lambda: not llama.left(), 10)


def test_a_stream_that_does_not_end_is_cut_and_the_engine_goes(llama: Real) -> None:
    llama.start()
    stream = llama.stream(4000)
    took = llama.stopped_within(2 + 5 + 5)
    print(f"stop with a stream {took:.1f} s")
    print(repr(cut(stream)))


def test_a_killed_server_is_started_again(llama: Real) -> None:
    llama.start()
    stream = llama.stream(4000)
    first = llama.replica["pid"]
    os.kill(first, signal.SIGKILL)
    print(repr(cut(stream)))
    assert not members(first)
    llama.until("the restart to be decided", lambda: llama.decisions("restart"))
    (reason,) = llama.decisions("restart")
    assert "ended without being asked while ready: killed by signal 9" in reason
    assert llama.ready_again(2)["pid"] != first
    assert llama.stream(5).result()


def test_the_agent_is_killed_mid_stream_and_its_successor_adopts(llama: Real) -> None:
    llama.start()
    whole = llama.stream(300).result()
    before = llama.replica
    stream = llama.stream(300)
    llama.run.kill_agent()
    assert stream.result() == whole
    llama.run.start_agent()
    llama.until("the node to be back", lambda: llama.run.node_state() == "connected" and llama.run.all_ready())
    assert (llama.replica["pid"], llama.replica["generation"]) == (before["pid"], 1)
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
    llama.profile = llama.profile.replace(str(weights), str(wrong))
    llama.configure()
    llama.run.start_server()
    llama.run.start_agent()
    llama.until("the failure", lambda: llama.replica.get("generation") == 2, 30)
    assert cause in llama.replica["reason"]
    assert remedy in llama.replica["reason"]
    said = llmgw("ctl", "--config", str(llama.system.demo.server_yaml), "replicas").stdout
    assert cause in said
    assert remedy in said
