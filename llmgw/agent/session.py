"""The agent's side of the link: dial, register, report, obey; and again, for ever."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import trio
from attrs import evolve, frozen

from llmgw import __version__
from llmgw.agent.dispatch import Dispatch
from llmgw.agent.epoch import Epoch
from llmgw.agent.identity import NodeIdentity
from llmgw.agent.offers import Offers
from llmgw.agent.outbox import Outbox
from llmgw.agent.tails import Tails
from llmgw.agent.weights import Weights
from llmgw.errors import LlmgwError, OperatorError, PeerError
from llmgw.hardware.delta import diff
from llmgw.hardware.inventory import Inventory
from llmgw.link.client import Backoff
from llmgw.link.codec import Unknown, UnsendableError
from llmgw.link.messages import (
    PROTOCOL,
    AgentMessage,
    CancelJob,
    CertificateIssued,
    Command,
    DrainShard,
    EnginesChanged,
    ForgetShard,
    HardwareChanged,
    Heartbeat,
    HeartbeatSeen,
    LogChunk,
    LookForWeights,
    NotLeader,
    NotUnderstood,
    Refused,
    Register,
    RenewalRefused,
    RunDoctor,
    RunJob,
    SettingsChanged,
    StartShard,
    StopShard,
    StopTail,
    TailLog,
    TrustBundle,
    Welcome,
)
from llmgw.link.renewal import RENEWAL
from llmgw.link.session import LinkRefused, PeerGone, Session, Unreached
from llmgw.scheduler.jobs import Installed, JobReport
from llmgw.scheduler.scale import EngineLoad
from llmgw.scheduler.state import ShardReport
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import Address, AgentConfig
from llmgw.telemetry.logging import logger

_WELCOME_S = 10.0

_BEAT_FROM_S = 0.1
"""Whatever the control plane asks for, heartbeats come no closer than its settings allow."""

_SILENT_BEATS = 5
_PATIENCE_S = 15.0
"""A control plane that has answered heartbeats and then lets so many go by, and at least this long, is left."""

_COMMANDS_WAITING = 100
"""Beyond these nothing more is read: flow control then stops the control plane."""

MakeTails = Callable[[Callable[[LogChunk], Awaitable[None]]], Tails]
"""Makes the readers of logs of one session, given what sends a chunk."""

Dial = Callable[[Address], AbstractAsyncContextManager[Session]]
"""Opens the link to a control plane, see :func:`llmgw.link.client.connect`."""


@frozen
class LinkState:
    """How the link stands: ``connected`` or why not, and since when (epoch seconds).

    ``refused`` is set while the control plane will not have us.
    """

    connected: bool
    control_plane: str
    reason: str
    since: float
    remedy: str = ""
    refused: Refused | None = None


class Link:
    """Keeps one session with a control plane, whichever of them will have us.

    ``reports``, ``inventory``, ``loads``, ``jobs`` and ``installs`` are asked for the shards, the hardware, the
    engines' work, the jobs and the installed engines of now. Without ``weights`` none are looked at, without
    ``identity`` no certificate is renewed, without ``settings`` none are taken. ``stands`` is told whenever the link
    stands otherwise than before.
    """

    def __init__(
        self,
        config: AgentConfig,
        dial: Dial,
        reports: Callable[[], tuple[ShardReport, ...]],
        dispatch: Dispatch,
        inventory: Callable[[], Inventory],
        epoch: Epoch,
        outbox: Outbox,
        backoff: Backoff,
        clock: Callable[[], float],
        loads: Callable[[], tuple[EngineLoad, ...]] = tuple,
        weights: Weights | None = None,
        *,
        jobs: Callable[[], tuple[JobReport, ...]] = tuple,
        installs: Callable[[], tuple[Installed, ...]] = tuple,
        identity: NodeIdentity | None = None,
        settings: Offers | None = None,
        stands: Callable[[LinkState], None] = lambda _: None,
        tails: MakeTails | None = None,
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._installs = installs
        self._identity = identity
        self._settings = settings
        self._stands = stands
        self._make_tails = tails
        self._dial = dial
        self._weights = weights
        self._reports = reports
        self._dispatch = dispatch
        self._inventory = inventory
        self._epoch = epoch
        self._outbox = outbox
        self._backoff = backoff
        self._clock = clock
        self._loads = loads
        self._log = logger("link")
        self._said = ""
        self._leader: Address | None = None
        self.state = LinkState(False, "", "not connected yet", clock())

    async def run(self) -> None:
        """Connect, serve, back off; for ever. Each control plane in turn, and one that was named as leader first."""
        turn = 0
        while True:
            address, self._leader = self._leader, None
            if address is None:
                address = self._config.control_planes[turn % len(self._config.control_planes)]
                turn += 1
            unreached, told_s = False, 0.0
            try:
                await self._session(address)
            except LlmgwError as ended:
                unreached = isinstance(ended, Unreached)
                told_s = ended.refused.wait_s if isinstance(ended, LinkRefused) else 0.0
                self._disconnected(address, ended)
            await trio.sleep(self._backoff.next_s(unreached=unreached, told_s=told_s))

    def _disconnected(self, address: Address, ended: LlmgwError) -> None:
        refused = ended.refused if isinstance(ended, LinkRefused) else None
        # Where it is no fault of the other end, the reason alone does not say whose.
        reason = f"{ended.thing} {ended.reason}" if isinstance(ended, OperatorError) else ended.reason
        state = LinkState(False, str(address), reason, self._clock(), ended.remedy, refused)
        # Once a change, not once a try: an agent that is refused all night must not fill its log.
        # What a refusal wanted may hold the time of day, so it is told by its claim and by what was found.
        told = f"{ended.refused.claim} {ended.refused.found}" if isinstance(ended, LinkRefused) else ended.reason
        said = f"{type(ended).__name__} {ended.thing} {told}"
        if said == self._said:
            self.state = evolve(state, since=self.state.since)
            return
        self._said = said
        self.state = state
        self._stands(state)
        what = "refused by the control plane" if isinstance(ended, LinkRefused) else "not connected"
        write = self._log.error if isinstance(ended, LinkRefused | OperatorError) else self._log.warning
        write(what, control_plane=str(address), reason=reason, remedy=ended.remedy)

    async def _session(self, address: Address) -> None:
        if self._identity is not None and await self._identity.expired():
            await self._renew_expired(address, self._identity)
        async with self._dial(address) as session:
            self._outbox.clear()
            inventory = self._inventory()
            await session.send(self._registration(inventory))
            welcome = None
            with trio.move_on_after(_WELCOME_S):
                welcome = await session.receive()
            if welcome is None:
                raise PeerGone(f"control plane at {address}", f"did not answer within {_WELCOME_S:g} s")
            if isinstance(welcome, NotLeader):
                raise self._led_elsewhere(address, welcome)
            if not isinstance(welcome, Welcome):
                raise PeerGone(f"control plane at {address}", f"answered {type(welcome).__name__}, not Welcome")
            if not await self._epoch.admit(welcome.epoch):
                raise PeerGone(
                    f"control plane at {address}",
                    f"has epoch {welcome.epoch}, {self._epoch.highest} was seen",
                    "it was replaced by a newer one; stop it",
                )
            await self._welcomed(address, session, welcome, inventory)

    async def _renew_expired(self, address: Address, identity: NodeIdentity) -> None:
        try:
            await identity.renew_expired(self._dial(address), _WELCOME_S)
        except LinkRefused as refused:
            # What is about renewing alone keeps nobody from connecting: it may be our clock that is wrong.
            if refused.refused.claim != RENEWAL:
                raise

    def _led_elsewhere(self, address: Address, answer: NotLeader) -> PeerGone:
        self._leader = answer.leader
        where = "nobody does at the moment" if answer.leader is None else f"{answer.leader} does"
        return PeerGone(f"control plane at {address}", f"does not lead the cluster, {where}")

    async def _welcomed(self, address: Address, session: Session, welcome: Welcome, told: Inventory) -> None:
        self._backoff.reset()
        self._said = ""
        self.state = LinkState(True, str(address), "welcomed", self._clock())
        self._stands(self.state)
        self._log.info(
            "connected",
            control_plane=str(address),
            cluster=welcome.cluster,
            epoch=welcome.epoch,
            version=welcome.version,
        )
        if self._settings is not None and welcome.settings is not None:
            self._settings.offered(welcome.settings, self._outbox.settings)
        commands: trio.MemorySendChannel[Command]
        commands, to_do = trio.open_memory_channel[Command](_COMMANDS_WAITING)
        ended: PeerError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say, session, told)
            nursery.start_soon(self._beat, session, welcome.heartbeat_s)
            nursery.start_soon(self._obey, to_do)
            if self._identity is not None:
                self._identity.connected()
                nursery.start_soon(self._renewing, self._identity, session)
            try:
                await self._listen(address, session, welcome.heartbeat_s, commands, nursery)
            except PeerError as gone:
                ended = gone
            nursery.cancel_scope.cancel(reason="session over")
        if ended is not None:
            raise ended

    async def _renewing(self, identity: NodeIdentity, session: Session) -> None:
        try:
            await identity.run(session)
        except PeerError:
            return  # the listener sees the same end

    def _registration(self, inventory: Inventory) -> Register:
        return Register(
            protocol=PROTOCOL,
            node=self._config.id,
            version=__version__,
            boot_id=inventory.host.boot_id,
            address=self._config.address,
            inventory=inventory,
            engines=self._kinds(),
            shards=self._reports(),
            epoch=self._epoch.highest,
            jobs=self._jobs(),
            installs=self._installs(),
            weights=None if self._weights is None else self._weights.found,
            clock=self._clock(),
            installation="" if self._identity is None else self._identity.installation,
            settings=0 if self._settings is None else self._settings.revision,
        )

    def _kinds(self) -> tuple[EngineKind, ...]:
        kinds = {e.kind for e in self._config.engines} | {i.engine for i in self._installs() if i.current}
        return tuple(k for k in EngineKind if k in kinds)

    async def _listen(
        self,
        address: Address,
        session: Session,
        beat_s: float,
        commands: trio.MemorySendChannel[Command],
        nursery: trio.Nursery,
    ) -> None:
        tails = None if self._make_tails is None else self._make_tails(session.send)
        answered = False  # a control plane of an older version never does
        while True:
            await self._outbox.room()
            if answered:
                message = await session.receive_within(max(_PATIENCE_S, _SILENT_BEATS * beat_s))
            else:
                message = await session.receive()
            match message:
                case HeartbeatSeen():
                    answered = True
                case StartShard() | DrainShard() | StopShard() | ForgetShard() | RunJob() | CancelJob() | RunDoctor():
                    await commands.send(message)
                case NotLeader():
                    raise self._led_elsewhere(address, message)
                case TrustBundle() | CertificateIssued() | RenewalRefused() if self._identity is not None:
                    self._identity.heard(message)
                case LookForWeights(names=names) if self._weights is not None:
                    self._weights.ask(names)
                case SettingsChanged(settings=settings) if self._settings is not None:
                    self._settings.offered(settings, self._outbox.settings)
                case TailLog() | StopTail() if tails is not None:
                    tails.heard(message, nursery)
                case Unknown(tag=tag):
                    self._outbox.result(NotUnderstood(tag))
                case NotUnderstood(tag=tag):
                    self._log.warning("the control plane does not understand a message", tag=tag)
                case _:
                    self._log.warning("unexpected message", kind=type(message).__name__)

    async def _obey(self, to_do: trio.MemoryReceiveChannel[Command]) -> None:
        """One command at a time, in order; a start takes milliseconds, its engine's loading is not waited for."""
        async for command in to_do:
            self._outbox.result(await self._dispatch.run(command))

    async def _say(self, session: Session, told: Inventory) -> None:
        """Say what there is to say; ``told`` is the inventory that the control plane has."""
        sequence = 0
        while True:
            taken = await self._outbox.take()
            messages: list[AgentMessage] = []
            if taken.engines:
                messages.append(EnginesChanged(self._kinds(), self._installs()))
            now = self._inventory()
            if taken.hardware and (delta := diff(told, now)) is not None:
                sequence += 1
                told = now
                # Before the reports: whose end is told there must not look like a stranger who holds memory.
                messages.append(HardwareChanged(sequence, delta))
            messages += taken.messages
            if taken.weights and self._weights is not None:
                messages.append(self._weights.found)
            for message in messages:
                try:
                    await session.send(message)
                except PeerError:
                    return  # the listener sees the same end, and the next registration says everything anew
                except UnsendableError as wrong:
                    self._log.error("a message cannot be sent and is left out", error=str(wrong))

    async def _beat(self, session: Session, every_s: float) -> None:
        sequence = 0
        while True:
            await trio.sleep(max(every_s, _BEAT_FROM_S))
            sequence += 1
            try:
                await session.send(Heartbeat(sequence, self._loads()))
            except PeerError:
                return
