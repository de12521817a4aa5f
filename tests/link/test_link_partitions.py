"""Both ends of a real connection through a network that fails: each notices, and soon."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from fakes.proxy import Proxy
from llmgw.link.client import connect
from llmgw.link.messages import Heartbeat, Register
from llmgw.link.patience import LinkLimits
from llmgw.link.server import serve
from llmgw.link.session import PeerGone, Session
from llmgw.settings.daemon import Address, LinkListener
from tests.link.samples import TRUST_DOMAIN, WELCOME, Pki, register

LIMITS = LinkLimits(ping_s=0.2, silence_s=0.6)
"""A twenty-fifth of the real ones: half a minute of theirs is 1.2 s here."""

HALF_A_MINUTE_S = 1.2


class Ends:
    """A session through a proxy; ``server_said`` is how the control plane's end of it ended."""

    def __init__(self, proxy: Proxy, session: Session) -> None:
        self.proxy = proxy
        self.session = session
        self.heard: list[object] = []
        self.server_said = ""
        self.server_ended = trio.Event()

    async def agent_ends(self) -> str:
        with pytest.raises(PeerGone) as caught:
            await self.session.receive()
        return caught.value.reason

    async def both_end(self) -> str:
        """What the agent says of it; both ends have to be quick."""
        with trio.fail_after(HALF_A_MINUTE_S):
            said = await self.agent_ends()
            await self.server_ended.wait()
        return said


@asynccontextmanager
async def through_a_proxy(pki: Pki) -> AsyncIterator[Ends]:
    ends: Ends | None = None

    async def handler(session: Session, _: Register) -> None:
        await session.send(WELCOME)
        try:
            while True:
                message = await session.receive()
                assert ends is not None
                ends.heard.append(message)
        except PeerGone as gone:
            if ends is not None:
                ends.server_said = gone.reason
                ends.server_ended.set()

    async with trio.open_nursery() as nursery:
        config = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, config, handler, limits=LIMITS))
        proxy: Proxy = await nursery.start(Proxy(address).run)
        async with connect(proxy.address, pki.node(), TRUST_DOMAIN, limits=LIMITS) as session:
            ends = Ends(proxy, session)
            await session.send(register())
            assert await session.receive() == WELCOME
            yield ends
        with trio.fail_after(HALF_A_MINUTE_S):
            await ends.server_ended.wait()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lost", [{"up": True, "down": True}, {"up": True}, {"down": True}], ids=str)
async def test_half_open_is_noticed_by_both_ends(pki: Pki, lost: dict[str, bool]) -> None:
    async with through_a_proxy(pki) as ends:
        ends.proxy.drop(**lost)
        said = await ends.both_end()
    assert "nothing was heard for 0.6 s" in said + ends.server_said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Proxy.cut, "connection broke"),
        (partial(Proxy.half_close, up=True), "closed by the other end|cut"),
        (partial(Proxy.half_close, down=True), "cut"),
    ],
    ids=["cut", "half-closed up", "half-closed down"],
)
async def test_an_end_of_the_connection_is_noticed_at_once(pki: Pki, fault: Callable[[Proxy], None], said: str) -> None:
    async with through_a_proxy(pki) as ends:
        fault(ends.proxy)
        with trio.fail_after(0.5):
            reason = await ends.agent_ends()
        assert any(word in reason for word in said.split("|")), reason


async def test_a_slow_network_is_no_dead_one(pki: Pki) -> None:
    async with through_a_proxy(pki) as ends:
        ends.proxy.delay_s = 0.15  # there and back is less than what silence_s is more than ping_s
        for number in range(4):
            await ends.session.send(Heartbeat(number))
            await trio.sleep(0.25)
        with trio.fail_after(2):
            while len(ends.heard) < 4:
                await trio.sleep(0.05)
        assert not ends.server_ended.is_set()


async def test_a_partition_shorter_than_the_silence_costs_nothing(pki: Pki) -> None:
    async with through_a_proxy(pki) as ends:
        ends.proxy.partition()
        await ends.session.send(Heartbeat(1))
        await trio.sleep(0.3)
        assert ends.heard == []
        ends.proxy.heal()
        with trio.fail_after(0.5):
            while not ends.heard:
                await trio.sleep(0.02)
        assert ends.heard == [Heartbeat(1)]
        assert not ends.server_ended.is_set()
