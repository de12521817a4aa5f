"""What the two ends of the link say to each other. Tags on the wire are in :mod:`llmgw.link.codec`."""

from __future__ import annotations

from attrs import frozen

from llmgw.hardware.delta import InventoryDelta
from llmgw.hardware.inventory import Inventory
from llmgw.scheduler.jobs import Installed, JobReport, JobSpec
from llmgw.scheduler.scale import EngineLoad
from llmgw.scheduler.state import ShardReport
from llmgw.settings.agent_part import NodeSettings
from llmgw.settings.catalog import EngineKind, Profile
from llmgw.settings.daemon import Address
from llmgw.settings.document import NOTHING_FETCHED, WeightsRules
from llmgw.settings.weight_facts import WeightFacts

PROTOCOL = 1
"""Version of this protocol. Ends whose versions differ by one must understand each other."""


@frozen
class WeightsFound:
    """Up, when there is something new: which of the weights it was asked for were looked at, and what is here."""

    asked: tuple[str, ...]
    weights: tuple[WeightFacts, ...]


@frozen
class Register:
    """Up, first on every connection: all that the control plane needs to know of the node.

    ``epoch`` is the highest epoch that the agent ever saw; ``address`` is where the router reaches the
    node's engines. ``shards`` are all shards that are running or whose end was not yet acknowledged, ``jobs`` those
    that run and the last ones that ended, ``installs`` the engines with their versions. ``weights`` is ``None`` from an
    agent that does not look at any. ``clock`` is the node's own, in seconds since the epoch, 0 where it is not said.
    ``installation`` names the state folder, so that an agent that was started again is told from a second one.
    ``settings`` is the revision of the settings that the agent runs on, 0 where none were ever sent.
    """

    protocol: int
    node: str
    version: str
    boot_id: str
    address: str
    inventory: Inventory
    engines: tuple[EngineKind, ...]
    shards: tuple[ShardReport, ...]
    epoch: int
    weights: WeightsFound | None = None
    jobs: tuple[JobReport, ...] = ()
    installs: tuple[Installed, ...] = ()
    clock: float = 0.0
    installation: str = ""
    settings: int = 0


@frozen
class Heartbeat:
    """Up, every ``heartbeat_s`` of the ``Welcome``; ``sequence`` counts from 1.

    ``loads`` has what the engines that serve said last of their work.
    """

    sequence: int
    loads: tuple[EngineLoad, ...] = ()


@frozen
class HardwareChanged:
    """Up, when the node read its hardware again: what is different from what it said before in this session.

    ``sequence`` counts them from 1 in each session, so that one that builds on another state is seen.
    """

    sequence: int
    delta: InventoryDelta


@frozen
class ShardStatus:
    """Up, whenever a shard's state, reason or progress changes."""

    report: ShardReport


@frozen
class JobStatus:
    """Up, whenever a job's state, step or progress changes."""

    report: JobReport


@frozen
class EnginesChanged:
    """Up, when an engine was installed: all that the node has now."""

    engines: tuple[EngineKind, ...]
    installs: tuple[Installed, ...]


@frozen
class CommandResult:
    """Up, once for each command: done (or known to be done), or refused with the reason and a remedy."""

    command: str
    accepted: bool
    reason: str = ""
    remedy: str = ""


@frozen
class Welcome:
    """Down, the answer to an accepted ``Register``.

    ``epoch`` counts the control planes that led this cluster, ``heartbeat_s`` is in seconds. ``settings`` are this
    node's, answered ``SettingsApplied``; ``None`` from a control plane that has none for agents.
    """

    protocol: int
    version: str
    cluster: str
    epoch: int
    heartbeat_s: float
    settings: NodeSettings | None = None


@frozen
class Refused:
    """Down, before the connection ends: which claim failed, on which certificate, and what to do.

    ``certificate`` is one line with subject, SAN, serial, issuer and validity; ``wanted`` and ``found`` are
    the two values that differ. ``wait_s`` is how long to stay away at least, in seconds, where that was said.
    """

    claim: str
    wanted: str
    found: str
    certificate: str
    remedy: str
    wait_s: float = 0.0


@frozen
class NotLeader:
    """Down, in place of ``Welcome`` or at any time after it: another control plane leads, and the session ends.

    ``leader`` is where its link listens; ``None`` while there is none.
    """

    leader: Address | None = None


@frozen
class HeartbeatSeen:
    """Down, for each ``Heartbeat``, with its ``sequence``: what the agent reports is not only received but read."""

    sequence: int


@frozen
class StartShard:
    """Down: start an engine. The same ``command`` again changes nothing and gets the same result.

    ``uuids`` say which devices are meant: the agent may have numbered them anew meanwhile. Over several nodes
    ``fabric`` is the label of the network between them, ``addresses`` has each rank's node, and ranks above 0 meet
    rank 0 at ``rendezvous``. ``weights`` says what may be fetched, and from where. With ``hold`` its weights are
    fetched, and the engine is launched once the same start comes without it; its report says what it waits for.
    """

    command: str
    epoch: int
    cluster: str
    replica: str
    shard: str
    generation: int
    rank: int
    model: str
    profile: Profile
    profile_digest: str
    devices: tuple[int, ...]
    uuids: tuple[str, ...] = ()
    fabric: str | None = None
    rendezvous: Address | None = None
    addresses: tuple[str, ...] = ()
    weights: WeightsRules = NOTHING_FETCHED
    hold: bool = False


@frozen
class DrainShard:
    """Down: the router sends nothing new to this shard."""

    command: str
    epoch: int
    shard: str
    generation: int
    reason: str


@frozen
class StopShard:
    """Down: stop the shard, with ``grace_s`` (seconds) between SIGTERM and SIGKILL."""

    command: str
    epoch: int
    shard: str
    generation: int
    reason: str
    grace_s: float


@frozen
class ForgetShard:
    """Down: the end of this shard is recorded; the agent may drop its record."""

    command: str
    epoch: int
    shard: str
    generation: int


@frozen
class LookForWeights:
    """Down: the weights that the catalog names. Those that are here are told about, now and whenever they change."""

    names: tuple[str, ...]


@frozen
class RunJob:
    """Down: begin a job. One whose id is known already is left as it is."""

    command: str
    epoch: int
    job: JobSpec


@frozen
class CancelJob:
    """Down: end a job; one that has ended is left as it is."""

    command: str
    epoch: int
    job: str
    reason: str


@frozen
class SettingsChanged:
    """Down, when this node's settings are others than it was told before; answered ``SettingsApplied``."""

    settings: NodeSettings


@frozen
class SettingsApplied:
    """Up: the agent runs on these settings, or, with a reason in ``refused``, stays on those that it had."""

    revision: int
    digest: str
    refused: str = ""


@frozen
class RunDoctor:
    """Down: check the node. What comes of it is a ``DoctorReport`` with the same ``command``."""

    command: str
    epoch: int


@frozen
class DoctorReport:
    """Up: what ``llmgw doctor --json`` would print, as text, or why there is nothing."""

    command: str
    document: str
    failed: str = ""


@frozen
class TailLog:
    """Down: send the last ``lines`` of this start's log, and with ``follow`` what comes after them.

    ``tail`` names the reader; ``credit`` is how many ``LogChunk`` may be under way. The same ``tail`` again gives more
    credit. With ``previous`` it is the log of the start before.
    """

    tail: str
    shard: str
    generation: int
    lines: int
    follow: bool
    credit: int
    previous: bool = False


@frozen
class StopTail:
    """Down: nobody reads this log any more."""

    tail: str


@frozen
class LogChunk:
    """Up: whole lines of a log, without secrets and control characters; ``skipped`` bytes were left out before them.

    The last one has ``ended`` and says why, if there is something to say.
    """

    tail: str
    lines: tuple[str, ...] = ()
    skipped: int = 0
    ended: bool = False
    reason: str = ""


@frozen
class NotUnderstood:
    """Either way: a message of this tag is unknown here; the sender carries on without it."""

    tag: str


@frozen
class TrustBundle:
    """Down, after ``Welcome`` and when it changes: the CAs that the cluster trusts, as PEM; answered ``IdentityHeld``.

    ``renewal`` says whether certificates can be renewed over the link. With ``renew_within_s`` (seconds) this node's is
    to be in this time, because it is from another CA than those that are issued now.
    """

    certificates: str
    renewal: bool
    renew_within_s: float | None = None


@frozen
class IdentityHeld:
    """Up: what is on the node's disk and used from now on. ``cas`` are SHA-256 of the CA certificates it trusts.

    ``serial`` is its certificate's, in hexadecimal.
    """

    serial: str
    cas: tuple[str, ...]


@frozen
class RenewCertificate:
    """Up: a certificate request (PKCS #10, PEM) for a new key of this node; names in it are ignored.

    It is also the first and only message of an agent whose certificate has expired.
    """

    request: str


@frozen
class CertificateIssued:
    """Down, the answer: the new certificate with its issuers, and the CAs to trust, all as PEM."""

    certificate: str
    bundle: str


@frozen
class RenewalRefused:
    """Down, the other answer; the session goes on."""

    reason: str
    remedy: str


@frozen
class AskBundle:
    """On the way in, before anything is believed: which CAs does this control plane show?"""


@frozen
class Bundle:
    """The answer to ``AskBundle``, as PEM. Only a CA whose fingerprint is in the token may be believed."""

    certificates: str


@frozen
class Join:
    """A node that has no certificate yet: its token, a certificate request (PEM) for its key, and who it means to be.

    An empty ``node`` leaves that to the token.
    """

    token: str
    request: str
    node: str = ""


@frozen
class Joined:
    """The answer to ``Join``: who the node is, its certificate with its issuers, and the CAs to trust, as PEM."""

    node: str
    trust_domain: str
    certificate: str
    bundle: str


IdentityAnswer = TrustBundle | CertificateIssued | RenewalRefused
AgentMessage = (
    Register
    | Heartbeat
    | HardwareChanged
    | WeightsFound
    | ShardStatus
    | JobStatus
    | EnginesChanged
    | CommandResult
    | NotUnderstood
    | IdentityHeld
    | RenewCertificate
    | SettingsApplied
    | DoctorReport
    | LogChunk
)
ShardCommand = StartShard | DrainShard | StopShard | ForgetShard
JobCommand = RunJob | CancelJob
Command = ShardCommand | JobCommand | RunDoctor
ServerMessage = (
    Welcome
    | Refused
    | NotLeader
    | HeartbeatSeen
    | LookForWeights
    | SettingsChanged
    | Command
    | NotUnderstood
    | IdentityAnswer
    | TailLog
    | StopTail
)
JoinMessage = AskBundle | Bundle | Join | Joined | Refused
Message = AgentMessage | ServerMessage | JoinMessage
