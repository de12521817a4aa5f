"""One end of an open link: a :class:`~llmgw.link.protocol.LinkProtocol`, a stream, and the tasks between them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext

import trio
from trio.lowlevel import RunVar

from llmgw.errors import PeerError
from llmgw.link.codec import MalformedError, Unknown
from llmgw.link.flood import Pace
from llmgw.link.identity import Certificate
from llmgw.link.messages import Message, Refused
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.protocol import LinkProtocol, Role
from llmgw.link.tcp import Metered
from llmgw.link.tls import alert, explain

_READ_BYTES = 65536
# Ending a session takes the sum of these at most.
_GOODBYE_S = 0.3
_CLOSE_S = 0.2
_REFUSAL_S = 1.0
_READER_FIRST_S = 0.5
_LATE_S = 1.0
_TURN_AWAY_S = 1.0
_ASKED_S = 1.0
_SWEEPS = 12

_LARGE_BYTES = 100_000
"""From here a message is decoded in a thread: four megabytes take a fifth of a second, and nobody else must wait."""

_SMALL_BYTES = 500
_SMALL_S = 0.0001
"""What so few bytes are taken to cost: to ask the clock costs as much."""

_decoding: RunVar[trio.CapacityLimiter] = RunVar("_decoding")
_NAMES = {Role.AGENT: "agent", Role.SERVER: "control plane"}


class PeerGone(PeerError):
    """The link has ended; ``reason`` says how. ``alert`` is set when the other end rejected our certificate."""

    def __init__(self, thing: str, reason: str, remedy: str = "", *, alert: str | None = None) -> None:
        super().__init__(thing, reason, remedy)
        self.alert = alert


class Unreached(PeerGone):
    """Nobody took the connection: the address is not listened on, or no packet comes through."""


class LinkRefused(PeerError):
    """The control plane will not have this agent, and ``refused`` says why. Trying again changes nothing by itself."""

    def __init__(self, thing: str, refused: Refused) -> None:
        reason = f"refused because of the {refused.claim}: wanted {refused.wanted}, found {refused.found}"
        super().__init__(thing, f"{reason} (certificate: {refused.certificate})", refused.remedy)
        self.refused = refused


class Session:
    """An open link, usable inside the scope of :func:`open_session`.

    ``peer`` is the id of the node or the control plane at the other end, ``remote`` its address for people; ``chain``
    is what that showed, verified, where there was TLS.
    Several tasks may send; one receives.
    """

    def __init__(self, stream: trio.abc.Stream, role: Role, peer: str, remote: str, limits: LinkLimits) -> None:
        self.peer = peer
        self.remote = remote
        self.chain: tuple[Certificate, ...] = ()
        self._stream = stream
        self._limits = limits
        self._protocol = LinkProtocol(role, trio.current_time(), limits)
        self._changed = trio.lowlevel.ParkingLot()  # a message, an end, or the beginning
        self._room = trio.lowlevel.ParkingLot()
        self._to_write = trio.lowlevel.ParkingLot()
        self._writer_gone = trio.Event()
        self._write_is_whole = True
        transport = getattr(stream, "transport_stream", None)
        self._meter = transport if isinstance(transport, Metered) else None
        self._alert: str | None = None
        self._heard = trio.lowlevel.ParkingLot()
        self._pace = Pace(trio.current_time())
        self._paced_until = self._asked_until = self._answered_until = -math.inf
        self._patience_s = self._patient_until = math.inf

    async def send(self, message: Message) -> None:
        """Queue a message, waiting for room if the other end is slow; a cancelled call has queued nothing.

        Raises :class:`PeerGone` or :class:`LinkRefused` after the end, and ends the link itself when there was
        no room for ``send_s``.
        """
        with trio.move_on_after(self._limits.send_s):
            await trio.lowlevel.checkpoint()
            while not self._protocol.room and self._protocol.ended is None:
                await self._room.park()
        if not self._protocol.room:
            self.close(f"the other end took nothing for {self._limits.send_s:g} s")
            raise self._failure()
        self._protocol.send(message, trio.current_time())
        self._to_write.unpark_all()

    async def receive(self) -> Message | Unknown:
        """The next message; a cancelled call has taken none. Answer ``Unknown`` with ``NotUnderstood``.

        Raises :class:`PeerGone` after the end, once everything that came before it was taken, and
        :class:`LinkRefused` on an agent that the control plane refused.
        """
        if self._protocol.ended is not None or self._protocol.arrived:
            await trio.lowlevel.checkpoint()
        while True:
            if (payload := self._protocol.first()) is not None:
                message, cost_s = await self._decode(payload)
                await self._charge(cost_s)
                self._protocol.took(message)
                self._stir()  # taking gives the sender's window back
                if isinstance(message, Refused):
                    raise LinkRefused(self._thing, message)
                if not isinstance(message, MalformedError):
                    return message
            if self._protocol.ended is not None:
                raise self._failure()
            await self._changed.park()

    async def _decode(self, payload: bytes) -> tuple[Message | Unknown | MalformedError, float]:
        """What it says, and the processor time that it took to see that."""

        def decode() -> tuple[Message | Unknown | MalformedError, float]:
            began = time.thread_time()
            try:
                message: Message | Unknown | MalformedError = self._protocol.decode(payload)
            except MalformedError as malformed:
                message = malformed
            return message, time.thread_time() - began

        if len(payload) <= _SMALL_BYTES:
            with contextlib.suppress(MalformedError):
                return self._protocol.decode(payload), _SMALL_S
        if len(payload) < _LARGE_BYTES:
            return decode()
        try:
            limiter = _decoding.get()
        except LookupError:
            limiter = trio.CapacityLimiter(1)
            _decoding.set(limiter)
        return await trio.to_thread.run_sync(decode, abandon_on_cancel=True, limiter=limiter)

    async def _charge(self, cost_s: float) -> None:
        """Let a peer that takes more than its share of the time wait."""
        now = trio.current_time()
        if (wait_s := self._pace.spent(cost_s, now)) > 0:
            self._paced_until = now + wait_s
            await trio.sleep(wait_s)

    async def receive_within(self, seconds: float) -> Message | Unknown:
        """As :meth:`receive`, and ends the link when no message comes in this time, which is longer than a PING's.

        The other end may answer PINGs and be stuck all the same.
        """
        self._patience_s, self._patient_until = seconds, trio.current_time() + seconds
        try:
            return await self.receive()
        finally:
            self._patient_until = math.inf

    async def answers(self, within_s: float) -> bool:
        """Whether the other end is there: it is sent a PING, and anything that it says within this time is an answer.

        Asked at most once in a second, however many want to know: a peer that is pinged without end hangs up. One that
        we ourselves let wait, because of what it costs, counts as there.
        """
        now = trio.current_time()
        if self._protocol.ended is None and now < max(self._answered_until, self._paced_until):
            return True
        if now >= self._asked_until:
            self._asked_until = now + _ASKED_S
            self._protocol.ask(now)
            self._to_write.unpark_all()
        until = now + within_s
        while self._protocol.ended is None:
            with trio.move_on_at(until):
                await self._heard.park()
                self._answered_until = trio.current_time() + _ASKED_S
                return self._protocol.ended is None
            if (now := trio.current_time()) <= until + _LATE_S:
                return False
            until = now + _LATE_S  # this process stood still: what came meanwhile is read first
        return False

    def offer(self, message: Message) -> bool:
        """Queue a message if there is room for it now; whether it was."""
        if not self._protocol.room:
            return False
        self._protocol.send(message, trio.current_time())
        self._to_write.unpark_all()
        return True

    async def refuse(self, refused: Refused) -> None:
        """Control plane, before its first message: tell the agent why not, and see that it has heard.

        Takes a second at most. The session is of no use afterwards.
        """
        self._protocol.refuse(refused)
        self._to_write.unpark_all()
        with trio.move_on_after(_REFUSAL_S):
            await trio.lowlevel.checkpoint()
            while self._protocol.ended is None:
                await self._changed.park()

    def close(self, reason: str) -> None:
        """End the link: the other end is told ``reason``, tasks that wait in send or receive wake up."""
        self._protocol.close(reason)
        self._stir()

    @property
    def _thing(self) -> str:
        return f"link with {self.peer or 'unknown'} at {self.remote}"

    def _failure(self) -> PeerError:
        ended = self._protocol.ended
        if ended is not None and ended.refused is not None:
            return LinkRefused(self._thing, ended.refused)
        return PeerGone(self._thing, ended.reason if ended else "is not open", alert=self._alert)

    def _stir(self) -> None:
        """Wake those whom the protocol's new state may concern: a thousand sessions are woken for nothing otherwise."""
        if self._protocol.ended is not None:
            self._changed.unpark_all()
            self._heard.unpark_all()
        if self._protocol.ended is not None or self._protocol.room:
            self._room.unpark_all()
        if self._protocol.ended is not None or self._protocol.to_write:
            self._to_write.unpark_all()

    async def _wait_opened(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self._protocol.opened:
            if self._protocol.ended is not None:
                raise self._failure()
            await self._changed.park()

    async def _read(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._protocol.ended is None:
            try:
                data = await self._stream.receive_some(_READ_BYTES)
            except trio.BrokenResourceError as broken:
                self._alert = alert(broken)
                self._protocol.lost(explain(broken))
            else:
                if data:
                    if self._meter is not None:
                        self._meter.held(len(data))
                    began = time.thread_time() if len(data) > _SMALL_BYTES else None
                    self._heard.unpark_all()
                    if self._protocol.receive(bytes(data), trio.current_time()):
                        self._changed.unpark_all()
                    self._stir()
                    await self._charge(_SMALL_S if began is None else time.thread_time() - began)
                    continue
                self._protocol.lost("the connection was cut")
            self._stir()

    async def _write(self) -> None:
        try:
            await self._write_until_end()
        except trio.BrokenResourceError as broken:
            # What the other end said before it hung up tells more than a broken pipe.
            with trio.move_on_after(_READER_FIRST_S):
                await trio.lowlevel.checkpoint()
                while self._protocol.ended is None:
                    await self._changed.park()
            self._protocol.lost(explain(broken))
            self._stir()
        finally:
            self._writer_gone.set()

    async def _write_until_end(self) -> None:
        await trio.lowlevel.checkpoint()
        while True:
            while not (data := self._protocol.data_to_send()):
                if self._protocol.ended is not None:
                    return
                await self._to_write.park()
            self._write_is_whole = False
            await self._stream.send_all(data)
            self._write_is_whole = True
            if self._protocol.room or self._protocol.ended is not None:
                self._room.unpark_all()

    async def _watch(self) -> None:
        at = self._look(trio.current_time())
        while True:
            await trio.sleep_until(at)  # for ever after the end
            at = self._look(trio.current_time())

    def _look(self, now: float) -> float:
        """Let time pass; returns when to look again. Patience begins to count meanwhile; it is longer than this."""
        if now > self._patient_until + _LATE_S:
            self._patient_until = now + _LATE_S  # this process stood still: what came meanwhile is taken first
        elif now >= self._patient_until:
            self._protocol.close(f"no message came for {self._patience_s:g} s")
        if now >= self._protocol.next_deadline() or now >= self._patient_until:
            self._protocol.tick(now)
            self._stir()
        return min(self._protocol.next_deadline(), self._patient_until)

    async def _say_goodbye(self) -> None:
        """Write what is left. A writer that was cancelled in the middle of a write leaves nothing to say."""
        await self._writer_gone.wait()
        if self._write_is_whole and (rest := self._protocol.data_to_send()):
            with contextlib.suppress(trio.BrokenResourceError):
                await self._stream.send_all(rest)


class Watch:
    """Looks after the silence of many sessions in one task, where each would else wake up for it every few seconds."""

    def __init__(self, limits: LinkLimits = DEFAULT_LIMITS) -> None:
        self._every_s = limits.ping_s / _SWEEPS
        self._due: dict[Session, float] = {}

    async def run(self) -> None:
        """Until cancelled; what is due is seen to a twelfth of ``ping_s`` later at most, which is half a second."""
        while True:
            await trio.sleep(self._every_s)
            now = trio.current_time()
            for session in [session for session, at in self._due.items() if now >= at]:
                self._due[session] = session._look(now)

    @contextmanager
    def over(self, session: Session) -> Iterator[None]:
        """Look after this one meanwhile."""
        self._due[session] = session._look(trio.current_time())
        try:
            yield
        finally:
            del self._due[session]


async def turn_away(stream: trio.abc.Stream, reason: str) -> None:
    """Control plane: end a connection before anything of it is looked at, and say why. Takes a second at most."""
    await trio.lowlevel.checkpoint()
    protocol = LinkProtocol(Role.SERVER, trio.current_time())
    protocol.overload(reason)
    with trio.move_on_after(_TURN_AWAY_S), contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(protocol.data_to_send())
        # Our own close must not overtake it.
        while await stream.receive_some(_READ_BYTES):
            pass
    await trio.aclose_forcefully(stream)


@asynccontextmanager
async def open_session(
    stream: trio.abc.Stream,
    role: Role,
    *,
    peer: str,
    remote: str,
    limits: LinkLimits = DEFAULT_LIMITS,
    watch: Watch | None = None,
) -> AsyncIterator[Session]:
    """Run the link over ``stream`` for the length of the scope; the stream is closed at its end.

    ``watch``, which somebody runs, looks after its silence; without one a task of its own does.

    Yields once the other end has shown that it speaks the protocol: for the control plane, that it was asked for
    the link; for the agent, that TLS was accepted. Raises :class:`PeerGone` if that does not come. However the
    scope ends, it ends within half a second, even against a peer that reads nothing.
    """
    session = Session(stream, role, peer, remote, limits)
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            own = () if watch is not None else (session._watch,)
            for task in (session._read, session._write, *own):
                nursery.start_soon(task, name=f"link {task.__name__} {remote}")
            try:
                with nullcontext() if watch is None else watch.over(session):
                    await session._wait_opened()
                    yield session
            except Exception as error:  # noqa: BLE001 (raised again below, as itself and not in a group of one)
                failure = error
            finally:
                session.close(f"the {_NAMES[role]} ended the session")
                with trio.move_on_after(_GOODBYE_S, shield=True):
                    await session._say_goodbye()
                nursery.cancel_scope.cancel(reason="session over")
    finally:
        with trio.move_on_after(_CLOSE_S, shield=True), contextlib.suppress(trio.BrokenResourceError):
            await stream.aclose()
    if failure is not None:
        raise failure
