"""The link's protocol, without a socket: bytes in, events out; messages in, bytes out.

One HTTP/2 connection with one stream. The agent opens it with ``POST /llmgw/link/1`` and speaks first; the
control plane answers 200 with its own first message, or 403 and a ``Refused``. Both directions then carry
messages until one end closes. :class:`LinkProtocol` owns what a peer could do wrong with that: windows, sizes,
floods, silence. Docs: ``docs/link.md``.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

import h2.events
from attrs import frozen
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from llmgw.errors import BugError
from llmgw.link.codec import (
    DOWN,
    UP,
    ExcessiveError,
    MalformedError,
    MessageBuffer,
    Unknown,
    decode,
    encode,
)
from llmgw.link.flood import FrameMeter
from llmgw.link.h2_settings import SmallSettings
from llmgw.link.messages import Message, Refused
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits, Patience, Ping, TooLate

PATH = "/llmgw/link/1"
CONTENT_TYPE = "application/x-llmgw-link"

_PREFACE_BYTES = 24
_FRAME_BYTES = 16384
_HTTP2_WINDOW_BYTES = 65535
_CHUNK_BYTES = 65536
_REASON_BYTES = 400
_ACCEPTED = b"200"
_REFUSED = b"403"
_PING = b"llmgw..?"


class Role(StrEnum):
    """Which end this is: the agent opens the stream, the control plane answers it."""

    AGENT = "agent"
    SERVER = "server"


@frozen
class Opened:
    """The other end speaks the link's protocol: messages can be sent."""


@frozen
class Arrived:
    """At least one whole message can be taken."""


@frozen
class Ended:
    """Nothing more will come or go. ``refused`` is set when the control plane said why it will not have us."""

    reason: str
    refused: Refused | None = None


Event = Opened | Arrived | Ended


class LinkProtocol:
    """One end of one link. ``now`` is any clock that only goes forward, in seconds.

    After every call that can change something, send what :meth:`data_to_send` returns and call :meth:`tick` no
    later than :meth:`next_deadline`.
    """

    def __init__(self, role: Role, now: float, limits: LinkLimits = DEFAULT_LIMITS) -> None:
        self.role = role
        self.ended: Ended | None = None
        self.opened = False
        self._limits = limits
        self._known = UP if role is Role.SERVER else DOWN
        self._meter = FrameMeter(_PREFACE_BYTES if role is Role.SERVER else 0, _FRAME_BYTES)
        self._inbox = MessageBuffer(limits.message_bytes)
        self._readable = True
        self._unacknowledged = 0
        self._pending = bytearray()
        self._finishing = False
        self._out = bytearray()
        self._stream: int | None = None
        self._status: bytes | None = None
        self._patience = Patience(now, limits)
        self._h2 = self._connection()

    def _connection(self) -> H2Connection:
        agent = self.role is Role.AGENT
        connection = H2Connection(H2Configuration(client_side=agent, header_encoding=None))
        connection.remote_settings = SmallSettings(client=not agent)
        connection.local_settings = SmallSettings(
            client=agent,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.MAX_CONCURRENT_STREAMS: 1,
                SettingCodes.INITIAL_WINDOW_SIZE: self._limits.window_bytes,
                SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: self._limits.header_bytes,
            },
        )
        connection.decoder.max_header_list_size = self._limits.header_bytes
        connection.initiate_connection()
        # A connection's window is not a setting: it is raised by hand, and never lowered.
        if (more := self._limits.window_bytes - _HTTP2_WINDOW_BYTES) > 0:
            connection.increment_flow_control_window(more)
        if agent:
            self._stream = connection.get_next_available_stream_id()
            connection.send_headers(
                self._stream,
                [
                    (":method", "POST"),
                    (":scheme", "https"),
                    (":authority", "llmgw"),
                    (":path", PATH),
                    ("content-type", CONTENT_TYPE),
                ],
            )
        return connection

    # Receiving

    def receive(self, data: bytes, now: float) -> tuple[Event, ...]:
        """Take in what the connection brought. What a peer sends never raises: it may end the link."""
        if self.ended is not None:
            return ()
        self._patience.heard(now)
        opened = self.opened
        if (flood := self._meter.feed(data, now)) is not None:
            self._fail(ErrorCodes.ENHANCE_YOUR_CALM, f"the other end sent {flood}")
        else:
            self._process(data, now)
        return self._events(opened)

    def _process(self, data: bytes, now: float) -> None:
        try:
            for event in self._h2.receive_data(data):
                self._on(event, now)
                if self.ended is not None:
                    break
        except ProtocolError as cause:
            self._h2.clear_outbound_data_buffer()  # h2 has queued a GOAWAY that does not say which rule
            self._fail(cause.error_code, f"the other end broke HTTP/2: {cause}")
        except MalformedError as malformed:
            self._malformed(malformed)
        self._collect()
        if self.ended is None and len(self._out) > self._limits.control_bytes + _CHUNK_BYTES:
            self._fail(ErrorCodes.ENHANCE_YOUR_CALM, "the other end asks for answers that it does not read")

    def _events(self, opened: bool) -> tuple[Event, ...]:
        events: list[Event] = []
        if self.opened and not opened:
            events.append(Opened())
        if self._inbox.complete:
            events.append(Arrived())
        if self.ended is not None:
            events.append(self.ended)
        return tuple(events)

    def take(self) -> Message | Unknown | None:
        """The next message, if one is complete; its bytes are then given back to the sender's window.

        Messages that came before the end can still be taken after it. A malformed message ends the link.
        """
        if (payload := self.first()) is None:
            return None
        try:
            message = self.decode(payload)
        except MalformedError as malformed:
            self.took(malformed)
            return None
        self.took(message)
        return message

    @property
    def arrived(self) -> bool:
        """Whether a message can be taken."""
        return self._readable and self._inbox.complete

    # The same in three steps, for a shell that decodes large messages in a thread.

    def first(self) -> bytes | None:
        """The next message as it came, if one is complete."""
        return self._inbox.first() if self._readable else None

    def decode(self, payload: bytes) -> Message | Unknown:
        """What :meth:`first` says, from any thread. Raises :class:`~llmgw.link.codec.MalformedError`."""
        return decode(payload, self._known)

    def took(self, message: Message | Unknown | MalformedError) -> None:
        """The first message was taken, or turned out to be none."""
        if isinstance(message, MalformedError):
            self._malformed(message)
            return
        try:
            self._inbox.drop()
        except MalformedError as malformed:
            self._malformed(malformed)
        if isinstance(message, Refused):
            self._end(f"refused: {message.claim}", message)
        self._acknowledge()

    def _malformed(self, malformed: MalformedError) -> None:
        code = ErrorCodes.ENHANCE_YOUR_CALM if isinstance(malformed, ExcessiveError) else ErrorCodes.PROTOCOL_ERROR
        self._readable = False
        if self.ended is None:
            self._fail(code, str(malformed))

    def lost(self, reason: str) -> None:
        """The connection below ended without a goodbye."""
        self._end(reason)

    def _on(self, event: h2.events.Event, now: float) -> None:
        match event:
            case h2.events.RequestReceived(stream_id=stream_id, headers=headers):
                self._request(stream_id, dict(headers), now)
            case h2.events.ResponseReceived(headers=headers):
                self._response(dict(headers))
            case h2.events.RemoteSettingsChanged() if self.role is Role.AGENT and not self.opened:
                self.opened = True
                self._patience.came()
            case h2.events.DataReceived(data=data, flow_controlled_length=length, stream_id=stream_id):
                self._data(data, length - len(data), stream_id, now)
            case h2.events.StreamEnded():
                self._end("the other end finished its stream")
            case h2.events.StreamReset(error_code=code):
                self._end(f"the other end reset the stream: {_code(code or 0)}")
            case h2.events.TrailersReceived():
                self._fail(ErrorCodes.PROTOCOL_ERROR, "the other end sent trailers")
            case h2.events.ConnectionTerminated(error_code=code, additional_data=said):
                self._end(f"closed by the other end: {_printable(said) if said else _code(code or 0)}")
            case _:
                pass  # h2 has dealt with it

    def _request(self, stream_id: int, headers: dict[bytes, bytes], now: float) -> None:
        asked = (headers.get(b":method"), headers.get(b":path"), headers.get(b"content-type"))
        if asked != (b"POST", PATH.encode(), CONTENT_TYPE.encode()):
            self._h2.send_headers(stream_id, [(":status", "404")], end_stream=True)
            self._fail(ErrorCodes.NO_ERROR, "the request was not for the link")
            return
        self._stream = stream_id
        self.opened = True
        self._patience.expect(now, self._limits.open_s, "no first message")

    def _response(self, headers: dict[bytes, bytes]) -> None:
        self._status = headers[b":status"]
        self._patience.came()
        if self._status not in (_ACCEPTED, _REFUSED):
            self._end(f"the other end answered with HTTP status {_printable(self._status)}")

    def _data(self, data: bytes, padding: int, stream_id: int, now: float) -> None:
        if padding:
            self._h2.acknowledge_received_data(padding, stream_id)
        self._inbox.feed(data)
        self._unacknowledged += len(data)
        self._patience.message(now, begun=not self._inbox.complete and len(self._inbox) > 0)
        if self.role is Role.AGENT and self._status == _REFUSED:
            self.take()  # nothing but a refusal follows, and whoever waits only to send must learn of it
        elif self._inbox.complete and self.role is Role.SERVER:
            self._patience.came()
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Give back to the sender's window what was taken, and what belongs to a message still to be completed.

        Half a window at a time: h2 would answer each small message of a sender that fills the window with a pair of
        window updates, which the other end takes for a flood.
        """
        if self.ended is not None or self._stream is None:
            return
        held = len(self._inbox) if self._inbox.complete else 0
        if (size := self._unacknowledged - held) >= self._limits.window_bytes // 2:
            self._unacknowledged = held
            self._h2.acknowledge_received_data(size, self._stream)
            self._collect()

    # Sending

    @property
    def room(self) -> bool:
        """Whether a message would be taken on now."""
        return self.opened and self.ended is None and len(self._pending) < self._limits.unsent_bytes

    def send(self, message: Message, now: float) -> None:
        """Queue a message; wait for :attr:`room` first. The control plane's first message accepts the agent.

        Raises :class:`~llmgw.link.codec.UnsendableError`, and then nothing was queued.
        """
        if not self.opened or self.ended is not None or self._finishing:
            raise BugError("link", "a message was sent while the link was not open")
        data = encode(message, self._limits.message_bytes)
        if self.role is Role.SERVER:
            self._answer(_ACCEPTED)
        elif self._status is None and not self._patience.expects:
            self._patience.expect(now, self._limits.answer_s, "no answer to the first message")
        self._pending += data

    def refuse(self, refused: Refused) -> None:
        """Control plane: answer the agent's first message with a refusal and finish the stream.

        An agent that is gone already is not told.
        """
        if self.ended is not None:
            return
        if self._status is not None:
            raise BugError("link", "an agent was refused after it had been accepted")
        data = encode(refused)
        self._answer(_REFUSED)
        self._pending += data
        self._finishing = True

    def close(self, reason: str) -> None:
        """Say goodbye with the reason. What the windows let through of earlier messages goes first."""
        if self.ended is None:
            self._frame(len(self._pending))
            self._fail(ErrorCodes.NO_ERROR, reason)

    def data_to_send(self) -> bytes:
        """The bytes to write now, at most a few frames of messages at a time; empty when there is nothing."""
        if self.ended is None:
            self._frame(_CHUNK_BYTES)
        self._collect()
        data = bytes(self._out)
        self._out.clear()
        return data

    @property
    def to_write(self) -> bool:
        """Whether :meth:`data_to_send` may have something."""
        return bool(self._out or self._pending)

    @property
    def finished(self) -> bool:
        """Whether everything that was sent has been handed out by :meth:`data_to_send`."""
        return not self._out and (self.ended is not None or not self._pending)

    def _answer(self, status: bytes) -> None:
        if self._status is None and self._stream is not None:
            self._status = status
            self._h2.send_headers(self._stream, [(b":status", status), (b"content-type", CONTENT_TYPE.encode())])

    def _frame(self, most_bytes: int) -> None:
        """Turn pending bytes into DATA frames, as far as the peer's windows reach."""
        while self._stream is not None and self._pending and most_bytes > 0:
            window = self._h2.local_flow_control_window(self._stream)
            size = min(window, self._h2.max_outbound_frame_size, _FRAME_BYTES, len(self._pending), most_bytes)
            if size <= 0:
                return
            last = self._finishing and size == len(self._pending)
            self._h2.send_data(self._stream, bytes(self._pending[:size]), end_stream=last)
            del self._pending[:size]
            most_bytes -= size

    def _collect(self) -> None:
        self._out += self._h2.data_to_send()

    # Time and the end

    def next_deadline(self) -> float:
        """When :meth:`tick` is wanted next; infinity after the end."""
        return inf if self.ended is not None else self._patience.until()

    def tick(self, now: float) -> tuple[Event, ...]:
        """Let time pass: sends a PING after some silence, ends the link after too much of it."""
        if self.ended is not None:
            return ()
        match self._patience.tick(now):
            case TooLate(reason, excessive):
                return (self._fail(ErrorCodes.ENHANCE_YOUR_CALM if excessive else ErrorCodes.NO_ERROR, reason),)
            case Ping():
                self._ping(now)
        return ()

    def ask(self, now: float) -> None:
        """Send a PING now, whatever was heard before: any live peer answers it."""
        if self.ended is None and self.opened:
            self._ping(now)

    def _ping(self, now: float) -> None:
        self._patience.pinged(now)
        self._h2.ping(_PING)
        self._collect()

    def overload(self, reason: str) -> None:
        """End the link because the other end asks for more than it gets."""
        if self.ended is None:
            self._fail(ErrorCodes.ENHANCE_YOUR_CALM, reason)

    def _fail(self, code: ErrorCodes, reason: str) -> Ended:
        self._collect()
        self._h2.close_connection(code, additional_data=reason.encode()[:_REASON_BYTES])
        self._collect()
        return self._end(reason)

    def _end(self, reason: str, refused: Refused | None = None) -> Ended:
        if self.ended is None:
            self.ended = Ended(reason, refused)
            self._pending.clear()
        return self.ended


def _code(code: ErrorCodes | int) -> str:
    return code.name.lower().replace("_", " ") if isinstance(code, ErrorCodes) else f"code {code}"


def _printable(said: bytes) -> str:
    """Text from the peer, fit for a log line."""
    text = said[:_REASON_BYTES].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)
