"""What agents report, each message to where it belongs: the picture of the cluster, the store, jobs, logs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from logging import ERROR, INFO, WARNING

import trio

from llmgw.errors import OperatorError, PeerError
from llmgw.link.codec import Unknown
from llmgw.link.messages import (
    CertificateIssued,
    CommandResult,
    DoctorReport,
    EnginesChanged,
    ForgetShard,
    HardwareChanged,
    Heartbeat,
    HeartbeatSeen,
    IdentityHeld,
    JobStatus,
    LogChunk,
    NotUnderstood,
    RenewalRefused,
    RenewCertificate,
    RunJob,
    SettingsApplied,
    ShardStatus,
    StartShard,
    WeightsFound,
)
from llmgw.link.repeats import Repeats
from llmgw.server.cluster import Cluster
from llmgw.server.doctors import Doctors
from llmgw.server.identities import Identities
from llmgw.server.jobs import Jobs
from llmgw.server.node_session import NodeSession
from llmgw.store.api import NodeRow, Store
from llmgw.telemetry.logging import logger

_REMEMBER_HEARD_S = 300.0
"""A heartbeat alone is written down this often: after a restart silence counts from the restart anyway."""

_FORGET_AGAIN_S = 60.0
"""What an agent cannot forget yet is asked again after this time."""

_SILENT_BEATS = 5
_PATIENCE_S = 15.0
"""An agent that lets so many heartbeats go by, and at least this long, has no session; it may answer PINGs."""

_LINES = 1000
"""What one node says makes so many lines of the log in a minute at most."""


class Reports:
    """Takes in what agents say. ``clock`` is in seconds since the epoch."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        clock: Callable[[], float],
        jobs: Jobs | None,
        identities: Identities | None,
        doctors: Doctors | None,
    ) -> None:
        self._jobs = jobs
        self._doctors = doctors
        self._identities = identities
        self._cluster = cluster
        self._store = store
        self._clock = clock
        self._repeats = Repeats(changes=_LINES)
        self._log = logger("agents")

    async def take_in(self, mine: NodeSession) -> str:
        """Take in what a node says until its session ends; returns why it did."""
        node, stored_at = mine.node, self._clock()
        while True:
            try:
                beat_s = self._cluster.settings.liveness.heartbeat_s
                message = await mine.session.receive_within(max(_PATIENCE_S, _SILENT_BEATS * beat_s))
            except PeerError as gone:
                return gone.reason
            now = self._clock()
            self._cluster.heard(node, now)
            row: NodeRow | None = None
            match message:
                case Heartbeat(sequence=sequence, loads=loads):
                    mine.session.offer(HeartbeatSeen(sequence))
                    self._cluster.worked(node, loads)
                    if now - stored_at > _REMEMBER_HEARD_S:
                        row = self._cluster.row(node)
                case HardwareChanged(sequence=sequence, delta=delta):
                    mine.hardware += 1
                    if sequence != mine.hardware:
                        # Its next registration says everything anew.
                        return f"hardware change {sequence} does not follow {mine.hardware - 1}"
                    row = self._cluster.rediscovered(node, delta)
                case WeightsFound():
                    row = self._cluster.found_weights(node, message)
                case ShardStatus(report=report):
                    self._say(
                        INFO, "shard", node, shard=report.shard, generation=report.generation,
                        state=report.state.value, reason=report.reason,
                    )  # fmt: skip
                    row = self._cluster.report(node, report, now)
                case JobStatus(report=report):
                    if self._jobs is not None:
                        await self._jobs.reported(node, report)
                case EnginesChanged():
                    row = self._cluster.engines(node, message)
                case RenewCertificate() if mine.full:
                    pass  # one that asks much and reads nothing; it asks again
                case RenewCertificate() if self._identities is not None:
                    mine.put(await self._renewed(mine, message, self._identities))
                case IdentityHeld() if self._identities is not None:
                    if mine.granted is not None and message.serial == f"{mine.granted.chain[0].serial:x}":
                        mine.chain, mine.granted = mine.granted.chain, None
                    await self._identities.holds(node, message, mine.chain)
                    mine.look.set()
                case DoctorReport() if self._doctors is not None:
                    self._doctors.reported(node, message)
                case CommandResult():
                    if self._doctors is not None:
                        self._doctors.refused(node, message)
                    await self._job_result(mine, message)
                    row = self._result(mine, message, now)
                case SettingsApplied():
                    self._say_settings(node, message)
                    row = self._cluster.settings_said(node, message)
                case NotUnderstood(tag="settings-changed"):
                    row = self._cluster.settings_said(node, None)
                case LogChunk():
                    mine.readers.heard(message)
                case NotUnderstood(tag="tail-log"):
                    mine.readers.ended(f"the agent of {node} is of a version that cannot send logs; upgrade it")
                case NotUnderstood(tag=tag):
                    self._say(WARNING, "agent does not understand a message", node, tag=tag)
                    if self._doctors is not None and tag == "run-doctor":
                        self._doctors.not_understood(node)
                case Unknown(tag=tag):
                    mine.answer(NotUnderstood(tag))
                case _:
                    self._say(WARNING, "unexpected message", node, kind=type(message).__name__)
            if row is not None:
                stored_at = now
                await self.remember(row)

    def _say(self, level: int, what: str, node: str, **more: Hashable) -> None:
        """Log what a node said, unless that is what it said last, or it says too much."""
        if self._repeats.times(node, (what, *more.values()), trio.current_time()):
            self._log.log(level, what, node=node, **more)

    def _say_settings(self, node: str, message: SettingsApplied) -> None:
        if message.refused:
            revision, reason = message.revision, message.refused
            self._say(ERROR, "settings refused by a node", node, revision=revision, reason=reason)
        else:
            self._say(INFO, "settings in force on a node", node, revision=message.revision)

    async def _renewed(
        self, mine: NodeSession, message: RenewCertificate, identities: Identities
    ) -> CertificateIssued | RenewalRefused:
        """The answer to a node that wants a new certificate."""
        granted = await identities.enrolment.renew(mine.node, message, mine.session.remote)
        if isinstance(granted, RenewalRefused):
            self._say(WARNING, "certificate not renewed", mine.node, reason=granted.reason)
            return granted
        mine.granted = granted
        return granted.message

    async def remember(self, row: NodeRow) -> None:
        """Write a node's row down, and what it teaches.

        A store that cannot take it must not cost us the node: it is all in memory too.
        """
        try:
            if learned := self._cluster.learn(row, self._clock()):
                await self._store.save_learned(learned)
            await self._store.save_node(row)
        except OperatorError as failed:
            self._say(ERROR, "a node's report is not stored", row.id, error=str(failed))

    async def _job_result(self, mine: NodeSession, result: CommandResult) -> None:
        command = mine.sent.get(result.command)
        if self._jobs is not None and isinstance(command, RunJob) and not result.accepted:
            await self._jobs.refused(command.job.id, result.reason, result.remedy)

    def _result(self, mine: NodeSession, result: CommandResult, now: float) -> NodeRow | None:
        node, command = mine.node, mine.sent.get(result.command)
        if not result.accepted:
            self._say(WARNING, "command refused", node, command=result.command, reason=result.reason)
        match command:
            case StartShard() if not result.accepted:
                said = f"{result.reason}. {result.remedy}" if result.remedy else result.reason
                return self._cluster.refused(command, node, said, now)
            case ForgetShard() if not result.accepted:
                mine.again[result.command] = now + _FORGET_AGAIN_S
                return None
            case ForgetShard():
                return self._cluster.forgotten(node, command.shard, command.generation)
            case _:
                return None
