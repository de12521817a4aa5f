"""What PostgreSQL does to a store that SQLite does not: it goes away, hangs, and lets others in."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from llmgw.store.audit import Act
from llmgw.store.database import StoreError
from llmgw.store.opening import store_of
from llmgw.store.postgres import PostgresDatabase, shown, translated
from llmgw.store.sql import SqlStore
from tests.scheduler.clusters import NOW
from tests.store.postgresql import Postgresql, running, user
from tests.store.test_store import record


def test_statements_are_translated() -> None:
    assert translated("a = ? AND b % 2 = :name AND c::text = 'x'") == "a = %s AND b %% 2 = %(name)s AND c::text = 'x'"


def test_no_password_is_shown() -> None:
    assert shown("postgresql://u:se:cr@h/d?x=1&password=abc&y=2") == "postgresql://u:…@h/d?x=1&password=…&y=2"
    assert shown("postgresql://u@h/d?passfile=/p") == "postgresql://u@h/d?passfile=/p"


async def test_many_write_at_once_and_none_is_lost(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()

    async def writer(name: str) -> None:
        async with store_of(address, tmp_path) as store:
            for number in range(20):
                await store.record(Act(NOW, name, "tested.it", str(number)))

    async with trio.open_nursery() as nursery:
        for name in ("a", "b", "c"):
            nursery.start_soon(writer, name)
    async with store_of(address, tmp_path) as store:
        assert (await store.verify_audit()).wrong is None
        rows = await store.audit(100)
        assert len(rows) == 60
        for name in ("a", "b", "c"):
            assert [int(r.object) for r in reversed(rows) if r.by == name] == list(range(20))


async def test_the_older_of_two_writes_nothing(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()
    async with store_of(address, tmp_path) as one, store_of(address, tmp_path) as other:
        old = await one.new_epoch()
        await one.save_pass(record(old, 2))
        new = await other.new_epoch()
        with pytest.raises(StoreError, match=f"epoch {new} was taken since"):
            await one.save_pass(record(old, 9))
        assert (await one.replicas())[1] == 2


async def test_connections_that_are_ended_are_made_anew(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()
    name = address.split("/")[3].split("?")[0]
    async with store_of(address, tmp_path) as store:
        await store.record(Act(NOW, "a", "tested.it", "0"))
        await store.audit(1)
        for number in range(1, 6):
            ended = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            await trio.to_thread.run_sync(postgresql.sql, ended)
            await store.record(Act(NOW, "a", "tested.it", str(number)))
            assert len(await store.audit(100)) == number + 1
        assert (await store.verify_audit()).wrong is None


async def test_a_server_that_is_gone_is_said_and_its_return_needs_no_restart(tmp_path: Path) -> None:
    with running() as server:
        address = server.database()
        async with store_of(address, tmp_path) as store:
            await store.record(Act(NOW, "a", "tested.it", "0"))
            await trio.to_thread.run_sync(server.stop)
            with pytest.raises(StoreError, match="cannot be used") as said:
                await store.record(Act(NOW, "a", "tested.it", "1"))
            assert "check that PostgreSQL runs" in said.value.remedy
            with pytest.raises(StoreError, match="cannot be used"):
                await store.audit(1)
            await trio.to_thread.run_sync(server.start)
            await store.record(Act(NOW, "a", "tested.it", "2"))
            assert [r.object for r in await store.audit(9)] == ["2", "0"]


async def test_a_connection_that_hangs_is_cut_and_another_one_made(tmp_path: Path, postgresql: Postgresql) -> None:
    async with SqlStore(PostgresDatabase(postgresql.database(), tmp_path, bound_s=1.5)) as store:
        backend = await store.database.write(lambda c: c.execute("SELECT pg_backend_pid()").fetchone()[0])
        os.kill(backend, signal.SIGSTOP)
        try:
            with trio.fail_after(10):
                await store.record(Act(NOW, "a", "tested.it", "hung"))
        finally:
            os.kill(backend, signal.SIGCONT)
        assert [r.object for r in await store.audit(9)] == ["hung"]


@pytest.mark.long
async def test_a_server_that_hangs_is_waited_for_no_longer_than_that(tmp_path: Path) -> None:
    with running() as server:
        async with SqlStore(PostgresDatabase(server.database(), tmp_path, bound_s=1.5)) as store:
            backend = await store.database.write(lambda c: c.execute("SELECT pg_backend_pid()").fetchone()[0])
            first = server.pid
            for pid in (backend, first):
                os.kill(pid, signal.SIGSTOP)
            try:
                with trio.fail_after(20), pytest.raises(StoreError, match="cannot be used"):
                    await store.record(Act(NOW, "a", "tested.it", "hung"))
            finally:
                for pid in (backend, first):
                    os.kill(pid, signal.SIGCONT)
            await store.record(Act(NOW, "a", "tested.it", "after"))
            assert [r.object for r in await store.audit(9)] == ["after"]


async def test_nobody_waits_in_the_queue_for_ever(tmp_path: Path, postgresql: Postgresql) -> None:
    async with SqlStore(PostgresDatabase(postgresql.database(), tmp_path, bound_s=1.5)) as store:
        held, free = trio.Event(), trio.Event()

        async def hold() -> None:
            def work(_: object) -> None:
                trio.from_thread.run_sync(held.set)
                trio.from_thread.run(free.wait)

            with pytest.raises(StoreError, match="ended while a change was being written"):
                await store.database.write(work)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await held.wait()
            with trio.fail_after(20), pytest.raises(StoreError, match=r"others have been waiting for it for 1\.5 s"):
                await store.record(Act(NOW, "a", "tested.it", "x"))
            assert await store.audit(1) == (), "reading does not wait for who writes"
            free.set()
        await store.record(Act(NOW, "a", "tested.it", "y"))
        assert [r.object for r in await store.audit(9)] == ["y"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
async def test_a_full_disk_is_said_and_nothing_is_half_written(tmp_path: Path, postgresql: Postgresql) -> None:
    small = postgresql.folder / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "llmgw-test", str(small)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no small disk can be made: {made.stderr.strip()}")
    try:
        shutil.chown(small, user())
        postgresql.sql(f"CREATE TABLESPACE small LOCATION '{small}'")
        postgresql.sql("CREATE DATABASE small TABLESPACE small")
        async with store_of(f"postgresql://llmgw@/small?host={postgresql.folder}", tmp_path) as store:
            await store.add_settings("small", "me", "", NOW)
            filler = small / "filler"
            with pytest.raises(OSError, match="No space left"):
                filler.write_bytes(b"x" * 32 * 1024 * 1024)
            # Not to be made smaller: what is random is not compressed.
            text = "".join(secrets.token_hex(50_000) for _ in range(20))
            with pytest.raises(StoreError, match="the disk is full") as full:
                await store.add_settings(text, "me", "", NOW)
            assert "nothing was changed" in full.value.remedy
            assert [r.revision for r in await store.revisions(9)] == [1]
            assert [r.object for r in await store.audit(9)] == ["revision 1"]
            filler.unlink()
            await store.add_settings(text, "me", "", NOW)
            assert [r.revision for r in await store.revisions(9)] == [2, 1]
            assert (await store.verify_audit()).wrong is None
        postgresql.sql("DROP DATABASE small")
        postgresql.sql("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


async def test_a_writer_that_holds_everybody_up_is_named(tmp_path: Path, postgresql: Postgresql) -> None:
    address = postgresql.database()
    async with store_of(address, tmp_path) as one, store_of(address, tmp_path) as other:
        await other.database.write(lambda c: c.execute("SET lock_timeout = 100"))
        held, free = trio.Event(), trio.Event()

        async def hold() -> None:
            def work(connection: object) -> None:
                trio.from_thread.run_sync(held.set)
                trio.from_thread.run(free.wait)

            await one.database.write(work)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await held.wait()
            with pytest.raises(StoreError, match="another control plane has been writing"):
                await other.record(Act(NOW, "a", "tested.it", "x"))
            free.set()
        await other.record(Act(NOW, "a", "tested.it", "y"))


async def test_what_cannot_be_a_store(tmp_path: Path, postgresql: Postgresql) -> None:
    gone = f"postgresql://llmgw@/nothing?host={postgresql.folder}"
    for address, said in ((gone, 'database "nothing" does not exist'), (f"{gone}x", "cannot be used")):
        with pytest.raises(StoreError, match=said):
            async with store_of(address, tmp_path):
                pass


async def test_the_password_is_in_a_file_and_nowhere_else(tmp_path: Path) -> None:
    with running() as server:
        server.sql("ALTER USER llmgw PASSWORD 'sesame open'")
        address = server.database()
        (server.data / "pg_hba.conf").write_text("local all all scram-sha-256\n")
        server.stop("fast")
        server.start()
        file = tmp_path / "db.pass"
        file.touch(mode=0o600)
        for content, mode, opens in (
            ("sesame open", 0o600, True),
            ("wrong", 0o600, False),
            ("sesame open", 0o644, False),
        ):
            file.write_text(f"*:*:*:llmgw:{content}\n")
            file.chmod(mode)
            store = store_of(f"{address}&passfile={file}", tmp_path)
            if opens:
                async with store:
                    assert (await store.verify_audit()).wrong is None
                continue
            with pytest.raises(StoreError, match="cannot be used") as refused:
                async with store:
                    pass
            assert "password" in refused.value.reason
            assert "sesame" not in str(refused.value)


def test_without_psycopg_it_is_said_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys, trio; from pathlib import Path; from llmgw.store.opening import sqlite_store, store_of\n"
        "assert 'psycopg' not in sys.modules, 'only what is used is imported'\n"
        "sys.modules['psycopg'] = None\n"
        "async def main():\n"
        "    async with sqlite_store(Path(sys.argv[1]) / 'db'): pass\n"
        "    async with store_of('postgresql://u@h/d', Path(sys.argv[1])): pass\n"
        "trio.run(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "StoreError" in done.stderr
    assert "install llmgw[postgres]" in done.stderr
