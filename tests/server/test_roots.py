"""One CA follows another, in any order of what nodes and operators do: nobody who is within their time is cut off."""

from __future__ import annotations

from attrs import evolve, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmgw.server.roots import Standing, lacking, needing, possible
from llmgw.store.identity import HeldRow, IssuedRow

LIFE = 100.0
GRACE = 20.0
NODES = ("n1", "n2", "n3")
names = st.sampled_from(NODES)


def test_who_is_waited_for() -> None:
    nodes = (
        Standing("has-both", "old", 10.0, ("new", "old")),
        Standing("old-only", "old", 10.0, ("old",)),
        Standing("silent", "old", 10.0, None),
        Standing("gone", "old", -30.0, ("old",)),
        Standing("done", "new", 10.0, ("new",)),
    )
    assert {n.node for n in lacking("new", nodes, 0.0, GRACE)} == {"old-only", "silent"}
    assert {n.node for n in needing("old", nodes, 0.0, GRACE)} == {"has-both", "old-only", "silent"}
    assert {n.node for n in needing("new", nodes, 0.0, GRACE)} == {"done"}
    assert {n.node for n in lacking("new", (evolve(nodes[1], not_after=-1.0),), 0.0, GRACE)} == {"old-only"}
    assert not lacking("new", (nodes[3],), 0.0, GRACE)
    assert needing("old", (Standing("left", "new", 10.0, ("old",)),), 0.0, GRACE), "it could not get the new root"


@frozen
class _Node:
    """What a node has, and what the control plane knows of it."""

    root: str
    not_after: float
    cas: frozenset[str]
    held: HeldRow
    serial: str = "0"
    issued: IssuedRow | None = None


class Rotation(RuleBasedStateMachine):
    """The control plane trusts a bundle, shows a certificate below one root, and issues below one."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next = 1
        self.issuing = self.shown = "ca0"
        self.bundle = frozenset({"ca0"})
        self.serial = 0
        held = HeldRow("", "0", "", "ca0", LIFE, None, 0.0)
        self.nodes = {n: _Node("ca0", LIFE, self.bundle, evolve(held, node=n)) for n in NODES}

    def _known(self) -> tuple[Standing, ...]:
        return tuple(s for node in self.nodes.values() for s in possible(node.held, node.issued))

    def _alive(self, name: str) -> bool:
        return self.nodes[name].not_after + GRACE > self.now

    def _gets_in(self, name: str) -> bool:
        node = self.nodes[name]
        return self._alive(name) and node.root in self.bundle and self.shown in node.cas

    @rule(seconds=st.floats(1, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=names, cut=st.booleans())
    def connect(self, name: str, cut: bool) -> None:
        """It shows its certificate and gets the bundle; it says that it has it unless it is cut off before it can."""
        if self._gets_in(name):
            node = self.nodes[name]
            held = HeldRow(name, node.serial, "", node.root, node.not_after, node.held.cas, self.now)
            self.nodes[name] = evolve(node, cas=self.bundle, held=held)
            if not cut:
                self._says(name)

    @rule(name=names, arrives=st.booleans(), cut=st.booleans())
    def renew(self, name: str, arrives: bool, cut: bool) -> None:
        """The certificate may get lost on the way, and so may the word that it has arrived."""
        if not self._gets_in(name):
            return
        self.serial += 1
        self.now += 0.001
        ends = self.now + LIFE
        node = evolve(self.nodes[name], issued=IssuedRow(str(self.serial), name, "", self.issuing, ends, self.now))
        if arrives:
            node = evolve(node, root=self.issuing, not_after=ends, serial=str(self.serial), cas=self.bundle)
        self.nodes[name] = node
        if arrives and not cut:
            self._says(name)

    def _says(self, name: str) -> None:
        node = self.nodes[name]
        held = HeldRow(name, node.serial, "", node.root, node.not_after, tuple(sorted(node.cas)), self.now)
        self.nodes[name] = evolve(node, held=held)

    @precondition(lambda self: len(self.bundle) == 1)
    @rule()
    def add(self) -> None:
        self.bundle |= {f"ca{self.next}"}

    @precondition(lambda self: f"ca{self.next}" in self.bundle)
    @rule()
    def switch(self) -> None:
        new = f"ca{self.next}"
        if not lacking(new, self._known(), self.now, GRACE):
            self.issuing = self.shown = new
            self.next += 1

    @precondition(lambda self: len(self.bundle) == 2)
    @rule()
    def retire(self) -> None:
        for old in self.bundle - {self.issuing}:
            if old < self.issuing and not needing(old, self._known(), self.now, GRACE):
                self.bundle -= {old}

    @invariant()
    def nobody_within_their_time_is_cut_off(self) -> None:
        for name in NODES:
            assert self._gets_in(name) or not self._alive(name)


Rotation.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestRotation = Rotation.TestCase
