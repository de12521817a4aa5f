"""The doctor asked over the link: every node answers, refuses, is too old, or is told not to have answered."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from llmgw.doctor.checks import CHECKS
from llmgw.doctor.document import FORMAT, Document, as_json, from_json
from llmgw.doctor.facts import Facts
from llmgw.doctor.verdict import Severity, judge
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Driver
from llmgw.link.messages import Command, CommandResult, DoctorReport, RunDoctor
from llmgw.server.doctors import ANSWER_S, Doctors


def document(driver: str, now: float = 1000.0) -> str:
    return json.dumps(as_json(Document("1", False, Facts(driver=Driver(driver), now=now)), CHECKS))


class Link:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: dict[str, RunDoctor] = {}
        self.doctors = Doctors(7, lambda: ("a", "b", "c", "d", "e", "away"), lambda n: n != "away", self.dispatch,
                               lambda: self.now, lambda: ("a100-40gb-mig-1g.5gb", "h100-80gb"))  # fmt: skip

    def dispatch(self, name: str, commands: list[Command]) -> None:
        (command,) = commands
        assert isinstance(command, RunDoctor)
        assert command.epoch == 7
        self.sent[name] = command


async def test_every_node_is_told_of(autojump_clock: trio.testing.MockClock) -> None:
    link = Link()
    answers = []

    async def ask() -> None:
        answers.append(await link.doctors.examine(()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        sent = link.sent
        assert sorted(sent) == ["a", "b", "c", "d", "e"]
        link.doctors.reported("b", DoctorReport(sent["a"].command, document("evil")))  # not for another node
        link.doctors.reported("b", DoctorReport(sent["b"].command, document("2")))
        link.doctors.refused("c", CommandResult(sent["c"].command, False, "is busy", "wait"))
        link.doctors.not_understood("d")
        link.doctors.reported("a", DoctorReport("unasked", document("3")))
        began = trio.current_time()
    ((documents, failed, found),) = answers
    assert trio.current_time() - began == pytest.approx(ANSWER_S)
    assert [d["facts"]["driver"]["version"] for d in documents.values()] == ["2"]
    assert failed["c"] == "is busy. wait"
    assert failed["d"].startswith("its agent is too old")
    assert failed["e"] == f"no answer within {ANSWER_S:g} s"
    assert failed["away"] == "is not connected"
    assert found == ()
    link.doctors.reported("e", DoctorReport(sent["e"].command, document("late")))


async def test_what_is_no_report_is_said_and_siblings_are_compared() -> None:
    link = Link()
    answers = []

    async def ask() -> None:
        answers.append(await link.doctors.examine(("a", "b", "c", "d", "e")))

    newer = '{"format": 99, "facts": {}}'
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while len(link.sent) < 5:
            await trio.sleep(0)
        for name, text in (("a", "{"), ("b", "[]"), ("c", document("1")), ("d", document("2")), ("e", newer)):
            link.doctors.reported(name, DoctorReport(link.sent[name].command, text))
    ((documents, failed, (found,)),) = answers
    assert sorted(documents) == ["c", "d"]
    assert failed.pop("e") == f"its answer has format 99, {FORMAT} is known"
    assert set(failed.values()) == {"its answer is no report of llmgw doctor"}
    assert found.thing == "NVIDIA driver"


async def test_the_control_plane_adds_its_clock_and_what_models_name() -> None:
    link = Link()
    answers = []

    async def ask() -> None:
        answers.append(await link.doctors.examine(("a", "b", "c")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while len(link.sent) < 3:
            await trio.sleep(0)
        link.now = 1010.0
        for name, now in (("a", 1004.0), ("b", 980.0), ("c", 1017.0)):
            link.doctors.reported(name, DoctorReport(link.sent[name].command, document("1", now)))
    ((documents, _, _),) = answers
    facts = {name: from_json(said, name).facts for name, said in documents.items()}
    assert {name: said.plane_ahead_s for name, said in facts.items()} == {"a": 0.0, "b": 20.0, "c": -7.0}
    assert facts["a"].wanted_classes == ("a100-40gb-mig-1g.5gb", "h100-80gb")
    found = {name: next(v for v in judge(said, CHECKS) if v.id == "time.sync") for name, said in facts.items()}
    assert found["a"].severity is Severity.OK
    assert found["b"].text == "The control plane's clock is at least 20 s ahead of this one."
    assert found["c"].severity is Severity.FAIL


async def test_a_node_that_nobody_knows() -> None:
    with pytest.raises(OperatorError, match="has never registered"):
        await Link().doctors.examine(("x",))
