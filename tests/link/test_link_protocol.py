"""Two protocol objects back to back, and one against a peer that does as it likes. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import h2.events
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.errors import BugError
from llmgw.link.codec import Unknown, encode
from llmgw.link.messages import Message, NotUnderstood
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.protocol import CONTENT_TYPE, PATH, Arrived, Ended, LinkProtocol, Opened, Role
from tests.link.samples import REFUSED, WELCOME, register

SMALL = LinkLimits(message_bytes=20_000, window_bytes=65_535, unsent_bytes=5_000)


class Ends:
    """Both ends of a link, and what is on the way between them."""

    def __init__(self, limits: LinkLimits = DEFAULT_LIMITS) -> None:
        self.now = 0.0
        self.agent = LinkProtocol(Role.AGENT, self.now, limits)
        self.server = LinkProtocol(Role.SERVER, self.now, limits)
        self.up, self.down = bytearray(), bytearray()

    def carry(self, up: int | None = None, down: int | None = None) -> list[object]:
        """Move at most so many bytes each way; returns the events at both ends."""
        self.up += self.agent.data_to_send()
        self.down += self.server.data_to_send()
        events: list[object] = []
        for queue, end, most in ((self.up, self.server, up), (self.down, self.agent, down)):
            part = bytes(queue[:most])
            del queue[: len(part)]
            if part:
                events += end.receive(part, self.now)
        return events

    def settle(self) -> list[object]:
        """Carry until nothing moves."""
        events: list[object] = []
        for _ in range(1000):
            events += self.carry()
            if not self.up and not self.down and self.agent.finished and self.server.finished:
                self.up += self.agent.data_to_send()
                self.down += self.server.data_to_send()
                if not self.up and not self.down:
                    return events
        raise AssertionError("the two ends never come to rest")


def opened(limits: LinkLimits = DEFAULT_LIMITS) -> Ends:
    ends = Ends(limits)
    ends.settle()
    assert ends.agent.opened
    assert ends.server.opened
    return ends


class RawPeer:
    """An h2 connection that plays one end by hand."""

    def __init__(self, role: Role, settings: dict[int, int] | None = None) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=role is Role.AGENT, header_encoding="utf-8"))
        self.h2.local_settings.update(settings or {})
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()

    def request(self, path: str = PATH, method: str = "POST", content_type: str = CONTENT_TYPE) -> None:
        self.h2.send_headers(
            1,
            [
                (":method", method),
                (":scheme", "https"),
                (":authority", "x"),
                (":path", path),
                ("content-type", content_type),
            ],
        )

    def exchange(self, other: LinkProtocol, now: float = 0.0) -> list[h2.events.Event]:
        other.receive(self.h2.data_to_send(), now)
        return self.h2.receive_data(other.data_to_send())


def attacked(*frames: Frame | bytes, now: float = 0.0) -> tuple[LinkProtocol, list[h2.events.Event]]:
    """A server end whose agent sends these frames; what the agent hears of it."""
    server, agent = LinkProtocol(Role.SERVER, now), RawPeer(Role.AGENT)
    agent.request()
    agent.exchange(server)
    assert server.opened
    server.receive(b"".join(f if isinstance(f, bytes) else f.serialize() for f in frames), now)
    return server, agent.h2.receive_data(server.data_to_send())


def goodbye(events: Iterable[h2.events.Event]) -> ErrorCodes | int | None:
    return next((e.error_code for e in events if isinstance(e, h2.events.ConnectionTerminated)), None)


def test_an_agent_is_welcomed() -> None:
    ends = Ends()
    assert ends.settle() == [Opened(), Opened()]
    ends.agent.send(register(), 0)
    assert ends.settle() == [Arrived()]
    assert ends.server.take() == register()
    assert ends.server.take() is None
    ends.server.send(WELCOME, 0)
    assert ends.settle() == [Arrived()]
    assert ends.agent.take() == WELCOME


def test_an_agent_is_refused_before_any_other_message() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.settle()
    ends.server.refuse(REFUSED)
    assert Ended("refused: node id", REFUSED) in ends.settle()
    assert ends.agent.ended == Ended("refused: node id", REFUSED)


def test_refusing_an_agent_that_is_gone_is_no_error() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.agent.close("SIGTERM")
    ends.settle()
    ends.server.refuse(REFUSED)
    assert ends.server.ended == Ended("closed by the other end: SIGTERM")


def test_who_was_accepted_is_not_refused() -> None:
    ends = opened()
    ends.server.send(WELCOME, 0)
    with pytest.raises(BugError):
        ends.server.refuse(REFUSED)


TAGS = st.integers(0, 12_000)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("say up"), TAGS),
            st.tuples(st.just("say down"), TAGS),
            st.tuples(st.just("carry up"), st.integers(1, 20_000)),
            st.tuples(st.just("carry down"), st.integers(1, 20_000)),
            st.tuples(st.just("take up"), st.just(0)),
            st.tuples(st.just("take down"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_whatever_the_pieces_all_messages_arrive_in_order(steps: list[tuple[str, int]]) -> None:
    ends = Ends(SMALL)
    said: dict[str, list[Message]] = {"up": [], "down": []}
    heard: dict[str, list[Message | Unknown]] = {"up": [], "down": []}
    sender, taker = {"up": ends.agent, "down": ends.server}, {"up": ends.server, "down": ends.agent}

    def take(way: str) -> bool:
        if (message := taker[way].take()) is not None:
            heard[way].append(message)
        return message is not None

    for step, size in steps:
        verb, way = step.split()
        match verb:
            case "say" if sender[way].room:
                message = NotUnderstood(f"{len(said[way])} {'x' * size}")
                sender[way].send(message, ends.now)
                said[way].append(message)
            case "carry":
                ends.carry(up=size if way == "up" else 0, down=size if way == "down" else 0)
            case "take":
                take(way)
    while True:
        ends.settle()
        took = [take(way) for way in ("up", "down") for _ in range(3)]
        if not any(took):
            break
    assert ends.agent.ended is None
    assert ends.server.ended is None
    assert heard == said


@settings(deadline=None)
@given(st.sampled_from(list(Role)), st.lists(st.binary(min_size=1, max_size=80), max_size=10))
def test_garbage_ends_a_link_and_nothing_else(role: Role, chunks: list[bytes]) -> None:
    end = LinkProtocol(role, 0)
    for chunk in chunks:
        end.receive(chunk, 0)
        end.take()
        end.data_to_send()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


FRAMES = st.builds(
    frame,
    st.integers(0, 12),
    st.integers(0, 255),
    st.sampled_from([0, 1, 2, 3, 2**31 - 1]),
    st.binary(max_size=40),
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(list(Role)), st.lists(FRAMES, max_size=12), st.booleans())
def test_frames_at_random_end_a_link_and_nothing_else(role: Role, frames: list[bytes], early: bool) -> None:
    end, peer = LinkProtocol(role, 0), RawPeer(Role.AGENT if role is Role.SERVER else Role.SERVER)
    if not early:
        if role is Role.SERVER:
            peer.request()
        peer.exchange(end)
        peer.exchange(end)
    else:
        end.receive(peer.h2.data_to_send(), 0)
    for each in frames:
        end.receive(each, 0)
        end.take()
        end.data_to_send()


def priority(stream: int) -> PriorityFrame:
    frame = PriorityFrame(stream)
    frame.depends_on, frame.stream_weight, frame.exclusive = 0, 1, False
    return frame


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (PingFrame(0, opaque_data=b"12345678"), "PING"),
        (SettingsFrame(0, settings={4: 65_535}), "SETTINGS"),
        (DataFrame(1, data=b""), "empty DATA"),
        (WindowUpdateFrame(0, window_increment=1), "WINDOW_UPDATE"),
        (WindowUpdateFrame(1, window_increment=1), "WINDOW_UPDATE"),
        (RstStreamFrame(99), "RST_STREAM"),
        (priority(5), "PRIORITY"),
        (b"\0\0\0\xfa\0\0\0\0\0", "type 250"),
    ],
)
def test_floods_end_with_enhance_your_calm(frame: Frame | bytes, named: str) -> None:
    server, heard = attacked(*[frame] * 1001)
    assert server.ended is not None
    assert f"{named} frames within a second" in server.ended.reason
    assert goodbye(heard) is ErrorCodes.ENHANCE_YOUR_CALM
    # The flood was seen before it was processed: it has no answers.
    assert not [e for e in heard if isinstance(e, h2.events.PingAckReceived | h2.events.SettingsAcknowledged)]


def test_settings_that_nobody_knows_are_not_kept() -> None:
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT, {4: 100_000})
    agent.request()
    agent.exchange(server)
    before = len(server._h2.remote_settings)
    for second in range(20):
        made_up = b"".join((1000 + 2000 * second + n).to_bytes(2, "big") + bytes(4) for n in range(2000))
        server.receive(len(made_up).to_bytes(3, "big") + b"\4" + bytes(5) + made_up, float(second))
    server.receive(SettingsFrame(0, settings={4: 90_000}).serialize(), 30.0)
    assert server.ended is None
    assert len(server._h2.remote_settings) == before
    assert server._h2.remote_settings.initial_window_size == 90_000
    server.receive(SettingsFrame(0, settings={4: 2**31}).serialize(), 40.0)
    assert server.ended is not None, "what cannot be is no setting"


def test_the_same_frames_over_time_are_no_flood() -> None:
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT)
    agent.request()
    agent.exchange(server)
    for second in range(100):
        for _ in range(10):
            server.receive(PingFrame(0, opaque_data=b"12345678").serialize(), float(second))
        server.data_to_send()
    assert server.ended is None


def test_continuation_frames_are_counted() -> None:
    headers = HeadersFrame(3, data=b"")
    server, heard = attacked(headers, *[ContinuationFrame(3, data=b"")] * 11)
    assert goodbye(heard) is ErrorCodes.ENHANCE_YOUR_CALM
    assert server.ended is not None


def test_answers_that_nobody_reads_are_bounded() -> None:
    server, agent = LinkProtocol(Role.SERVER, 0, LinkLimits(control_bytes=1000)), RawPeer(Role.AGENT)
    agent.request()
    agent.exchange(server)
    ping = PingFrame(0, opaque_data=b"12345678").serialize()
    for tenth in range(100_000):
        server.receive(ping, tenth / 10)
        if server.ended:
            break
    assert server.ended == Ended("the other end asks for answers that it does not read")
    assert len(server.data_to_send()) < 70_000


def test_a_frame_longer_than_agreed_is_refused_at_its_header() -> None:
    server, _ = attacked((16_385).to_bytes(3, "big") + b"\0\0" + b"\0\0\0\1")
    assert server.ended == Ended("the other end sent a frame of 16385 bytes, at most 16384 were agreed")


def test_a_second_stream_is_refused() -> None:
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT)
    agent.request()
    agent.exchange(server)
    agent.h2.remote_settings.update({SettingCodes.MAX_CONCURRENT_STREAMS: 10})
    agent.h2.remote_settings.acknowledge()
    agent.h2.send_headers(3, [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", PATH)])
    agent.exchange(server)
    assert server.ended is not None
    assert "Max inbound streams" in server.ended.reason


@pytest.mark.parametrize(
    "request_", [{"path": "/"}, {"method": "PUT"}, {"content_type": "application/grpc"}, {"path": "/llmgw/link/2"}]
)
def test_other_requests_are_not_found(request_: dict[str, str]) -> None:
    server, agent = LinkProtocol(Role.SERVER, 0), RawPeer(Role.AGENT)
    agent.request(**request_)
    heard = agent.exchange(server)
    assert [e.headers[0] for e in heard if isinstance(e, h2.events.ResponseReceived)] == [(":status", "404")]
    assert server.ended == Ended("the request was not for the link")
    assert not server.opened


def test_an_http1_client_is_told_nothing_and_ended() -> None:
    server = LinkProtocol(Role.SERVER, 0)
    (ended,) = server.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0)
    assert isinstance(ended, Ended)
    assert "preamble" in ended.reason


@pytest.mark.parametrize("status", ["404", "500", "2x0"])
def test_another_status_ends_the_agent_with_its_number(status: str) -> None:
    agent, server = LinkProtocol(Role.AGENT, 0), RawPeer(Role.SERVER)
    server.exchange(agent)
    server.h2.send_headers(1, [(":status", status)])
    server.exchange(agent)
    assert agent.ended == Ended(f"the other end answered with HTTP status {status}")


def test_a_malformed_message_tells_its_sender_why() -> None:
    payload = b'{"type":"heartbeat","sequence":"7"}'
    server, _ = attacked(DataFrame(1, data=len(payload).to_bytes(4, "big") + payload))
    assert server.take() is None
    assert server.ended is not None
    assert "expected a whole number, found the text '7' @ $.sequence" in server.ended.reason
    assert server.ended.reason.encode() in server.data_to_send()


def test_too_long_a_message_ends_the_link_at_its_length() -> None:
    server, heard = attacked(DataFrame(1, data=(2**31).to_bytes(4, "big")))
    assert server.ended is not None
    assert str(2**31) in server.ended.reason
    assert goodbye(heard) is ErrorCodes.ENHANCE_YOUR_CALM


def test_nobody_takes_and_the_sender_stops_at_the_window() -> None:
    limits = LinkLimits(window_bytes=70_000, unsent_bytes=50_000)
    ends = opened(limits)
    sent = 0
    while ends.agent.room:
        ends.agent.send(NotUnderstood("x" * 1000), 0)
        sent += 1
        ends.carry()
    on_the_way = sent * 1040
    assert 70_000 + 50_000 - 2_000 < on_the_way < 70_000 + 50_000 + 10_000
    taken = 0
    while ends.server.take() is not None:
        taken += 1
        ends.carry()
        ends.carry()
    assert taken == sent
    assert ends.agent.room


def test_giving_the_window_back_is_no_flood() -> None:
    """A sender that keeps the window full, of small messages that are taken one by one, all within a second."""
    ends = opened()
    for number in range(4000):
        if ends.agent.room:
            ends.agent.send(NotUnderstood("x" * 2000), 0)
        ends.carry()
        if number > 300:
            assert ends.server.take() is not None
            ends.carry()
    assert ends.agent.ended is None
    assert ends.server.ended is None


def test_a_message_larger_than_the_window_arrives() -> None:
    ends = opened(LinkLimits(window_bytes=65_535))
    ends.agent.send(NotUnderstood("x" * 3_000_000), 0)
    assert any(Arrived() in ends.carry() for _ in range(1000))
    message = ends.server.take()
    assert isinstance(message, NotUnderstood)
    assert len(message.tag) == 3_000_000


def test_the_initial_window_changes_after_the_fact() -> None:
    agent, server = LinkProtocol(Role.AGENT, 0), RawPeer(Role.SERVER, {SettingCodes.INITIAL_WINDOW_SIZE: 100})
    server.exchange(agent)
    server.exchange(agent)
    message = NotUnderstood("x" * 1000)
    agent.send(message, 0)

    def received(events: list[h2.events.Event]) -> bytes:
        return b"".join(e.data for e in events if isinstance(e, h2.events.DataReceived))

    got = received(server.exchange(agent))
    assert len(got) == 100
    server.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 20})
    got += received(server.exchange(agent))
    assert len(got) == 100
    server.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 5000})
    got += received(server.exchange(agent))
    assert got == encode(message)


def step_to(end: LinkProtocol, until: float) -> list[object]:
    """Let time pass as a shell does: a tick at each deadline."""
    events: list[object] = []
    while end.next_deadline() <= until:
        events += end.tick(end.next_deadline())
    return events


def test_silence_is_asked_about_then_ends_the_link() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.settle()
    ends.server.take()
    assert step_to(ends.server, 5.9) == []
    assert ends.server.data_to_send() == b""
    assert step_to(ends.server, 6) == []
    assert len(ends.server.data_to_send()) == 17, "a PING"
    assert step_to(ends.server, 15) == [Ended("nothing was heard for 15 s")]
    assert ends.server.next_deadline() == inf


def test_a_ping_is_answered_and_the_answer_is_life() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.settle()
    ends.server.take()
    ends.server.send(WELCOME, 0)
    ends.settle()
    for second in range(1, 200):
        ends.now = float(second)
        step_to(ends.server, ends.now)
        step_to(ends.agent, ends.now)
        ends.settle()
    assert ends.server.ended is None
    assert ends.agent.ended is None


def test_a_slow_consumer_does_not_look_dead() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.settle()
    ends.server.take()
    ends.server.send(WELCOME, 0)
    ends.settle()
    while ends.agent.room:
        ends.agent.send(NotUnderstood("x" * 100), 0)
        ends.carry()
    for second in range(1, 100):  # nobody takes a message
        ends.now = float(second)
        step_to(ends.agent, ends.now)
        step_to(ends.server, ends.now)
        for _ in range(3):
            ends.carry()
    assert ends.server.ended is None


def test_a_process_that_stood_still_does_not_blame_the_peer() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.settle()
    ends.server.take()
    assert ends.server.tick(60) == ()
    assert ends.server.ended is None
    assert step_to(ends.server, 80) == [Ended("nothing was heard for 15 s")]


@pytest.mark.parametrize("role", list(Role))
def test_a_peer_that_never_speaks_http2_is_given_up(role: Role) -> None:
    assert step_to(LinkProtocol(role, 100), 106) == [Ended("no HTTP/2 connection was set up within 5 s")]


def test_an_agent_that_does_not_register_is_given_up() -> None:
    ends = opened()
    assert step_to(ends.server, 6) == [Ended("no first message within 5 s")]


def test_a_control_plane_that_does_not_answer_is_given_up() -> None:
    ends = opened()
    ends.agent.send(register(), 1)
    for second in range(2, 20):
        ends.agent.receive(PingFrame(0, opaque_data=b"12345678").serialize(), second)
        step_to(ends.agent, second)
    assert ends.agent.ended == Ended("no answer to the first message within 15 s")


def test_a_goodbye_carries_its_reason_after_the_last_messages() -> None:
    ends = opened()
    ends.agent.send(register(), 0)
    ends.agent.close("SIGTERM")
    assert ends.settle()[-2:] == [Arrived(), Ended("closed by the other end: SIGTERM")]
    assert ends.server.take() == register()
    assert ends.server.take() is None


def test_a_goodbye_cannot_forge_a_log_line() -> None:
    ends = opened()
    ends.agent.close("bye\nlevel=error \x1b[31m")
    ends.settle()
    assert ends.server.ended == Ended("closed by the other end: bye?level=error ?[31m")


def test_after_the_end_nothing_is_sent_or_heard() -> None:
    ends = opened()
    ends.server.lost("the connection was cut")
    assert ends.server.receive(b"anything", 0) == ()
    assert ends.server.data_to_send() == b""
    assert not ends.server.room
    with pytest.raises(BugError):
        ends.server.send(WELCOME, 0)
