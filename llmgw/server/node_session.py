"""What the control plane keeps of one open session: who it is, what it was sent and told, what waits to be sent."""

from __future__ import annotations

import math

import trio
from attrs import define, field

from llmgw.link.identity import Certificate
from llmgw.link.messages import Command, NotUnderstood, ServerMessage
from llmgw.link.session import Session
from llmgw.server.admission import Presence
from llmgw.server.enrolment import Granted
from llmgw.server.logs import Readers
from llmgw.settings.agent_part import NodeSettings

_SENT = 1000
"""So many commands of a session are remembered, those longest not asked for forgotten first: they come for months."""

_QUEUED = 200
"""Beyond these nothing is queued for an agent that does not read; a later pass sends what it still wants."""


@define(eq=False)
class NodeSession:
    """One node's session, as long as it lasts. ``chain`` is what it goes by, ``granted`` what was issued since."""

    node: str
    session: Session
    presence: Presence
    replaced: trio.CancelScope
    chain: tuple[Certificate, ...] = ()
    granted: Granted | None = None
    look: trio.Event = field(factory=trio.Event)
    told: NodeSettings | None = None
    told_at: float = 0.0
    sent: dict[str, Command] = field(factory=dict)
    again: dict[str, float] = field(factory=dict)
    hardware: int = 0
    queue: list[ServerMessage] = field(factory=list)
    ready: trio.Event = field(factory=trio.Event)
    readers: Readers = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.readers = Readers(self.put)

    @property
    def full(self) -> bool:
        return len(self.queue) >= _QUEUED

    def put(self, message: ServerMessage) -> None:
        self.queue.append(message)
        self.ready.set()

    def answer(self, message: NotUnderstood) -> None:
        """Queue what the agent can do without, should it be one that asks much and reads nothing."""
        if not self.full:
            self.put(message)

    def command(self, command: Command, now: float) -> None:
        """Queue a command, unless this session has sent it already."""
        name = command.command
        known = self.sent.pop(name, None)
        if known is None or now >= self.again.get(name, math.inf):
            if self.full:
                return
            self.again.pop(name, None)
            self.put(command)
            known = command
        self.sent[name] = known  # again at the end
        if len(self.sent) > _SENT:
            longest = next(iter(self.sent))
            del self.sent[longest]
            self.again.pop(longest, None)
