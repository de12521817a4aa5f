"""One replica over two nodes with vLLM's CPU build: two agents on this machine, whose ranks meet over loopback.

The order makes one start serve several tests; each of them also runs alone.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest

from fakes import tiny_model
from llmgw.cli.demo_files import NODE, DemoEngine, Engine
from tests.e2e.real import VLLM_ON_CPU, Keeper, Real, cut, listening, members, program, real
from tests.e2e.second import SECOND

pytestmark = pytest.mark.real_engine

STOP_S = 5 + 5
"""The grace of the profile, and some time for SIGKILL."""


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    vllm = program("LLMGW_TEST_VLLM")
    weights = tmp_path_factory.mktemp("weights")
    tiny_model.write(weights)
    profile = f"weights: {weights / 'hf'}, gpus: 1, nodes: 2, tp: 2, {VLLM_ON_CPU}"
    # Ranks that share /dev/shm take themselves to be on one node, and meet on unix sockets as well: in one folder then.
    with tempfile.TemporaryDirectory() as sockets:
        wrapper = weights / "vllm"
        wrapper.write_text(f'#!/bin/sh\nVLLM_RPC_BASE_PATH={sockets} exec {vllm} "$@"\n')
        wrapper.chmod(0o700)

        def make(folder: Path) -> AbstractContextManager[Real]:
            return real(folder, Engine(DemoEngine.VLLM, str(wrapper)), profile, second_at="127.0.0.2")

        kept = Keeper(make, tmp_path_factory)
        yield kept
        kept.close()


@pytest.fixture
def pair(keeper: Keeper, request: pytest.FixtureRequest) -> Iterator[Real]:
    with keeper.lend(request.session) as made:
        yield made


def pids(pair: Real) -> dict[str, int]:
    """The first process of each rank, by node."""
    return {shard["node"]: shard["pid"] for shard in pair.replica["shards"]}


def test_two_ranks_meet_and_serve(pair: Real) -> None:
    seen = pair.start()
    of_rank_1 = [row["shards"][1]["reason"] for row in seen]
    assert "process started, joins rank 0" in of_rank_1
    assert of_rank_1[-1] == "loaded, serves through rank 0"
    row = pair.replica
    assert row["nodes"] == [NODE, SECOND]
    assert row["fabric"] == "rack-1"
    assert pair.stream(50).result() == pair.stream(50).result()

    # torch's rendezvous listens everywhere whatever it is told: said, and no reason to end it.
    everywhere = [port for address, port in listening(members(row["pid"])) if not address.strip("0")]
    assert len(everywhere) == 1
    said = f"{NODE}: listens for its own processes on [::]:{everywhere[0]}: keep those ports behind a firewall"
    pair.until("the warning", lambda: pair.replica["warnings"])
    assert [warning.replace("0.0.0.0", "[::]") for warning in pair.replica["warnings"]] == [said]
    assert pair.replica["state"] == "ready"


def fails(pair: Real, why: str | tuple[str, ...], generation: int, before: dict[str, int]) -> None:
    """The whole replica fails by what a rank did, which is named, and both ranks go."""
    name = pair.replica["id"]
    pair.until("the failure to be told", lambda: pair.replica["generation"] == generation + 1, 15)
    assert pair.decisions("restart", name)[0].startswith(why)
    took = pair.until("both ranks to be gone", lambda: not any(members(pid) for pid in before.values()), STOP_S)
    print(f"both ranks gone {took:.1f} s after: {why}")


def serves_again(pair: Real, rank: int, generation: int, before: dict[str, int]) -> None:
    """Both ranks are started anew, and the log of the one that failed is kept."""
    pair.ready_again(generation + 1)
    assert not set(before.values()) & set(pids(pair).values())
    kept = pair.states[rank] / "logs" / f"{pair.replica['id']}.{rank}-g{generation}" / "engine.log"
    assert f"rank {rank} in world size 2" in kept.read_text(errors="replace")
    assert pair.stream(5).result()


def test_rank_1_killed(pair: Real) -> None:
    row = pair.serving()
    before = pids(pair)
    assert pair.run.agent is not None
    # Rank 0 is not ended before its agent goes on: so it can be seen that its own word is worth nothing. A request
    # would end it.
    pair.run.agent.send_signal(signal.SIGSTOP)
    try:
        os.killpg(before[SECOND], signal.SIGKILL)
        pair.until("the failure to be told", lambda: pair.replica["state"] != "ready")
        assert pair.ask_engine("/health", with_key=True)[0] == 200
        pair.until("the route to be gone", lambda: refused(pair), 5)
    finally:
        pair.run.agent.send_signal(signal.SIGCONT)
    why = f"rank 1 on {SECOND}: the engine ended without being asked while ready: killed by signal 9"
    fails(pair, why, row["generation"], before)
    serves_again(pair, 1, row["generation"], before)


def refused(pair: Real) -> bool:
    """Whether the router has nobody for a request."""
    try:
        with pair.system.client() as client:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=1, timeout=1
            )
    except openai.APITimeoutError:
        return False
    except openai.InternalServerError as said:
        return said.status_code == 503 and "No replica" in str(said)
    return False


def test_rank_0_killed_mid_stream(pair: Real) -> None:
    row = pair.serving()
    before = pids(pair)
    stream = pair.stream(4000)
    os.kill(before[NODE], signal.SIGKILL)
    print(cut(stream))
    why = f"rank 0 on {NODE}: the engine ended without being asked while ready: killed by signal 9"
    fails(pair, why, row["generation"], before)
    serves_again(pair, 0, row["generation"], before)


def test_a_stop_with_a_stream_ends_both_ranks(pair: Real) -> None:
    pair.serving()
    stream = pair.stream(4000)
    print(f"stop with a stream {pair.stopped_within(2 + STOP_S):.1f} s; {cut(stream)}")


def test_rank_1_s_worker_killed_while_nobody_asks(pair: Real) -> None:
    row = pair.serving()
    before = pids(pair)
    (victim,) = (pid for pid, line in members(before[SECOND]).items() if line.startswith("VLLM::Worker"))
    os.kill(victim, signal.SIGKILL)
    # The worker is missed first, or the engine has ended over it before anybody looked.
    seen = f"rank 1 on {SECOND}: pid {victim} VLLM::Worker_TP1 ended without being asked"
    late = f"rank 1 on {SECOND}: the engine ended without being asked while ready: exit code 0"
    fails(pair, (seen, late), row["generation"], before)
