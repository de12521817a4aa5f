"""Which of several control planes leads: taken, held, and given up in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from llmgw.errors import OperatorError
from llmgw.store.lease import RENEW_S, STOP_S, Leader, Leases
from llmgw.telemetry.logging import logger

_LOOK_S = 1.0
_RELEASE_S = 2.0


class Leadership:
    """One control plane's part in it. ``clock`` is monotonic, in seconds."""

    def __init__(self, leases: Leases, me: Leader, clock: Callable[[], float] = trio.current_time) -> None:
        self.leases = leases
        self._clock = clock
        self._log = logger("leader")
        self.me = me
        self.epoch = 0
        self.leads = False
        self.known: Leader | None = None
        """Who led when it was last looked; ``None`` where nobody did, or that could not be seen."""
        self._keeping = trio.CancelScope()

    async def take(self) -> bool:
        """Whether it leads from now on, under :attr:`epoch`. Raises :class:`OperatorError` of the store."""
        began = self._clock()
        epoch = await self.leases.take(self.me)
        if epoch is None:
            self.known = await self.leases.leader()
            return False
        self.epoch, self._held, self.known, self.leads = epoch, began, self.me, True
        return True

    @asynccontextmanager
    async def kept(self, over: Callable[[str], None]) -> AsyncIterator[None]:
        """Hold the lease, or look on for a free one, while the body starts and serves, however long that takes.

        ``over`` is told why when this part in it is over. The lease of a body that fails is released; otherwise that is
        the body's part.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep, over)
            try:
                yield
            except BaseException:
                if self.leads:
                    with trio.move_on_after(_RELEASE_S, shield=True):
                        await self.release()
                raise
            finally:
                self._keeping.cancel(reason="what it was kept for is over")

    async def _keep(self, over: Callable[[str], None]) -> None:
        with self._keeping:
            if self.leads:
                reason = await self.hold()
                self._log.error("no longer the leader", reason=reason)
            else:
                await self.follow()
                reason = "nobody leads"
                self._log.warning("nobody leads: standing for it")
            over(reason)

    async def hold(self) -> str:
        """Renew the lease until it is lost; returns why it is.

        What counts is when a renewal that succeeded was begun: the database may have seen it then, and no later. A
        renewal that hangs is not waited for beyond that.
        """
        failure = ""
        while True:
            with trio.move_on_at(trio.current_time() + self._held + STOP_S - self._clock()):
                await trio.sleep(RENEW_S if not failure else _LOOK_S)
                began = self._clock()
                try:
                    if not await self.leases.renew(self.me, self.epoch):
                        return "the lease was taken by another control plane"
                    self._held, failure = began, ""
                    continue
                except OperatorError as failed:
                    if failed.reason != failure:
                        self._log.warning("the lease cannot be renewed", error=str(failed))
                    failure = failed.reason
            if self._clock() - self._held >= STOP_S:
                return f"the lease could not be renewed for {STOP_S:g} s: {failure or 'the store does not answer'}"

    async def release(self) -> None:
        """Let another one lead at once; one that cannot be released runs out by itself."""
        self._keeping.cancel(reason="the lease is released")
        try:
            with trio.move_on_after(_RELEASE_S):
                await self.leases.release(self.me, self.epoch)
        except OperatorError as failed:
            self._log.warning("the lease is not released, and runs out", error=str(failed))

    async def follow(self) -> None:
        """Look on until nobody leads; keeps :attr:`known` true."""
        while True:
            await trio.sleep(_LOOK_S)
            try:
                leader = await self.leases.leader()
            except OperatorError as failed:
                # Nobody can lead without the store; what was known last is what is said.
                self._log.warning("it cannot be seen who leads", error=str(failed))
                continue
            if leader is None:
                return
            if leader != self.known:
                self._log.info("leader", holder=leader.holder, link=leader.link, admin=leader.admin)
            self.known = leader
