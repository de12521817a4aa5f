from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.codec import (
    DOWN,
    JOIN_ANSWERS,
    JOINING,
    UP,
    MalformedError,
    MessageBuffer,
    Unknown,
    UnsendableError,
    decode,
    encode,
)
from llmgw.link.messages import AskBundle, Heartbeat, Join, NotUnderstood, ShardStatus
from tests.link.samples import REFUSED, WELCOME, register, report, values


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


ANY = st.one_of(*(values(kind) for table in (UP, DOWN) for kind in table.values()))


@given(ANY)
def test_what_is_sent_is_what_arrives(message: object) -> None:
    data = encode(message)  # type: ignore[arg-type]
    assert struct.unpack(">I", data[:4]) == (len(data) - 4,)
    table = UP if type(message) in UP.values() else DOWN
    assert decode(data[4:], table) == message  # type: ignore[arg-type]


def test_tags_are_what_other_versions_expect() -> None:
    assert set(UP) == {
        "register", "heartbeat", "hardware-changed", "weights-found", "shard-status", "job-status", "engines-changed",
        "command-result", "not-understood", "identity-held", "renew-certificate", "log-chunk", "settings-applied",
        "doctor-report",
    }  # fmt: skip
    assert set(DOWN) == {
        "welcome", "refused", "look-for-weights", "start-shard", "drain-shard", "stop-shard", "forget-shard", "run-job",
        "cancel-job", "not-understood", "not-leader", "heartbeat-seen", "trust-bundle", "certificate-issued",
        "renewal-refused", "tail-log", "stop-tail", "settings-changed", "run-doctor",
    }  # fmt: skip
    assert set(JOINING) == {"ask-bundle", "join"}
    assert set(JOIN_ANSWERS) == {"bundle", "joined", "refused"}
    assert not {Join, AskBundle} & {*UP.values(), *DOWN.values()}, "who joins cannot speak on the link, nor the reverse"
    assert json.loads(encode(Heartbeat(7))[4:]) == {"type": "heartbeat", "sequence": 7, "loads": []}


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert decode(body(type="heartbeat", sequence=1, load={"gpu": 0.5}), UP) == Heartbeat(1)


def test_a_tag_of_a_newer_version_is_a_value() -> None:
    assert decode(body(type="hold-breath", lines=3), DOWN) == Unknown("hold-breath")


def test_a_message_for_the_other_direction_is_not_understood() -> None:
    assert decode(encode(WELCOME)[4:], UP) == Unknown("welcome")


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"{", "no JSON"),
        (b"\xff\xff", "no JSON"),
        (b"[" * 5000 + b"]" * 5000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "'type'"),
        (body(type=7), "'type'"),
        (body(type="heartbeat"), "$.sequence"),
        (body(type="heartbeat", sequence="7"), "$.sequence"),
        (body(type="heartbeat", sequence=True), "$.sequence"),
        (
            body(type="hardware-changed", sequence=1, delta={"changed": [], "values": {"host": {"hostname": 3}}}),
            "$.delta.values.host",
        ),
        (body(type="shard-status", report=[]), "$.report"),
    ],
)
def test_malformed_messages_name_the_path(payload: bytes, says: str) -> None:
    with pytest.raises(MalformedError) as caught:
        decode(payload, UP)
    assert says in str(caught.value)


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "report", "inventory", "sequence", "host", "shards", "node", "state"]), inner, max_size=4),
).map(lambda v: json.dumps({"type": "register"} | v if isinstance(v, dict) else v).encode()))  # fmt: skip
def test_nothing_but_typed_errors_comes_of_garbage(payload: bytes) -> None:
    for table in (UP, DOWN):
        with contextlib.suppress(MalformedError):
            decode(payload, table)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(UnsendableError, match="at most 100"):
        encode(NotUnderstood("x" * 200), 100)


def test_text_that_json_cannot_carry_is_not_sent() -> None:
    with pytest.raises(UnsendableError, match="JSON"):
        encode(NotUnderstood("\udcff"))


@given(st.lists(st.sampled_from([WELCOME, REFUSED, Heartbeat(3), register()]), max_size=6), st.data())
def test_any_split_of_the_bytes_gives_the_same_messages(messages: list[object], data: st.DataObject) -> None:
    stream = b"".join(encode(m) for m in messages)  # type: ignore[arg-type]
    buffer, taken = MessageBuffer(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        buffer.feed(stream[:size])
        stream = stream[size:]
        while (payload := buffer.first()) is not None:
            taken.append(decode(payload, {**UP, **DOWN}))
            buffer.drop()
    assert taken == messages
    assert len(buffer) == 0


@pytest.mark.parametrize("length", [0, 1, 1001, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_its_message_comes(length: int) -> None:
    buffer = MessageBuffer(1000)
    buffer.feed(struct.pack(">I", length)[:3])
    with pytest.raises(MalformedError, match=str(length)):
        buffer.feed(struct.pack(">I", length)[3:])


def test_the_second_length_is_checked_too() -> None:
    buffer = MessageBuffer(1000)
    buffer.feed(struct.pack(">I", 2) + b"{}" + struct.pack(">I", 5000))
    with pytest.raises(MalformedError, match="5000"):
        buffer.drop()


def test_secrets_do_not_show_in_text() -> None:
    status = ShardStatus(report(api_key="sesame"))
    assert "sesame" not in repr(status)
    assert b"sesame" in encode(status)
