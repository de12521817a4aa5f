"""Machines that nothing is wrong with, and one without a GPU."""

from __future__ import annotations

import attrs
import pytest

from llmgw.doctor.checks import CHECKS
from llmgw.doctor.facts import Facts, Unread
from llmgw.doctor.report import lines
from llmgw.doctor.verdict import Severity, judge
from tests.doctor.beds import BASES, examine, rendered


@pytest.mark.parametrize("name", [n for n in BASES if n != "empty-mig"])
async def test_a_healthy_machine_gives_neither_fail_nor_warn_nor_doubt(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    facts, verdicts = await examine(rendered(name, tmp_path_factory), name)
    assert [(v.id, v.text) for v in verdicts if v.severity in (Severity.FAIL, Severity.WARN, Severity.UNKNOWN)] == []
    assert lines(facts, verdicts)


@pytest.mark.parametrize("name", list(BASES))
async def test_no_check_falls_over_a_fact_that_is_not_there(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    facts, _ = await examine(rendered(name, tmp_path_factory), name)
    for fact in attrs.fields(Facts):
        less = attrs.evolve(facts, **{fact.name: fact.default})
        assert len(judge(less, CHECKS)) == len(CHECKS)
        unread = attrs.evolve(less, unread=(Unread(fact.name, "why"),))
        readers = {c.id for c in CHECKS if fact.name in c.reads and c.applies(unread)}
        assert {v.id for v in judge(unread, CHECKS) if v.severity is Severity.UNKNOWN} >= readers
        assert list(lines(unread, judge(unread, CHECKS), unknown=True))
