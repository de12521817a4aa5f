"""Engines that behave as no engine should: each is seen for what it is, ended when that is asked, and forgotten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from llmgw.scheduler.state import ShardState
from tests.agent.test_shards import (
    INVENTORY,
    Node,
    alive,
    config,
    processes,
    running,
    start,
    until,
)

S = ShardState

BODIES = {
    "closes its log": "os.close(1); os.close(2)",
    "writes what is no text": r"os.write(1, bytes(range(256)) * 2000 + b'\0' * 70000 + b'\r' * 1000)",
    "never ends its line": "os.write(1, b'x' * 3_000_000)",
    "takes another name": "open('/proc/self/comm', 'w').write(') Z 1 (\\n x')",
    "leads another session": "os.fork() and os._exit(0) if os.fork() == 0 else None\nif os.fork() == 0: os.setsid()",
    "leaves folders": "os.makedirs('cache/deep'); open('cache/deep/file', 'w').close(); os.mkfifo('pipe')",
    "puts pipes where its files are": """
for name in ("engine.log", "engine.log.1", "exit.json"):
    os.mkfifo(name + "~")
    os.rename(name + "~", name)""",
    "removes its folder": "import shutil; time.sleep(0.5); shutil.rmtree(os.getcwd())",
    "fills its environment": "os.environ.clear()",
    "stops itself": "os.kill(0, signal.SIGSTOP)",
    "ignores everything": "[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 17, 19)]",
}
BODY = """
import os, signal, sys, time
open(sys.argv[1], "w").close()
{body}
time.sleep(3600)
"""


async def ends(node: Node) -> None:
    assert alive(node.get().pid)
    began_at = trio.current_time()
    node.get().stop("enough", 0.3)
    stopped = await node.until_ended()
    assert stopped.state is S.STOPPED, stopped
    assert trio.current_time() - began_at < 5
    await node.shards.forget("m-1.0", 1)
    assert node.shards.reports() == ()


@pytest.mark.parametrize("how", BODIES)
async def test_whatever_it_does_it_is_stopped_and_forgotten(folder: Path, how: str) -> None:
    began = folder.parent / "began"
    script = folder.parent / "odd.py"
    script.write_text(BODY.format(body=BODIES[how]).replace("sys.argv[1]", repr(str(began))))
    settings = config(folder, (sys.executable, str(script)))
    async with running(settings) as node:
        await node.shards.start(start(), INVENTORY)
        await until(began.exists)
        await trio.sleep(0.1)
        if how == "removes its folder":  # with it all that the next agent could know it by
            await until(lambda: not (folder / "shards/m-1.0-g1/record.json").exists())
            await ends(node)
    if how != "removes its folder":
        async with running(settings) as node:
            await ends(node)
    assert processes(folder) == set()
    assert list((folder / "shards").iterdir()) == []
