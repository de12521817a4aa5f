from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmgw.store.opening import sqlite_store, store_of
from llmgw.store.sql import SqlStore
from tests.store.postgresql import Postgresql, running


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """A PostgreSQL server for all tests of this process."""
    with running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], SqlStore]:
    """A store in a new database of either kind; called again it is the same database."""
    if request.param == "sqlite":
        return lambda: sqlite_store(tmp_path / "db")
    address = request.getfixturevalue("postgresql").database()
    return lambda: store_of(address, tmp_path)
