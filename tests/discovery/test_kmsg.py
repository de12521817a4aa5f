from __future__ import annotations

import errno
import fcntl
import os
import re
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from llmgw.discovery.kmsg import REPEAT_S, watch
from llmgw.discovery.kmsg_text import KernelEvent

KMSG = Path("/dev/kmsg")


class Log:
    """A pipe in the place of /dev/kmsg."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        os.mkfifo(self.path)
        self.writer = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 1024 * 1024)
        self.heard: list[KernelEvent] = []

    @property
    def codes(self) -> list[int | None]:
        return [event.code for event in self.heard]

    async def write(self, text: str) -> None:
        """Write, and wait until all of it was read."""
        assert os.write(self.writer, text.encode()) == len(text.encode())
        await trio.testing.wait_all_tasks_blocked()


def readers(path: Path) -> int:
    """How many of our file descriptors are open on it for reading only."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == str(path):
                found += fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        except OSError:
            continue  # that of the listing itself
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path)
    yield made
    os.close(made.writer)


@pytest.fixture
def said() -> Iterator[list[structlog.typing.EventDict]]:
    """What is logged, whatever another test has set up."""
    before = structlog.get_config()
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as lines:
        yield lines
    structlog.configure(**before)


@asynccontextmanager
async def watched(log: Log) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, log.path, log.heard.append)
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()
    assert readers(log.path) == 0


def reading(monkeypatch: pytest.MonkeyPatch, log: Log, answer: Callable[[], None]) -> None:
    """Have each read of the log call this first: no pipe fails as /dev/kmsg does."""
    real = os.read

    def read(handle: int, count: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{handle}") == str(log.path):
            answer()
        return real(handle, count)

    monkeypatch.setattr(os, "read", read)


def xid(number: int, pci: str = "0000:18:00", text: str = "text") -> str:
    return f"3,1,1,-;NVRM: Xid (PCI:{pci}): {number}, {text}\n SUBSYSTEM=pci\n DEVICE=+pci:x\n"


def port(state: str) -> str:
    return f"6,1,1,-;mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link {state}\n"


async def test_events_are_heard_as_they_come(log: Log) -> None:
    async with watched(log):
        await log.write("6,0,0,-;nothing\n" + xid(79) + port("DOWN") + xid(31)[:20])
        assert log.codes == [79, None]
        await log.write(xid(31)[20:])
        assert log.codes == [79, None, 31]
        assert readers(log.path) == 1


async def test_a_gpu_that_was_lost_over_several_lines(log: Log) -> None:
    async with watched(log):
        await log.write("NVRM: The NVIDIA GPU 0000:b3:00.0\n   NVRM: in this system\n   NVRM: fallen off the bus\n")
        assert [(e.kind, e.pci_address) for e in log.heard] == [("gpu-lost", "0000:b3:00.0")]


async def test_a_line_without_an_end_is_bounded(log: Log) -> None:
    async with watched(log):
        text = xid(48).split("\n")[0] + "x" * 900_000
        tracemalloc.start()
        try:
            await log.write(text)
            assert tracemalloc.get_traced_memory()[0] < 200_000
        finally:
            tracemalloc.stop()
        assert log.heard == []
        await log.write("x\n" + xid(79))
        assert log.codes == [48, 79]


async def test_bytes_that_are_no_text(log: Log) -> None:
    async with watched(log):
        os.write(log.writer, b"\xff\x00\xfe\n" + xid(79).encode().replace(b"text", b"\xc3\x28"))
        await trio.testing.wait_all_tasks_blocked()
        assert log.codes == [79]


async def test_only_news_count(tmp_path: Path, said: list[structlog.typing.EventDict]) -> None:
    (tmp_path / "log").write_text(xid(79) * 3)
    heard: list[KernelEvent] = []
    with trio.fail_after(5):
        await watch(tmp_path / "log", heard.append)
    assert heard == []
    assert [line["reason"] for line in said] == ["it ended, so it is no kernel log"]


async def test_the_same_event_is_told_once_in_a_while(log: Log, autojump_clock: trio.testing.MockClock) -> None:
    async with watched(log):
        await log.write(xid(79) * 500 + xid(79, "0000:28:00") + xid(31))
        await log.write(xid(79, text="newest"))
        assert [(e.code, e.pci_address) for e in log.heard] == [
            (79, "0000:18:00.0"), (79, "0000:28:00.0"), (31, "0000:18:00.0"),
        ]  # fmt: skip
        await trio.sleep(REPEAT_S - 0.1)
        assert len(log.heard) == 3
        await trio.sleep(0.2)
        assert [e.text for e in log.heard[3:]] == ["NVRM: Xid (PCI:0000:18:00): 79, newest"]
        await trio.sleep(5 * REPEAT_S)
        assert len(log.heard) == 4
        await log.write(xid(79))
        assert len(log.heard) == 5


async def test_how_a_flapping_port_ends_is_told(log: Log, autojump_clock: trio.testing.MockClock) -> None:
    async with watched(log):
        for state in ("DOWN", "INIT", "ACTIVE", "DOWN", "ACTIVE"):
            await log.write(port(state))
        await trio.sleep(REPEAT_S + 1)
        assert [e.text.split()[-1] for e in log.heard] == ["DOWN", "ACTIVE"]


async def test_ever_new_events_take_no_ever_more_memory(log: Log, autojump_clock: trio.testing.MockClock) -> None:
    async with watched(log):
        await log.write("".join(xid(number) for number in range(5000)))
        await log.write(xid(4999) + xid(0))
        # The first was forgotten, so that it is news; the last was not.
        assert log.codes == [*range(5000), 0]
        await trio.sleep(2 * REPEAT_S)
        log.heard.clear()
        await log.write("".join(xid(number) for number in range(1024)))
        await trio.sleep(2 * REPEAT_S)
        await log.write(xid(0) + xid(5000) + xid(0))
        assert log.codes == [*range(1024), 0, 5000]


async def test_a_flood_keeps_neither_others_from_running_nor_a_repeat_from_being_told(
    log: Log, mock_clock: trio.testing.MockClock
) -> None:
    """The log is never empty here, so that reading it never waits."""
    assert os.write(log.writer, (xid(79) * 100 + "6,1,1,-;another line\n" * 20_000 + xid(31)).encode()) > 400_000
    turns = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, log.path, log.heard.append)
        while 31 not in log.codes:
            turns += 1
            if turns == 50:
                mock_clock.jump(REPEAT_S)
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert turns >= 200
    assert log.codes == [79, 79, 31]


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("absent", "No such file or directory", "in a container, pass the device in"),
        ("folder", "Is a directory|Invalid argument", None),  # file systems differ
        ("null", "it ended, so it is no kernel log", None),
    ],
)
async def test_a_log_that_cannot_be_read_is_said_once(
    name: str, reason: str, remedy: str | None, tmp_path: Path, said: list[structlog.typing.EventDict]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/null")
    before = readers(Path("/dev/null"))
    with trio.fail_after(5):
        await watch(tmp_path / name, lambda _: None)
    (line,) = said
    assert (line["log_level"], line["path"], line["remedy"]) == ("info", str(tmp_path / name), remedy)
    assert re.fullmatch(reason, line["reason"])
    assert line["subject"] == "hardware"
    assert readers(tmp_path / "folder") == 0
    assert readers(Path("/dev/null")) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO, errno.EINVAL])
async def test_a_log_that_fails_while_it_is_read(
    code: int, log: Log, said: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        if log.heard:
            raise OSError(code, os.strerror(code))

    reading(monkeypatch, log, fail)
    os.write(log.writer, xid(79).encode())
    with trio.fail_after(5):
        await watch(log.path, log.heard.append)
    assert log.codes == [79]
    assert [(line["log_level"], line["reason"]) for line in said] == [("info", os.strerror(code))]
    assert ("CAP_SYSLOG" in (said[0]["remedy"] or "")) == (code == errno.EPERM)
    assert readers(log.path) == 0


async def test_lost_records_are_said_and_the_next_are_heard(
    log: Log,
    said: list[structlog.typing.EventDict],
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    lost = [True] * 250

    def overwritten() -> None:
        if lost:
            lost.pop()
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    reading(monkeypatch, log, overwritten)
    async with watched(log):
        await log.write(xid(79))
        assert log.codes == [79]
        assert [(line["log_level"], line["event"]) for line in said] == [
            ("warning", "records of the kernel log were lost")
        ]
        await trio.sleep(REPEAT_S)
        lost.append(True)
        await log.write(xid(31))
        assert (log.codes, len(said)) == ([79, 31], 2)


async def test_a_mistake_of_who_listens_is_not_taken_for_one_of_the_log(
    log: Log, said: list[structlog.typing.EventDict], autojump_clock: trio.testing.MockClock
) -> None:
    """Neither at once nor when a repeat is told."""
    heard: list[KernelEvent] = []

    def hear(event: KernelEvent) -> None:
        heard.append(event)
        if len(heard) == 2:
            raise BrokenPipeError("disk full")

    os.write(log.writer, xid(79).encode() * 2)
    with pytest.raises(BrokenPipeError, match="disk full"):
        await watch(log.path, hear)
    assert trio.current_time() == pytest.approx(REPEAT_S)
    assert said == []
    assert readers(log.path) == 0


async def test_a_cancelled_watch_leaves_nothing_open(log: Log) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    async with watched(log):
        await log.write(xid(1))
        assert readers(log.path) == 1
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not os.access(KMSG, os.R_OK), reason="the kernel log cannot be read here")
async def test_the_kernel_log_itself(said: list[structlog.typing.EventDict]) -> None:
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as failed:
        pytest.skip(f"the kernel log cannot be read here: {failed}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, KMSG, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        assert (readers(KMSG), said) == (1, [])
        nursery.cancel_scope.cancel()
    assert readers(KMSG) == 0
