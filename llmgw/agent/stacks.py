"""Where every thread of an engine stands, written down before one that hangs is ended: afterwards nobody can tell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import trio

from llmgw.agent.proctree import PROC, Member
from llmgw.discovery import command
from llmgw.store.files import write_private

FILE = "stacks.txt"
_PY_SPY = "py-spy"
_PY_SPY_S = 10.0
_MOST_MEMBERS = 64
_MOST_THREADS = 1024
_MOST_BYTES = 8 * 1024 * 1024


async def keep(folder: Path, found: Sequence[Member], argv: Sequence[str], proc: Path = PROC) -> None:
    """Write ``stacks.txt``. Raises ``OSError`` when it cannot be written; cancelling it leaves no file or a whole one.

    What the kernel says of each thread comes first, since nothing can keep that from us; then what py-spy says of
    Python's frames, if there is one beside the engine's interpreter or on PATH.
    """
    found = found[:_MOST_MEMBERS]
    parts = await trio.to_thread.run_sync(partial(kernel_view, found, proc))
    await _write(folder, parts)  # should py-spy take too long, this much is there
    program = await trio.to_thread.run_sync(partial(py_spy, argv, found, proc))
    if program is None:
        return
    said: dict[int, str] = {}
    async with trio.open_nursery() as nursery:
        for member in found:
            nursery.start_soon(_dump, program, member.pid, said)
    dumps = [f"== {member}: {program} dump\n{said[member.pid]}\n" for member in found if said.get(member.pid)]
    await _write(folder, "\n".join([*dumps, parts]))


async def _write(folder: Path, text: str) -> None:
    await trio.to_thread.run_sync(write_private, folder / FILE, text.encode(errors="replace")[:_MOST_BYTES])


async def _dump(program: str, pid: int, said: dict[int, str]) -> None:
    try:
        ran = await command.run([program, "dump", "--pid", str(pid)], _PY_SPY_S)
    except OSError as failed:
        said[pid] = f"cannot be started: {failed.strerror}"
        return
    said[pid] = ran.stdout if ran.code == 0 else f"{ran.stdout}{ran.said}"


def py_spy(argv: Sequence[str], found: Sequence[Member], proc: Path = PROC) -> str | None:
    """The py-spy to use: beside the engine's command, beside a member's interpreter, or on PATH. Blocking."""
    first = shutil.which(argv[0]) if argv else None
    beside = [Path(first)] if first else []
    for member in found:
        try:
            beside.append(Path(os.readlink(proc / str(member.pid) / "exe")))
        except OSError:
            continue
    for path in beside:
        if os.access(path.parent / _PY_SPY, os.X_OK):
            return str(path.parent / _PY_SPY)
    return shutil.which(_PY_SPY)


def kernel_view(found: Sequence[Member], proc: Path = PROC) -> str:
    """What the kernel says of each thread: name, state, what it waits in, its system call and stack. Blocking."""
    lines: list[str] = []
    for member in found:
        lines.append(f"== {member}: {member.command or member.name}")
        for task in _tasks(proc / str(member.pid) / "task"):
            lines.extend(_thread(task))
        lines.append("")
    return "\n".join(lines)


def _tasks(folder: Path) -> Sequence[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda task: int(task.name))[:_MOST_THREADS]
    except (OSError, ValueError):
        return ()


def _thread(task: Path) -> Iterator[str]:
    before, _, after = _text(task / "stat").rpartition(")")
    state = after.split()[:1]
    waits = _text(task / "wchan")
    call = _text(task / "syscall")
    yield (
        f"-- thread {task.name} {before.partition('(')[2]} state {''.join(state) or '?'} wchan {waits or '-'}"
        f" syscall {call or 'not readable'}"
    )
    for line in _text(task / "stack").splitlines():
        yield f"     {line}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
