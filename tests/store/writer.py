"""A process that forks writers of a store, so that a round of killing one costs no start of Python.

For each line ``ADDRESS`` (a path, or a ``postgresql://`` address) of its standard input it forks a writer, says
``pid PID``, and ``end`` once that one is gone. In between the writer says ``opened`` and then, for each change that the
store has acknowledged, ``NUMBER``.
"""

from __future__ import annotations

import os
import sys
import traceback
from itertools import count
from pathlib import Path

import psycopg  # noqa: F401 - imported before the fork, not in each writer
import trio

from llmgw.settings.keys import ApiKey
from llmgw.store.keys import KeyEvent
from llmgw.store.opening import sqlite_store, store_of
from llmgw.store.sql import SqlStore
from tests.scheduler.clusters import NOW, row
from tests.store.test_store import record


def store_at(address: str) -> SqlStore:
    """The store that a line names."""
    if address.startswith("postgresql:"):
        return store_of(address, Path("/nonexistent"))
    return sqlite_store(Path(address))


async def change(store: SqlStore, epoch: int, number: int) -> None:
    """Three changes that belong together, each in a transaction of its own: ``number`` says how far they came."""
    await store.add_settings(f"number: {number}\n{'x' * (number % 7 * 3000)}", "me", str(number), NOW)
    await store.keys.add_key(
        ApiKey(f"k{number}", 0, 0, "d" * 64, NOW), KeyEvent(NOW, f"k{number}", "key.create", "me", "")
    )
    await store.save_pass(record(epoch, number, replicas=(row(number),)))


async def _write(address: str) -> None:
    async with store_at(address) as store:
        epoch = await store.new_epoch()
        os.write(1, b"opened\n")
        newest = await store.settings()
        for number in count(1 if newest is None else int(newest.reason) + 1):
            await change(store, epoch, number)
            os.write(1, b"%d\n" % number)


def main() -> None:
    """Fork a writer for each line, until there are no more."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                trio.run(_write, line.strip())
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.write(1, b"pid %d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(1, b"end %d\n" % status)


if __name__ == "__main__":
    main()
