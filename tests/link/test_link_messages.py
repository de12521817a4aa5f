"""The wire between versions: what may be added, what may be missing, and that every change is seen in review."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from fakes.conversation import NODE, Line, read, recorded
from fakes.fleet.store import Disk, MemoryStore
from llmgw import __version__
from llmgw.agent.dispatch import Dispatch
from llmgw.link import messages
from llmgw.link.attend import attend
from llmgw.link.codec import DOWN, JOIN_ANSWERS, JOINING, UP, MalformedError, Unknown, converter, decode, encode
from llmgw.link.messages import CommandResult, NotLeader, NotUnderstood, Refused, Register, Welcome
from llmgw.link.protocol import Role
from llmgw.link.session import PeerGone, Session, open_session
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.settings.daemon import Address
from llmgw.settings.document import Settings
from tests.agent.links import Rig
from tests.link.samples import values

TOP = Path(__file__).resolve().parents[2]
CONVERSATIONS = sorted((Path(__file__).parent / "conversations").glob("*.jsonl"))
TABLES = (UP, DOWN, JOINING, JOIN_ANSWERS)
KINDS = sorted({kind for table in TABLES for kind in table.values()}, key=lambda kind: kind.__name__)
Json = Any


def test_the_schema_in_the_documentation_is_the_one_that_is_printed() -> None:
    from click.testing import CliRunner

    from llmgw.cli.config import command

    printed = CliRunner().invoke(command, ["link-schema"])
    assert printed.exit_code == 0, printed.output
    there = (TOP / "docs/link.schema.json").read_text()
    assert there == printed.output, "the wire has changed: run llmgw config link-schema > docs/link.schema.json"


def test_the_schema_has_every_message_and_sees_a_change() -> None:
    from llmgw.web.schema import wire_schema

    schema = wire_schema("t", 1, {"up": UP, "down": DOWN})
    assert set(schema["up"]) == set(UP)
    assert set(schema["down"]) == set(DOWN)
    assert schema["$defs"]["Welcome"]["required"] == ["protocol", "version", "cluster", "epoch", "heartbeat_s"]
    assert "loads" not in schema["$defs"]["Heartbeat"]["required"], "it has a default: an older agent sends none"

    @attrs.frozen
    class Heartbeat:
        """As it is, but for the type of one field."""

        sequence: float

    changed = wire_schema("t", 1, {"up": {**UP, "heartbeat": Heartbeat}, "down": DOWN})
    assert changed["$defs"]["Heartbeat"] != schema["$defs"]["Heartbeat"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_says_what_it_is_and_in_which_units(kind: type) -> None:
    said = inspect.getdoc(kind) or ""
    assert said
    for field in attrs.fields(kind):
        if get_type_hints(kind)[field.name] is float:
            assert f"``{field.name}``" in said, f"{field.name}: in seconds, bytes or what?"
            assert "second" in said


# Between versions


def fields_of(value: Json, kind: Any) -> Iterator[tuple[dict[str, Json], type]]:
    """Every object of a message in JSON that is an object of ours, with its class."""
    origin, args = get_origin(kind), get_args(kind)
    if value is None:
        return
    if origin is tuple:
        for item in value:
            yield from fields_of(item, args[0])
    elif origin in (Union, UnionType):
        (inner,) = (a for a in args if a is not type(None))
        yield from fields_of(value, inner)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        for item in value.values():
            yield from fields_of(item, args[1])
    elif attrs.has(kind):
        yield value, kind
        hints = get_type_hints(kind)
        for field in attrs.fields(kind):
            yield from fields_of(value[field.name], hints[field.name])


def shown(message: Any) -> dict[str, Json]:
    return dict(json.loads(encode(message)[4:]))


MESSAGES = st.one_of(*(values(kind) for table in (UP, DOWN) for kind in table.values()))


@given(MESSAGES, st.data())
def test_what_a_newer_version_adds_anywhere_is_ignored(message: Any, data: st.DataObject) -> None:
    table = UP if type(message) in UP.values() else DOWN
    wire = shown(message)
    for place, _ in list(fields_of(wire, type(message))):
        if data.draw(st.booleans()):
            place["of_a_newer_version"] = data.draw(st.sampled_from([None, 1, "x", [], {"a": [1]}]))
    assert decode(json.dumps(wire).encode(), table) == message


@given(MESSAGES, st.data())
def test_what_an_older_version_does_not_send_has_its_default(message: Any, data: st.DataObject) -> None:
    table = UP if type(message) in UP.values() else DOWN
    wire, expected = shown(message), shown(message)
    places = list(zip(fields_of(wire, type(message)), fields_of(expected, type(message)), strict=True))
    # From the inside to the outside: what is left out whole needs no more looking at.
    for (sent, kind), (meant, _) in reversed(places):
        for field in attrs.fields(kind):
            if field.default is not attrs.NOTHING and data.draw(st.booleans()):
                default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
                del sent[field.name]
                meant[field.name] = converter().unstructure(default, get_type_hints(kind)[field.name])
    got = decode(json.dumps(wire).encode(), table)
    assert shown(got) == json.loads(json.dumps(expected))


@given(
    st.text(min_size=1).filter(lambda tag: tag not in {**UP, **DOWN}),
    st.dictionaries(st.text(max_size=5), st.integers()),
)
def test_a_message_of_a_newer_version_is_a_value(tag: str, fields: dict[str, int]) -> None:
    payload = json.dumps({**fields, "type": tag}).encode()
    for table in (UP, DOWN):
        assert decode(payload, table) == Unknown(tag[:60])


def test_a_choice_of_a_newer_version_is_a_fault() -> None:
    """So a version that adds one must not send it to an end whose version does not have it: PROTOCOL says which."""
    (line,) = (line for line in recorded() if b'"shard-status"' in line.payload)
    with pytest.raises(MalformedError, match="expected one of"):
        decode(line.payload.replace(b'"state":"starting"', b'"state":"hibernating"'), UP)


# Conversations of released versions


def test_the_present_version_has_its_conversation() -> None:
    file = Path(__file__).parent / "conversations" / f"{__version__}.jsonl"
    written = "".join(f"{line.write()}\n" for line in recorded())
    assert file.read_text() == written, f"the wire has changed: run python -m fakes.conversation > {file.name}"


def test_the_conversation_has_every_message() -> None:
    said = {json.loads(line.payload)["type"] for line in recorded()}
    assert said == set(UP) | set(DOWN)


@pytest.fixture(params=CONVERSATIONS, ids=lambda path: path.stem)
def lines(request: pytest.FixtureRequest) -> tuple[Line, ...]:
    return read(request.param.read_text())


def test_everything_that_was_ever_said_is_still_understood(lines: tuple[Line, ...]) -> None:
    for line in lines:
        table = UP if line.speaker == "agent" else DOWN
        message = decode(line.payload, table)
        assert not isinstance(message, Unknown), line
        again = shown(message)
        for place, then in ((again, json.loads(line.payload)),):
            assert _holds(place, then), f"something of it is lost: {line.write()} is now {again}"


def _holds(now: Json, then: Json) -> bool:
    """Whether all that was said then is there now; there may be more."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(name in now and _holds(now[name], value) for name, value in then.items())
    if isinstance(then, list):
        return len(now) == len(then) and all(map(_holds, now, then))
    return bool(now == then)


def of(lines: tuple[Line, ...], conversation: str, speaker: str) -> list[bytes]:
    return [line.payload for line in lines if (line.conversation, line.speaker) == (conversation, speaker)]


class Willing:
    """Shards and jobs that do what they are told, and nothing."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def find(self, shard: str, generation: int) -> None:
        return None

    async def start(self, what: object, inventory: object = None) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(type(what).__name__)

    async def forget(self, shard: str, generation: int) -> None:
        await trio.lowlevel.checkpoint()

    def cancel(self, job: str, reason: str) -> None:
        self.told.append("cancel")

    @property
    def doctor(self) -> Examined:
        return Examined(self.told)


class Examined:
    """A doctor that finds nothing."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def start(self, command: object) -> None:
        self._told.append(type(command).__name__)


async def say(session: Session, payload: bytes) -> None:
    """Send it as it was sent then."""
    session._protocol._answer(b"200") if session._protocol.role is Role.SERVER else None
    session._protocol._pending += len(payload).to_bytes(4, "big") + payload
    session._stir()
    await trio.lowlevel.checkpoint()


async def test_the_agent_understands_every_control_plane_that_there_was(
    lines: tuple[Line, ...], nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig(nursery, Address("a", 1))
    willing = Willing()
    rig.link._dispatch = Dispatch(
        willing,
        rig.link._epoch,
        rig.link._inventory,
        willing,
        willing.doctor,  # type: ignore[arg-type]
    )
    said: list[object] = []
    down = of(lines, "a session", "control plane")

    async def replay(session: Session, _: Register) -> None:
        for payload in down[:-1]:
            await say(session, payload)
        with trio.move_on_after(10):
            while True:
                said.append(await session.receive())
        await say(session, down[-1])
        await trio.sleep(1)

    async def refuse(session: Session, _: Register) -> None:
        refused = decode(of(lines, "a refusal", "control plane")[0], DOWN)
        assert isinstance(refused, Refused)
        await session.refuse(refused)

    leader = decode(down[-1], DOWN)
    assert isinstance(leader, NotLeader)
    assert leader.leader is not None
    rig.planes = {Address("a", 1): replay, leader.leader: refuse}
    nursery.start_soon(rig.link.run)
    with trio.fail_after(60):
        while "refused because of the claim" not in rig.link.state.reason:
            await trio.sleep(0.1)
    results = [message for message in said if isinstance(message, CommandResult)]
    commands = [decode(p, DOWN) for p in down if b'"command"' in p]
    assert [r.command for r in results] == [c.command for c in commands]  # type: ignore[union-attr]
    assert all(r.accepted for r in results)
    assert not [message for message in said if isinstance(message, NotUnderstood)]
    assert willing.told == ["StartShard", "JobSpec", "cancel", "RunDoctor"]


async def test_the_control_plane_understands_every_agent_that_there_was(
    lines: tuple[Line, ...], nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    cluster = Cluster(
        cluster="c", epoch=1, settings=Settings(models=()), nodes=(), replicas=(), next_serial=1, unplaced=(),
        started=0.0, woken=lambda: None,
    )  # fmt: skip
    agents = Agents(cluster, MemoryStore(Disk(), random.Random(1)), trio.current_time)  # type: ignore[arg-type]
    ours, theirs = trio.testing.memory_stream_pair()

    async def serve() -> None:
        with suppress(PeerGone):
            await attend(theirs, agents.serve, lambda _: None, peer=NODE, remote="memory")

    nursery.start_soon(serve)
    answers: list[object] = []
    async with open_session(ours, Role.AGENT, peer="s", remote="memory") as session:
        for payload in of(lines, "a session", "agent"):
            await say(session, payload)
        with trio.move_on_after(10):
            while True:
                answers.append(await session.receive())
        assert cluster.linked(NODE), "nothing of it ended the session"
        row = cluster.row(NODE)
        assert row is not None
        assert {r.shard for r in row.reports} >= {"m-1.0"}
    assert isinstance(answers[0], Welcome)
    assert not [message for message in answers if isinstance(message, NotUnderstood)]


def test_a_message_class_that_is_on_no_table_is_noticed() -> None:
    ours = {
        kind
        for _, kind in inspect.getmembers(messages, inspect.isclass)
        if kind.__module__ == messages.__name__ and attrs.has(kind)
    }
    assert ours == set(KINDS)
