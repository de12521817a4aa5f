"""What the store needs of a database: transactions, and one dialect of SQL.

Statements are written once, as SQLite and PostgreSQL both understand them: ``?`` or ``:name`` for values, ``ON
CONFLICT`` and ``RETURNING``, no functions that only one of them has. ``write`` transactions follow each other, so that
each sees what the one before it did; a ``read`` sees one state of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from llmgw.errors import OperatorError

_Result = TypeVar("_Result")

Values = Sequence[Any] | Mapping[str, Any]

ALL = 2**62
"""A ``LIMIT`` that limits nothing: SQLite takes no ``OFFSET`` without one."""


class StoreError(OperatorError):
    """The store cannot be used as it is: which one, what is wrong with it, and what to do."""


class Cursor(Protocol):
    """What a statement found."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """An open transaction. It is used in a worker thread."""

    def execute(self, statement: str, values: Values = (), /) -> Cursor:
        """Carry out one statement."""
        ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> object:
        """Carry out one statement for each row."""
        ...


class Run(Protocol):
    """Runs work on a connection, as a reading or as a transaction."""

    async def __call__(self, work: Callable[[Connection], _Result]) -> _Result: ...


class Database(Protocol):
    """Use as an asynchronous context manager; opening brings the schema up to date."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __str__(self) -> str:
        """Its name for people, without any secret."""
        ...

    async def read(self, work: Callable[[Connection], _Result]) -> _Result:
        """What ``work`` finds in the tables; it runs in a thread and changes nothing.

        Raises :class:`StoreError`.
        """
        ...

    async def write(self, work: Callable[[Connection], _Result]) -> _Result:
        """Have ``work`` change the tables, in a thread and in one transaction: all of it or nothing.

        Raises :class:`StoreError`. It may be run again, from the start, where the database took back what it did.
        """
        ...

    async def backup(self, path: Path) -> None:
        """Write all of it, as one state of everything, into a new SQLite file that is 0600 from its first byte.

        Raises :class:`StoreError`, :class:`OSError` and :class:`sqlite3.Error`.
        """
        ...
