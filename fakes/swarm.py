"""Many agents in one process: real links over real TLS, and no engines.

    python -m fakes.swarm FOLDER FIRST COUNT PORT [HOST]

Agent ``i`` of ``FIRST`` … is ``node-i``, with its certificate in ``FOLDER/node-i``; what hardware each has is in
``FOLDER/inventory.json``. Says on standard output, as a line of JSON and whenever it changed, how many are connected
and when (``time.monotonic``, which all processes of a machine share).
"""

from __future__ import annotations

import json
import random
import sys
import time
from functools import partial
from pathlib import Path

import orjson
import trio
from attrs import evolve

from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch
from llmgw.agent.outbox import Outbox
from llmgw.agent.session import Link
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Inventory
from llmgw.link.client import Backoff, connect
from llmgw.link.codec import converter
from llmgw.link.messages import StartShard
from llmgw.settings.daemon import Address, AgentConfig, Log, LogLevel, TlsFiles
from llmgw.telemetry.logging import configure

TRUST_DOMAIN = "swarm.llmgw"
_LOOK_S = 0.02


class KeptEpoch:
    """An epoch in memory."""

    highest = 0

    async def write(self, epoch: int) -> None:
        """Keep it."""
        self.highest = epoch


class NoShards:
    """A node on which nothing runs, and nothing can be started."""

    def find(self, shard: str, generation: int) -> None:
        """Nothing is here."""
        return

    async def start(self, command: StartShard, inventory: Inventory) -> None:
        """Nothing can be started."""
        raise OperatorError(command.shard, "cannot be started: this is no real node")

    async def forget(self, shard: str, generation: int) -> None:
        """There is nothing to forget."""
        await trio.lowlevel.checkpoint()


def tls_of(folder: Path, node: str) -> TlsFiles:
    """Where a node's files are."""
    place = folder / node
    return TlsFiles(str(place / "cert.pem"), str(place / "key.pem"), str(place / "ca.pem"))


def link_of(folder: Path, node: str, address: Address, inventory: Inventory, source: random.Random) -> Link:
    """One agent's link, as :mod:`llmgw.agent.main` makes it."""
    config = AgentConfig(
        id=node,
        control_planes=(address,),
        tls=tls_of(folder, node),
        state_dir="",
        trust_domain=TRUST_DOMAIN,
    )
    here = evolve(inventory, host=evolve(inventory.host, hostname=node, boot_id=f"boot of {node}"))
    epoch = Epoch(KeptEpoch())
    dispatch = Dispatch(NoShards(), epoch, lambda: here)
    dial = partial(connect, tls=config.tls, trust_domain=config.trust_domain)
    return Link(config, dial, tuple, dispatch, lambda: here, epoch, Outbox(), Backoff(source), time.time)


async def _swarm(folder: Path, first: int, count: int, address: Address) -> None:
    inventory = converter().structure(orjson.loads((folder / "inventory.json").read_bytes()), Inventory)
    source = random.Random(first)
    links = [link_of(folder, f"node-{n}", address, inventory, source) for n in range(first, first + count)]
    connected = -1
    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(link.run)
        while True:
            now = sum(link.state.connected for link in links)
            if now != connected:
                connected = now
                print(json.dumps({"connected": connected, "at": time.monotonic()}), flush=True)
            await trio.sleep(_LOOK_S)


if __name__ == "__main__":
    configure(Log(level=LogLevel.ERROR), "swarm")
    there = Address(sys.argv[5] if len(sys.argv) > 5 else "127.0.0.1", int(sys.argv[4]))
    trio.run(_swarm, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), there)
