"""Two network namespaces and a cable between them that can be pulled without anybody being told: TCP as it really is.

Needs root and iproute2, and minutes: ``pytest -m soak tests/link/test_link_namespaces.py -s``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import frozen

from fakes.swarm import TRUST_DOMAIN
from llmgw.hardware.inventory import Host, Inventory
from llmgw.link import ca
from llmgw.link.codec import converter
from llmgw.link.messages import Heartbeat, HeartbeatSeen, Register, Welcome
from llmgw.link.server import serve
from llmgw.link.session import PeerGone, Session
from llmgw.settings.daemon import Address, LinkListener, TlsFiles

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]

HERE, THERE = "10.91.7.1", "10.91.7.2"
NOWHERE = "02:00:00:00:00:99"


def ip(*words: str, inside: str = "") -> str:
    argv = ["ip", *(["netns", "exec", inside, "ip"] if inside else []), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@frozen
class Cable:
    """A pair of virtual interfaces, the other in ``namespace``."""

    namespace: str
    here: str
    there: str

    def _address_of(self, device: str, inside: str = "") -> str:
        return str(json.loads(ip("-json", "link", "show", device, inside=inside))[0]["address"])

    def _send_to(self, here: str, there: str) -> None:
        ip("neigh", "replace", THERE, "lladdr", there, "dev", self.here, "nud", "permanent")
        ip("neigh", "replace", HERE, "lladdr", here, "dev", self.there, "nud", "permanent", inside=self.namespace)

    def pull(self) -> None:
        """Frames go to an address that nobody has: they vanish, and no packet says so."""
        self._send_to(NOWHERE, NOWHERE)

    def plug(self) -> None:
        self._send_to(self._address_of(self.here), self._address_of(self.there, self.namespace))


@pytest.fixture
def cable() -> Iterator[Cable]:
    name = f"lg{os.getpid()}"
    made = Cable(name, f"{name}a", f"{name}b")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"no network namespaces here: {refused.stderr.strip()}")
    try:
        ip("link", "add", made.here, "type", "veth", "peer", "name", made.there, "netns", name)
    except subprocess.CalledProcessError:
        ip("netns", "del", name)
        raise
    try:
        ip("addr", "add", f"{HERE}/24", "dev", made.here)
        ip("addr", "add", f"{THERE}/24", "dev", made.there, inside=name)
        ip("link", "set", made.here, "up")
        ip("link", "set", made.there, "up", inside=name)
        made.plug()
        yield made
    finally:
        # A namespace takes its links with it some time after it is gone; the next test has one of the same name.
        ip("link", "del", made.here)
        ip("netns", "del", name)


@pytest.mark.parametrize("seconds", [1, 5, 15, 40, 120])
async def test_a_cable_that_is_pulled(cable: Cable, tmp_path: Path, seconds: float) -> None:
    now = time.time()
    ca.init(tmp_path / "ca", TRUST_DOMAIN, now)
    tls = ca.issue_server(tmp_path / "ca", (HERE,), tmp_path / "server", 1, now)
    assert isinstance(tls, TlsFiles)
    ca.issue_node(tmp_path / "ca", "node-0", tmp_path / "node-0", 1, now)
    inventory = converter().unstructure(Inventory(Host("host", "boot"), "none"))
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    heard, ended = [0.0], [0.0]

    async def handler(session: Session, _: Register) -> None:
        await session.send(Welcome(1, "0", "c", 1, 0.5))
        try:
            while True:
                if isinstance(message := await session.receive(), Heartbeat):
                    heard.append(time.monotonic())
                    session.offer(HeartbeatSeen(message.sequence))
        except PeerGone:
            ended.append(time.monotonic())

    said: list[tuple[float, int]] = []
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(
            partial(serve, LinkListener(tls, Address(HERE, 0), trust_domain=TRUST_DOMAIN), handler)
        )
        argv = ["ip", "netns", "exec", cable.namespace, sys.executable, "-m", "fakes.swarm"]
        agent: trio.Process = await nursery.start(
            partial(trio.run_process, [*argv, str(tmp_path), "0", "1", str(address.port), HERE],
                    stdout=subprocess.PIPE, check=False)
        )  # fmt: skip

        async def read() -> None:
            assert agent.stdout is not None
            rest = b""
            async for more in agent.stdout:
                *lines, rest = (rest + more).split(b"\n")
                rows = [json.loads(line) for line in lines]
                said.extend((row["at"], row["connected"]) for row in rows if "connected" in row)

        nursery.start_soon(read)
        with trio.fail_after(20):
            while len(heard) < 3:
                await trio.sleep(0.05)
        cable.pull()
        pulled = time.monotonic()
        await trio.sleep(seconds)
        cable.plug()
        plugged = time.monotonic()
        with trio.fail_after(30):
            while heard[-1] < plugged:
                await trio.sleep(0.02)
        back = heard[-1] - plugged
        lost = [at - pulled for at, connected in said if connected == 0 and at > pulled]
        noticed = ended[-1] - pulled
        nursery.cancel_scope.cancel()
    print(f"\n{seconds} s: back {back:.2f} s after it; agent noticed after {lost}, control plane after {noticed:.1f} s")
    assert back < 5
    if seconds >= 40:
        assert lost
        assert lost[0] < 30
        assert 0 < noticed < 30
