"""A store that is gone is no new one: who has no key must not be let in because nobody knows any more that keys are wanted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from llmgw.errors import OperatorError
from llmgw.router.counts import COUNTS_FOLDER
from llmgw.server.main import _main, _not_lost
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
def test_a_server_that_ran_before_does_not_begin_with_a_new_store(
    tmp_path: Path, ran: bool, there: bool, store: str | None, refused: bool
) -> None:
    if ran:
        (tmp_path / COUNTS_FOLDER).mkdir()
    if there:
        (tmp_path / FILE).touch()
    with pytest.raises(OperatorError, match="is missing") if refused else nullcontext():
        _not_lost(ServerConfig(str(tmp_path), "settings.yaml", store))
    assert (tmp_path / FILE).exists() is there


async def test_it_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    (tmp_path / COUNTS_FOLDER).mkdir()
    with pytest.raises(OperatorError, match="is missing"):
        await _main(ServerConfig(str(tmp_path), "settings.yaml"))
    assert not (tmp_path / FILE).exists()
