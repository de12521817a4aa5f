"""Conversations between an agent and a control plane, as this version writes them: made-up values, every message.

    python -m fakes.conversation > tests/link/conversations/VERSION.jsonl

One line for each message: the conversation, who says it, and the JSON that travels. The files of released versions stay
as they are and are replayed to both daemons; the file of the present version is written anew when the wire changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import evolve, frozen

from llmgw.hardware.delta import InventoryDelta
from llmgw.hardware.inventory import Inventory
from llmgw.link import messages as m
from llmgw.link.codec import DOWN, UP, encode

NODE = "n1"
_LENGTH_BYTES = 4


@frozen
class Line:
    """One message of a conversation; ``speaker`` is ``agent`` or ``control plane``, ``payload`` its JSON."""

    conversation: str
    speaker: str
    payload: bytes

    def write(self) -> str:
        """As a line of a file."""
        said = json.loads(self.payload)
        return json.dumps({"conversation": self.conversation, "from": self.speaker, "message": said})


def read(text: str) -> tuple[Line, ...]:
    """The lines of a file."""
    rows = (json.loads(row) for row in text.splitlines())
    return tuple(Line(r["conversation"], r["from"], json.dumps(r["message"]).encode()) for r in rows)


def made_up(kind: Any, name: str = "x") -> Any:
    """A value of a type with everything in it: each optional part is there, each list has one of its kind."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        return (made_up(args[0], name),)
    if origin in (Union, UnionType):
        return made_up(next(a for a in args if a is not type(None)), name)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return MappingProxyType({name: made_up(args[1], name)})
    if attrs.has(kind):
        hints = get_type_hints(kind)
        return kind(**{f.alias or f.name: made_up(hints[f.name], f.name) for f in attrs.fields(kind)})
    if issubclass(kind, Enum):
        return next(iter(kind))
    return {bool: True, int: 1, float: 0.5, str: name}[kind]


def _shard_named(message: Any) -> Any:
    return evolve(message, shard="m-1.0", generation=1, epoch=1)


def _session() -> Iterator[tuple[str, m.Message]]:
    """One session in which everything is said that can be."""
    inventory = made_up(Inventory)
    register = evolve(made_up(m.Register), protocol=m.PROTOCOL, node=NODE, inventory=inventory, epoch=1)
    yield "agent", register
    yield "control plane", evolve(made_up(m.Welcome), protocol=m.PROTOCOL, epoch=1, heartbeat_s=5.0)
    commands: tuple[type, ...] = (m.StartShard, m.DrainShard, m.StopShard, m.ForgetShard)
    for kind in commands:
        yield "control plane", evolve(_shard_named(made_up(kind)), command=f"a {kind.__name__}")
    jobs: tuple[type, ...] = (m.RunJob, m.CancelJob, m.RunDoctor)
    for job in jobs:
        yield "control plane", evolve(made_up(job), command=f"a {job.__name__}", epoch=1)
    special: dict[type, m.Message] = {
        m.HardwareChanged: m.HardwareChanged(
            1, InventoryDelta(("driver",), evolve(inventory, devices=(), adapters=()), (), ())
        ),
        m.ShardStatus: m.ShardStatus(evolve(register.shards[0], shard="m-1.0", generation=1)),
    }
    told = {m.Register, m.Welcome, m.Refused, m.NotLeader}
    told |= {m.StartShard, m.DrainShard, m.StopShard, m.ForgetShard, m.RunJob, m.CancelJob, m.RunDoctor}
    tables: tuple[tuple[str, Mapping[str, type]], ...] = (("agent", UP), ("control plane", DOWN))
    for speaker, table in tables:
        for kind in table.values():
            if kind not in told:
                yield speaker, special.get(kind) or made_up(kind)
    yield "control plane", made_up(m.NotLeader)


def _refusal() -> Iterator[tuple[str, m.Message]]:
    yield "agent", evolve(made_up(m.Register), protocol=m.PROTOCOL, node=NODE)
    yield "control plane", made_up(m.Refused)


def recorded() -> tuple[Line, ...]:
    """Every conversation, as the present version writes it."""
    return tuple(
        Line(name, speaker, encode(message)[_LENGTH_BYTES:])
        for name, said in (("a session", _session()), ("a refusal", _refusal()))
        for speaker, message in said
    )


if __name__ == "__main__":
    print("\n".join(line.write() for line in recorded()))
