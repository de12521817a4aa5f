from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
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
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Callable[[], SqlStore]]:
    """Makes a new, empty database of either kind each time, and returns what opens it."""
    if request.param == "sqlite":
        numbers = itertools.count()

        def file() -> Callable[[], SqlStore]:
            return partial(sqlite_store, tmp_path / f"db{next(numbers)}")

        return file
    server: Postgresql = request.getfixturevalue("postgresql")
    return lambda: partial(store_of, server.database(), tmp_path)


@pytest.fixture
def opened(new_store: Callable[[], Callable[[], SqlStore]]) -> Callable[[], SqlStore]:
    """A store in a new database of either kind; called again it is the same database."""
    return new_store()
