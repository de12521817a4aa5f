"""Messages as bytes: a length of four bytes, big endian, then one JSON object whose ``type`` is the tag.

Fields that this version does not know are ignored and a tag that it does not know becomes :class:`Unknown`, so
that the two ends may differ by one version. Everything else that does not fit is refused with the path of the
value at fault.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import cattrs
import orjson
from attrs import frozen
from cattrs.v import format_exception

from llmgw.errors import LlmgwError, PeerError
from llmgw.link.messages import (
    AgentMessage,
    AskBundle,
    Bundle,
    CancelJob,
    CertificateIssued,
    CommandResult,
    DoctorReport,
    DrainShard,
    EnginesChanged,
    ForgetShard,
    HardwareChanged,
    Heartbeat,
    HeartbeatSeen,
    IdentityHeld,
    JobStatus,
    Join,
    Joined,
    JoinMessage,
    LogChunk,
    LookForWeights,
    Message,
    NotLeader,
    NotUnderstood,
    Refused,
    Register,
    RenewalRefused,
    RenewCertificate,
    RunDoctor,
    RunJob,
    ServerMessage,
    SettingsApplied,
    SettingsChanged,
    ShardStatus,
    StartShard,
    StopShard,
    StopTail,
    TailLog,
    TrustBundle,
    WeightsFound,
    Welcome,
)
from llmgw.settings.convert import WrongValue, strict_converter

MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest message, without its length."""

# Written by hand: renaming a class must not change the wire.
UP: Mapping[str, type[AgentMessage]] = MappingProxyType(
    {
        "register": Register,
        "heartbeat": Heartbeat,
        "hardware-changed": HardwareChanged,
        "weights-found": WeightsFound,
        "shard-status": ShardStatus,
        "job-status": JobStatus,
        "engines-changed": EnginesChanged,
        "command-result": CommandResult,
        "not-understood": NotUnderstood,
        "identity-held": IdentityHeld,
        "renew-certificate": RenewCertificate,
        "settings-applied": SettingsApplied,
        "doctor-report": DoctorReport,
        "log-chunk": LogChunk,
    }
)
"""What an agent may say."""

DOWN: Mapping[str, type[ServerMessage]] = MappingProxyType(
    {
        "welcome": Welcome,
        "refused": Refused,
        "not-leader": NotLeader,
        "heartbeat-seen": HeartbeatSeen,
        "look-for-weights": LookForWeights,
        "settings-changed": SettingsChanged,
        "start-shard": StartShard,
        "drain-shard": DrainShard,
        "stop-shard": StopShard,
        "forget-shard": ForgetShard,
        "run-job": RunJob,
        "cancel-job": CancelJob,
        "run-doctor": RunDoctor,
        "not-understood": NotUnderstood,
        "trust-bundle": TrustBundle,
        "certificate-issued": CertificateIssued,
        "renewal-refused": RenewalRefused,
        "tail-log": TailLog,
        "stop-tail": StopTail,
    }
)
"""What a control plane may say."""

JOINING: Mapping[str, type[JoinMessage]] = MappingProxyType({"ask-bundle": AskBundle, "join": Join})
"""What somebody without a certificate may say."""

JOIN_ANSWERS: Mapping[str, type[JoinMessage]] = MappingProxyType(
    {"bundle": Bundle, "joined": Joined, "refused": Refused}
)
"""What it is answered."""

_TAGS: Mapping[type, str] = {kind: tag for table in (UP, DOWN, JOINING, JOIN_ANSWERS) for tag, kind in table.items()}
_LENGTH = struct.Struct(">I")
_SHORTEST = len(b"{}")

_MOST_PARTS = 25_000
"""Commas and brackets in one message: what it costs to read goes by them, 7 ms in which nobody else is read. A node
with 700 shards has so many; what the doctor says of one with eight GPUs has 3,000."""

_FAULTS_NAMED = 3
_TAG_CHARS = 60


@frozen
class Unknown:
    """A message of a tag that this end does not know: answer it with ``NotUnderstood``, and carry on.

    Of a long tag it has the beginning: the answer to much nonsense must not be as much nonsense.
    """

    tag: str


class MalformedError(PeerError):
    """The other end sent bytes that are no message; the link cannot go on after it."""


class ExcessiveError(MalformedError):
    """What came may be a message, and is more of one than is acceptable."""


class UnsendableError(LlmgwError):
    """A message of ours that is too large, or holds text that JSON cannot carry."""


@cache
def converter() -> cattrs.Converter:
    """The conversion of values to JSON and back: strict about types, lenient about fields not known here."""
    return strict_converter(forbid_unknown=False, most_faults=_FAULTS_NAMED)


def encode(message: Message, most_bytes: int = MESSAGE_BYTES) -> bytes:
    """The bytes of one message, its length included.

    Raises :class:`UnsendableError`.
    """
    tag = _TAGS[type(message)]
    try:
        payload = orjson.dumps({"type": tag, **converter().unstructure(message)})
    except orjson.JSONEncodeError as cause:
        raise UnsendableError(f"message {tag!r}", f"cannot be written as JSON: {cause}") from cause
    if len(payload) > most_bytes:
        raise UnsendableError(f"message {tag!r}", f"has {len(payload)} bytes, the link carries at most {most_bytes}")
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes, known: Mapping[str, type[Message]]) -> Message | Unknown:
    """One message from its JSON; ``known`` is :data:`UP` or :data:`DOWN`.

    Raises :class:`MalformedError`.
    """
    if (parts := sum(payload.count(sign) for sign in (b",", b"[", b"{"))) > _MOST_PARTS:
        raise ExcessiveError("message", f"has {parts} parts, the link carries up to {_MOST_PARTS}")
    try:
        fields = orjson.loads(payload)
    except orjson.JSONDecodeError as cause:
        raise MalformedError("message", f"is no JSON: {cause}") from cause
    if not isinstance(fields, dict):
        raise MalformedError("message", "is no JSON object")
    tag = fields.pop("type", None)
    if not isinstance(tag, str):
        raise MalformedError("message", "has no text under 'type'")
    if (kind := known.get(tag)) is None:
        return Unknown(tag[:_TAG_CHARS])
    try:
        message: Message = converter().structure(fields, kind)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError) as cause:
        raise MalformedError(f"message {tag!r}", _faults(cause)) from cause
    return message


def _faults(cause: Exception) -> str:
    faults = cattrs.transform_error(cause, format_exception=_fault)
    more = f" and {len(faults) - _FAULTS_NAMED} more" if len(faults) > _FAULTS_NAMED else ""
    return "; ".join(faults[:_FAULTS_NAMED]) + more


def _fault(cause: BaseException, kind: type | None) -> str:
    return str(cause) if isinstance(cause, WrongValue) else format_exception(cause, kind)


class MessageBuffer:
    """Received bytes, cut into messages. A length beyond the limit is refused before its message is stored."""

    def __init__(self, most_bytes: int = MESSAGE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        """Add bytes. Raises :class:`MalformedError` when the first message has no acceptable length."""
        self._bytes += data
        self._check()

    @property
    def complete(self) -> bool:
        """Whether the first message is there to its end."""
        length = self._length()
        return length is not None and len(self._bytes) >= _LENGTH.size + length

    def first(self) -> bytes | None:
        """The JSON of the first message, or nothing while it is not complete. It stays."""
        return bytes(self._bytes[_LENGTH.size : self._end()]) if self.complete else None

    def drop(self) -> None:
        """Remove the first message. Raises :class:`MalformedError` when the next has no acceptable length."""
        del self._bytes[: self._end()]
        self._check()

    def take(self) -> bytes | None:
        """The JSON of the first message, removed; or nothing while it is not complete."""
        if (payload := self.first()) is not None:
            self.drop()
        return payload

    def _end(self) -> int:
        return _LENGTH.size + (self._length() or 0)

    def _length(self) -> int | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        return int(length)

    def _check(self) -> None:
        length = self._length()
        if length is not None and not _SHORTEST <= length <= self._most_bytes:
            reason = f"has a length of {length} bytes, the link carries {_SHORTEST} to {self._most_bytes}"
            raise ExcessiveError("message", reason)
