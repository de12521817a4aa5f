"""A real PostgreSQL of the tests' own: in a folder, on a Unix socket, as a user that is not root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_BOUND_S = 60


def programs() -> Path | None:
    """The folder of the newest PostgreSQL's programs, where there is one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    if found:
        return found[-1].parent
    here = shutil.which("initdb")
    return None if here is None else Path(here).resolve().parent


def user() -> str | None:
    """Who PostgreSQL runs as, where we are root: it refuses to be."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class Postgresql:
    """A server that can be stopped, killed and started again; ``database()`` makes a new, empty database."""

    def __init__(self, bin_: Path, folder: Path) -> None:
        self._bin = bin_
        self.folder = folder
        self.data = folder / "data"

    def run(self, program: str, *words: str) -> str:
        done = subprocess.run(
            [self._bin / program, *words], user=user(), group=None if user() is None else pwd.getpwnam(str(user())).pw_gid,
            extra_groups=None if user() is None else [], cwd=self.folder, capture_output=True, text=True,
            timeout=_BOUND_S, check=False, env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(self.folder)},
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}{self.log()}"
        return done.stdout

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def make(self) -> None:
        self.run("initdb", "-D", str(self.data), "-U", "llmgw", "-A", "trust", "--no-sync", "-E", "UTF8")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"listen_addresses = ''\nunix_socket_directories = '{self.folder}'\nmax_connections = 40\n")
            conf.write("shared_buffers = 16MB\nfsync = on\nlog_min_messages = warning\n")

    def start(self) -> None:
        self.run("pg_ctl", "-D", str(self.data), "-w", "-l", str(self.folder / "log"), "start")

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-D", str(self.data), "-w", "-m", mode, "stop")

    def kill(self) -> None:
        """End all of it at once, as a loss of power would but for what the kernel has."""
        first = self.pid
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for pid in (first, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _BOUND_S
        while _alive(first):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Where nobody collects corpses, a start would take this one for a server that runs.
        for lock in (self.data / "postmaster.pid", self.folder / ".s.PGSQL.5432.lock"):
            lock.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        """The server's first process."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What psql says to a statement."""
        return self.run("psql", "-h", str(self.folder), "-U", "llmgw", "-d", database, "-AtXc", statement).strip()

    def database(self) -> str:
        """The address of a new database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.sql(f"CREATE DATABASE {name}")
        return f"postgresql://llmgw@/{name}?host={self.folder}"


def _alive(pid: int) -> bool:
    """Whether it is there, and more than a corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def running() -> Iterator[Postgresql]:
    """A server for as long as the block lasts; skips where there is none installed."""
    bin_ = programs()
    if bin_ is None:
        pytest.skip("PostgreSQL is not installed")
    folder = Path(tempfile.mkdtemp(prefix="llmgw-pg-"))
    try:
        if (name := user()) is not None:
            os.chown(folder, pwd.getpwnam(name).pw_uid, pwd.getpwnam(name).pw_gid)
        server = Postgresql(bin_, folder)
        server.make()
        server.start()
        try:
            yield server
        finally:
            if (server.data / "postmaster.pid").exists():
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
