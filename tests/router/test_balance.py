"""Who lets others accept first."""

from __future__ import annotations

from pathlib import Path

from llmgw.router.balance import Balance


def test_whoever_has_clearly_more_waits(tmp_path: Path) -> None:
    one, two = Balance(tmp_path, 0), Balance(tmp_path, 3)
    assert not one.ahead(100), "nobody else is there"
    two.have(10)
    assert not one.ahead(12)
    assert one.ahead(13)
    one.have(13)
    assert not two.ahead(10)
    two.leave()
    assert not one.ahead(100), "the other one accepts nothing any more"
