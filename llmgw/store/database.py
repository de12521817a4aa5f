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


class StoreAwayError(StoreError):
    """The database does not answer, and may do so later."""


class LostLeadError(StoreError):
    """A higher epoch was taken: another control plane decides by now."""


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


class Tables(Protocol):
    """What reads and writes tables."""

    @property
    def read(self) -> Run: ...

    @property
    def write(self) -> Run: ...


class Database(Protocol):
    """Use as an asynchronous context manager; opening brings the schema up to date.

    ``shared`` says whether several control planes can have it open at once.
    """

    @property
    def shared(self) -> bool: ...

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


class Fence:
    """Writes that are refused once a higher epoch was taken: each looks, in its own transaction.

    Without an ``epoch`` nothing is looked at: so writes what may be written by whoever does not lead.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self.epoch: int | None = None
        self.read = database.read

    async def write(self, work: Callable[[Connection], _Result]) -> _Result:
        """As :meth:`Database.write`."""
        ours = self.epoch

        def fenced(connection: Connection) -> _Result:
            if ours is not None:
                check_epoch(connection, ours, str(self._db))
            return work(connection)

        return await self._db.write(fenced)


def check_epoch(connection: Connection, ours: int, name: str) -> None:
    """Raise :class:`StoreError` unless this is the newest epoch."""
    (epoch,) = connection.execute("SELECT epoch FROM cluster").fetchone()
    if epoch != ours:
        raise LostLeadError(
            name,
            f"epoch {epoch} was taken since, this control plane has {ours}",
            "only one control plane decides; stop this one",
        )
