"""Machines that nothing is wrong with, and one without a GPU."""

from __future__ import annotations

import pytest

from llmgw.doctor.report import lines
from llmgw.doctor.verdict import Severity
from tests.doctor.beds import BASES, examine, rendered


@pytest.mark.parametrize("name", [n for n in BASES if n != "empty-mig"])
async def test_a_healthy_machine_gives_neither_fail_nor_warn_nor_doubt(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    facts, verdicts = await examine(rendered(name, tmp_path_factory), name)
    assert [(v.id, v.text) for v in verdicts if v.severity in (Severity.FAIL, Severity.WARN, Severity.UNKNOWN)] == []
    assert lines(facts, verdicts)
