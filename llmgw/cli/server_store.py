"""``llmgw server backup``, ``restore`` and ``check``: the store, looked after by hand."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import trio

from llmgw.account import account
from llmgw.cli.admin_client import connect
from llmgw.cli.files import server_config
from llmgw.cli.terminal import agreed, echo, echo_json, say
from llmgw.cli.values import noted_row
from llmgw.durable import whole
from llmgw.errors import OperatorError
from llmgw.settings.daemon import ServerConfig
from llmgw.store.audit import Act, Noted
from llmgw.store.folder import held
from llmgw.store.opening import FILE, sqlite_store, store_of
from llmgw.store.postgres import PostgresDatabase
from llmgw.store.sql import SqlStore
from llmgw.store.upkeep import check as look
from llmgw.store.upkeep import looked_at, restore_postgresql, restore_sqlite

_as_json = click.option("--json", "as_json", is_flag=True, help="What it came to, as JSON.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@_as_json
@click.pass_context
def backup(ctx: click.Context, file: Path, force: bool, as_json: bool) -> None:
    """Write the whole store into FILE, as one state of everything.

    A server that runs goes on; it is asked for the backup over its admin API. FILE is a SQLite database, whichever
    database the store is in, so that llmgw server restore can move a store from one to the other. It has hashes of
    keys and tokens in it, and is 0600. Keep it with what it does not have: server.yaml and the CA's folder.
    """
    config = server_config(ctx.obj)
    if file.exists() and not force:
        raise OperatorError(str(file), "is there already", "name another file, or give --force")
    if config.store is None and _runs(config):
        with whole(file) as new:
            size = connect(None, None, ctx.obj).save("backup", new)
        said = f"written: {file}, {size} bytes, by the server that runs"
        say({"file": str(file), "bytes": size, "by_server": True}, said, as_json=as_json)
        return

    async def work() -> None:
        async with store_of(config.store, Path(config.state_dir)) as store:
            await store.backup(file)

    trio.run(work)
    size = file.stat().st_size
    say({"file": str(file), "bytes": size, "by_server": False}, f"written: {file}, {size} bytes", as_json=as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
@click.pass_context
def restore(ctx: click.Context, file: Path, yes: bool, as_json: bool) -> None:
    """Put the backup FILE in place of the store. What it replaces is kept, and where is said.

    No server may run on the store meanwhile. What was done since the backup is undone with it: a key that was revoked
    since is good again. Engines that run are kept where the backup knows of them, and stopped where it does not. Exit
    code 1 when it is not confirmed.
    """
    config = server_config(ctx.obj)
    folder = Path(config.state_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    with held(folder, "server"):
        if not (yes or agreed("llmgw server restore", f"replace the store of {ctx.obj} by {file}?")):
            ctx.exit(1)
        act = Act(time.time(), f"account {account()}", "store.restore", str(file.absolute()))
        if config.store is None:
            kept = trio.run(restore_sqlite, file, folder / FILE, stamp, act)
        else:
            kept = folder / f"postgresql.replaced-{stamp}"
            trio.run(restore_postgresql, file, PostgresDatabase(config.store, folder), kept, act)
    if as_json:
        echo_json({"restored": str(file), "kept": None if kept is None else str(kept)})
        return
    echo(f"restored from {file}" + ("" if kept is None else f"; what was there is in {kept}"))
    echo("keys, tokens and the deny list are as they were then: look at llmgw ctl keys list and ctl deny list")


@click.command()
@click.option("--file", type=click.Path(path_type=Path), help="A backup, instead of the store.")
@click.option("--noted", callback=noted_row, metavar="SEQ:DIGEST",
              help="The audit has to have this row, which llmgw ctl audit verify printed.")  # fmt: skip
@_as_json
@click.pass_context
def check(ctx: click.Context, file: Path | None, noted: Noted | None, as_json: bool) -> None:
    """Read everything in the store, or in a backup, and say what is wrong with it.

    The store of a server that runs cannot be opened beside it: make a backup, and check that. Exit codes: 0 nothing is
    wrong, 1 something is.
    """

    async def work(store: SqlStore) -> tuple[str, ...]:
        async with store as opened:
            return await look(opened, lambda step: echo(f"  {step}", err=True), noted)

    if file is None:
        config = server_config(ctx.obj)
        if config.store is None and _runs(config):
            raise OperatorError(
                config.state_dir, "a server runs on it", "llmgw server backup FILE, then llmgw server check --file FILE"
            )
        wrong = trio.run(work, store_of(config.store, Path(config.state_dir)))
    else:
        with _copy(file) as copy:
            wrong = trio.run(work, sqlite_store(copy))
    if as_json:
        echo_json({"ok": not wrong, "wrong": wrong})
    for line in () if as_json else wrong or ("nothing is wrong",):
        echo(line)
    if wrong:
        ctx.exit(1)


@contextmanager
def _copy(file: Path) -> Iterator[Path]:
    """A copy that may be opened as a store is: the backup itself stays as it is."""
    looked_at(file)
    with tempfile.TemporaryDirectory(prefix="llmgw-check-") as folder:
        yield Path(shutil.copyfile(file, Path(folder) / FILE))


def _runs(config: ServerConfig) -> bool:
    """Whether a server holds the state folder. Raises :class:`OperatorError` when there is none."""
    if not Path(config.state_dir).is_dir():
        raise OperatorError(config.state_dir, "is not there", "start llmgw server once, or name another --config")
    try:
        with held(Path(config.state_dir), "server"):
            return False
    except OperatorError as taken:
        if "another llmgw server holds it" in taken.reason:
            return True
        raise
