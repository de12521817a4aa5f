"""What the agent makes of the faults that the fake engine knows, beside those of tests.agent.test_shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
from attrs import evolve

from llmgw.link.messages import StartShard
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from tests.agent.test_shards import INVENTORY, Node, alive, config, processes, running, start

S = ShardState


def within(command: StartShard, load_s: float, stop_s: float = 0.3) -> StartShard:
    limits = evolve(command.profile.limits, load_s=load_s, stop_s=stop_s)
    return evolve(command, profile=evolve(command.profile, limits=limits))


async def post(report: ShardReport, path: str, body: dict[str, object]) -> bytes:
    assert report.endpoint is not None
    host, port = report.endpoint.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    got = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {report.api_key}\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode() + data
        )  # fmt: skip
        async for more in stream:
            got += more
    return got


async def crashed(node: Node, moment: str) -> ShardReport:
    """An engine that crashes then, and what is said of it."""
    await node.shards.start(start(workers=1, crash=moment, exit_code=9), INVENTORY)
    if moment in ("headers", "stream", "now"):
        ready = await node.until(S.READY)
        if moment == "now":
            await post(ready, "/fake/ctl", {"crash": "now"})
        else:
            got = await post(ready, "/v1/completions", {"model": "m", "prompt": "x", "stream": True})
            assert (b"EngineCore died" in got) == (moment == "stream")
    return await node.until_ended()


@pytest.mark.parametrize("moment", ["start", "load", "headers", "stream", "now"])
async def test_a_crash_at_each_moment(folder: Path, moment: str) -> None:
    async with running(config(folder)) as node:
        failed = await crashed(node, moment)
        assert failed.state is S.FAILED
        assert failed.exit == Exit(9)
        assert "the engine ended without being asked while " in failed.reason
        assert f"told to crash at {moment}" in failed.log_tail[-1]
        assert processes(folder) == set()
        if moment in ("headers", "stream", "now"):
            assert "while ready" in failed.reason


async def test_an_engine_that_hangs_while_it_loads_is_named_and_killed(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(within(start(load_s=0.2, hang_loading=True, workers=1), 0.5), INVENTORY)
        failed = await node.until(S.FAILED)
        assert failed.reason.startswith("stood still for 0.5 s at: "), failed.reason
        assert failed.exit == Exit(None, 9), "it does not hear SIGTERM"
        assert (folder / "shards/m-1.0-g1/stacks.txt").exists()
        assert processes(folder) == set()


async def test_an_engine_that_answers_and_never_lists_its_model_is_loading_and_fails(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(within(start(never_ready=True), 0.6, stop_s=20), INVENTORY)
        pid = node.get().pid
        loading = await node.until(S.LOADING)
        assert loading.endpoint is None, "nobody is sent to it"
        failed = await node.until_ended()
        assert (failed.state, failed.exit) == (S.FAILED, Exit(0))
        assert "waited for the model to be listed" in failed.reason
        assert S.READY not in node.states()
        assert not alive(pid)


async def test_an_engine_that_never_answers_fails_when_its_start_is_over(folder: Path) -> None:
    async with running(config(folder)) as node:
        command = start(start_s=3600)
        limits = evolve(command.profile.limits, start_s=0.4, stop_s=1)
        await node.shards.start(evolve(command, profile=evolve(command.profile, limits=limits)), INVENTORY)
        failed = await node.until_ended()
        assert failed.state is S.FAILED
        assert "waited for an answer or a line of progress" in failed.reason
        assert node.states() == [S.STARTING, S.STOPPING, S.FAILED]
