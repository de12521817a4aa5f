"""A store that is gone is no new one: who has no key must not be let in because nobody knows any more that keys are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.errors import OperatorError
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.server import main
from llmgw.settings.daemon import ServerConfig
from llmgw.store.opening import FILE


@pytest.mark.parametrize(
    ("ran", "there", "store", "refused"),
    [
        (True, False, None, True),
        (True, True, None, False),
        (False, False, None, False),
        (True, False, "postgresql://h/d", False),
    ],
)
async def test_a_server_that_ran_before_does_not_begin_with_a_new_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: bool, there: bool, store: str | None, refused: bool
) -> None:
    class OpenedError(Exception):
        """It got as far as that."""

    def opened(_address: str | None, _folder: Path) -> None:
        raise OpenedError

    monkeypatch.setattr(main, "store_of", opened)
    if ran:
        (tmp_path / COUNTS_FOLDER).mkdir()
    if there:
        (tmp_path / FILE).touch()
    with pytest.raises(OperatorError if refused else OpenedError) as raised:
        await main._main(ServerConfig(str(tmp_path), "settings.yaml", store))
    assert not refused or "is missing" in str(raised.value)
    assert (tmp_path / FILE).exists() is there
