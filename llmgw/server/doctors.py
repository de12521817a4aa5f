"""The doctor on many nodes: asked over the link, and what they found held against each other."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import trio
from attrs import define, field

from llmgw.doctor.document import from_json
from llmgw.doctor.facts import Facts
from llmgw.doctor.siblings import Unequal, unequal
from llmgw.errors import OperatorError, UnknownError
from llmgw.link.messages import Command, CommandResult, DoctorReport, RunDoctor

ANSWER_S = 40.0
"""So long an answer is waited for: agents end a reading after 30 s."""


@define(eq=False)
class _Asked:
    node: str
    sent: float
    answered: float = 0.0
    document: dict[str, Any] | None = None
    failed: str = ""
    done: trio.Event = field(factory=trio.Event)


class Doctors:
    """``dispatch`` sends commands to a node; ``linked`` says whether it has a session, ``nodes`` who is known.

    ``wanted`` are the device classes that the catalog's models name, which with the clock is added to what nodes find.
    """

    def __init__(
        self,
        epoch: int,
        nodes: Callable[[], Iterable[str]],
        linked: Callable[[str], bool],
        dispatch: Callable[[str, list[Command]], None],
        wall: Callable[[], float],
        wanted: Callable[[], Iterable[str]],
    ) -> None:
        self._epoch = epoch
        self._nodes = nodes
        self._linked = linked
        self._dispatch = dispatch
        self._wall = wall
        self._wanted = wanted
        self._open: dict[str, _Asked] = {}

    async def examine(
        self, nodes: tuple[str, ...]
    ) -> tuple[Mapping[str, dict[str, Any]], Mapping[str, str], tuple[Unequal, ...]]:
        """Documents and failures by node, and what siblings have otherwise; of all nodes where none is named.

        Raises :class:`OperatorError` for a node that has never registered.
        """
        known = tuple(self._nodes())
        for node in nodes:
            if node not in known:
                raise UnknownError(f"node {node[:100]}", "has never registered", "see llmgw ctl nodes")
        asked = [await self._ask(node) for node in nodes or known]
        with trio.move_on_after(ANSWER_S):
            for one in asked:
                await one.done.wait()
        for name, one in list(self._open.items()):
            if one in asked:
                del self._open[name]
                one.failed = one.failed or f"no answer within {ANSWER_S:g} s"
        documents = {one.node: one.document for one in asked if one.document is not None}
        failed = {one.node: one.failed for one in asked if one.document is None}
        facts: dict[str, Facts] = {}
        for node, document in documents.items():
            try:
                self._add(document, next(one for one in asked if one.node == node))
                facts[node] = from_json(document, node).facts
            except OperatorError as wrong:
                failed[node] = f"its answer {wrong.reason}"
        return {node: documents[node] for node in facts}, failed, unequal(facts)

    def _add(self, document: dict[str, Any], one: _Asked) -> None:
        """What only the control plane knows. The node read its clock at some time between question and answer."""
        facts = document.get("facts")
        if not isinstance(facts, dict):
            return
        facts["wanted_classes"] = sorted(set(self._wanted()))
        now = facts.get("now")
        if isinstance(now, int | float):
            ahead = max(0.0, one.sent - now) - max(0.0, now - one.answered)
            facts["plane_ahead_s"] = round(ahead, 3)

    async def _ask(self, node: str) -> _Asked:
        one = _Asked(node, self._wall())
        if not self._linked(node):
            one.failed = "is not connected"
            one.done.set()
            return one
        name = f"doctor-{secrets.token_hex(6)}"
        self._open[name] = one
        self._dispatch(node, [RunDoctor(name, self._epoch)])
        await trio.lowlevel.checkpoint()
        return one

    def reported(self, node: str, message: DoctorReport) -> None:
        """A node answered."""
        one = self._open.pop(message.command, None)
        if one is None or one.node != node:
            return
        one.failed = message.failed
        one.answered = self._wall()
        if not message.failed:
            try:
                said = json.loads(message.document)
                one.document = said if isinstance(said, dict) else None
            except (ValueError, RecursionError):
                one.document = None
            if one.document is None:
                one.failed = "its answer is no report of llmgw doctor"
        one.done.set()

    def refused(self, node: str, result: CommandResult) -> None:
        """A node does not do it."""
        one = self._open.get(result.command)
        if one is not None and one.node == node and not result.accepted:
            del self._open[result.command]
            one.failed = f"{result.reason}. {result.remedy}".rstrip(". ")
            one.done.set()

    def not_understood(self, node: str) -> None:
        """An agent of an older version knows no doctor."""
        for name, one in list(self._open.items()):
            if one.node == node:
                del self._open[name]
                one.failed = "its agent is too old to be asked: upgrade it, or run llmgw doctor on the node"
                one.done.set()
