from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.kmsg import REPEAT_S, watch
from llmgw.discovery.kmsg_text import EventKind, KernelEvent, event_of, message_of

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "fabric"
K = EventKind


@pytest.mark.parametrize(
    ("line", "kind", "pci", "code"),
    [
        (
            "3,812,99,-;NVRM: Xid (PCI:0000:9B:00): 79, pid='<unknown>', name=<unknown>, GPU gone",
            K.XID,
            "0000:9b:00.0",
            79,
        ),
        ("NVRM: Xid (0000:03:00): 31, Ch 00000010", K.XID, "0000:03:00.0", 31),
        ("[  12.3] NVRM: Xid (PCI:00000008:06:00.0): 119, Timeout", K.XID, "0008:06:00.0", 119),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 3", K.SXID, "0000:c1:00.0", 12028),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", K.GPU_LOST, "0000:18:00.0", None),
        (
            r"6,1,1,-;NVRM: The NVIDIA GPU 0000:b3:00.0\x0a (PCI ID: 10de:26b5)\x0aNVRM: fallen off the bus and",
            K.GPU_LOST,
            "0000:b3:00.0",
            None,
        ),
        ("NVRM: a GPU that has fallen off the bus", K.GPU_LOST, "", None),
        ("6,3973,227996662,-;mlx5_core 0000:AB:00.0 mlx5_5: Port: 1 Link DOWN", K.PORT, "0000:ab:00.0", None),
        ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE", K.PORT, "0000:ab:00.0", None),
    ],
)
def test_events(line: str, kind: EventKind, pci: str, code: int | None) -> None:
    found = event_of(message_of(line))
    assert found is not None
    assert (found.kind, found.pci_address, found.code) == (kind, pci, code)
    assert found.text.isprintable()


@pytest.mark.parametrize(
    "line", ["", "NVRM: loading NVIDIA UNIX", "usb 1-1: new device", "mlx5_core 0000:ab:00.0: firmware version", "Xid"]
)
def test_what_is_about_something_else(line: str) -> None:
    assert event_of(message_of(line)) is None


def test_meanings() -> None:
    assert "reboot" in KernelEvent(K.XID, "", 79, "").meaning
    assert KernelEvent(K.XID, "", 9999, "").meaning == ""
    assert KernelEvent(K.SXID, "", 79, "").meaning == ""


@given(st.text())
def test_any_line(text: str) -> None:
    event_of(text)
    event_of(message_of(text))


@pytest.mark.parametrize("piece", ["NVRM: ", "(PCI:0000:", "mlx5_core 0000:ab:00.0 ", "1,1,1,-;", "0000:00:00"])
def test_a_megabyte_takes_no_time(piece: str) -> None:
    began = time.process_time()
    assert event_of(message_of(piece * (1_000_000 // len(piece)))) is None
    assert time.process_time() - began < 1


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captures() -> None:
    def events(file: str) -> set[tuple[str, int | None]]:
        text = (CAPTURES / file).read_text(errors="replace")
        return {(e.kind.value, e.code) for line in text.splitlines() if (e := event_of(message_of(line))) is not None}

    assert events("kmsg/dmesg.xid-119.log") == {("xid", 119)}
    assert events("kmsg/mlx5-link-init-active.log") == {("port", None)}
    assert ("gpu-lost", None) in events("kmsg/fallen-off-bus-without-xid.log")
    assert events("kmsg/dmesg.nccl-segfault.log") == set()


class Log:
    """A pipe in the place of /dev/kmsg."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        os.mkfifo(self.path)
        self.writer = os.open(self.path, os.O_RDWR)
        self.heard: list[KernelEvent] = []

    def write(self, text: str) -> None:
        os.write(self.writer, text.encode())


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Log]:
    log = Log(folder)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, log.path, log.heard.append)
            await trio.testing.wait_all_tasks_blocked()
            yield log
            nursery.cancel_scope.cancel()
    finally:
        os.close(log.writer)


async def heard(log: Log, count: int) -> None:
    with trio.fail_after(10):
        while len(log.heard) < count:
            await trio.sleep(0.001)


def xid(number: int, pci: str = "0000:18:00") -> str:
    return f"3,1,1,-;NVRM: Xid (PCI:{pci}): {number}, text\n SUBSYSTEM=pci\n DEVICE=+pci:x\n"


async def test_events_are_heard_as_they_come(tmp_path: Path) -> None:
    async with watched(tmp_path) as log:
        log.write("6,0,0,-;nothing\n" + xid(79) + xid(31)[:20])
        await heard(log, 1)
        log.write(xid(31)[20:])
        await heard(log, 2)
        assert [e.code for e in log.heard] == [79, 31]


async def test_the_same_event_is_told_once_in_a_while(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with watched(tmp_path) as log:
        for _ in range(500):
            log.write(xid(79))
        log.write(xid(79, "0000:28:00"))
        await heard(log, 2)
        assert [e.pci_address for e in log.heard] == ["0000:18:00.0", "0000:28:00.0"]
        await trio.sleep(REPEAT_S)
        log.write(xid(79))
        await heard(log, 3)


async def test_a_flood_does_not_keep_others_from_running(tmp_path: Path) -> None:
    async with watched(tmp_path) as log:
        turns = 0
        for n in range(300):
            log.write(xid(n % 200))
            await trio.lowlevel.checkpoint()
            turns += 1
        assert turns == 300
        await heard(log, 200)


@pytest.mark.parametrize("name", ["absent", "folder"])
async def test_a_log_that_cannot_be_read_ends_quietly(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with trio.fail_after(5):
        await watch(tmp_path / name, lambda _: None)


async def test_a_cancelled_watch_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with watched(tmp_path) as log:
        log.write(xid(1))
        await heard(log, 1)
    assert len(os.listdir("/proc/self/fd")) == before
