from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.discovery.kmsg_text import UNKNOWN_XID, XID, EventKind, KernelEvent, event_of, parse_record

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "fabric"
K = EventKind


@pytest.mark.parametrize(
    ("line", "kind", "pci", "code"),
    [
        ("NVRM: Xid (PCI:0000:9B:00): 79, pid='<unknown>', name=<unknown>, gone", K.XID, "0000:9b:00.0", 79),
        ("NVRM: Xid (0000:03:00): 31, Ch 00000010", K.XID, "0000:03:00.0", 31),
        ("[  12.3] NVRM: Xid (PCI:00000008:06:00.0): 119, Timeout", K.XID, "0008:06:00.0", 119),
        ("NVRM: Xid (PCI:0000000000000002:C1:00): 154, now Reset", K.XID, "0002:c1:00.0", 154),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, Contained", K.XID, "0000:01:00.0", 94),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:01 GPU-CI:02): 13, pid=9", K.XID, "0000:01:00.0", 13),
        ("NVRM: Xid (0007:00): 13, 0001", K.XID, "", 13),
        ("Dec  1 10:00:00 n1 kernel: NVRM: Xid (PCI:0000:9b:00): 48, DBE", K.XID, "0000:9b:00.0", 48),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 3", K.SXID, "0000:c1:00.0", 12028),
        ("nvidia-nvswitch1 SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04", K.SXID, "0000:06:00.0", 20009),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", K.GPU_LOST, "0000:18:00.0", None),
        ("NVRM: GPU at PCI:0000:18:00: fallen off the bus", K.GPU_LOST, "0000:18:00.0", None),
        ("NVRM: GPU 0000:11:00.0. NVRM: GPU 0000:18:00.0 has fallen off the bus", K.GPU_LOST, "0000:18:00.0", None),
        ("NVRM: fallen off the bus and does not respond", K.GPU_LOST, "", None),
        ("mlx5_core 0000:AB:00.0 mlx5_5: Port: 1 Link DOWN", K.PORT, "0000:ab:00.0", None),
        ("kernel: mlx5_core 0000:ab:00.1 rocep1s0f1: Port: 2 Link INIT", K.PORT, "0000:ab:00.1", None),
        ("mlx4_core 0000:86:00.0 mlx4_0: Port: 1 Link ACTIVE", K.PORT, "0000:86:00.0", None),
        ("mlx5_core 0000:53:00.0 enp83s0f0np0: Link down", K.PORT, "0000:53:00.0", None),
    ],
)
@pytest.mark.parametrize("prefix", ["", "3,812,99,-;", "3,812,99,-,caller=T77;", "<3>", "[ 1843.308145] "])
def test_events(prefix: str, line: str, kind: EventKind, pci: str, code: int | None) -> None:
    (message,) = parse_record(f"{prefix}{line}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:77:00.0\n")
    found = event_of(message)
    assert found is not None
    assert (found.kind, found.pci_address, found.code) == (kind, pci, code)
    assert found.text.startswith(("NVRM: ", "nvidia-nvswitch", "mlx"))
    assert line.endswith(found.text)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: loading NVIDIA UNIX",
        "NVRM: GPU at PCI:0000:18:00: GPU-6a8f0000-0000-0000-0000-000000000000",
        "NVRM: Xid (PCI:0000:18:00): soon",
        "usb 1-1: new device",
        "mlx5_core 0000:ab:00.0: firmware version",
        "mlx5_core 0000:ab:00.0: Port module event: module 0, Cable plugged",
        "e1000 0000:ab:00.0 eth0: Link up",
        "the man has fallen off the bus",
        "Xid",
    ],
)
def test_what_is_about_something_else(line: str) -> None:
    assert [event_of(message) for message in parse_record(f"6,1,1,-;{line}")] == ([None] if line else [])


def test_a_record() -> None:
    assert parse_record(
        r"6,1,2,-;NVRM: a\x0aNVRM:\x09b \x5cx0a \xc3\xa9 \xff" + "\n SUBSYSTEM=pci\n DEVICE=c189:0\n"
    ) == (r"NVRM: a NVRM: b \x0a é �",)
    assert parse_record("6,1,2,-;one\n two\n KEY=no\n  three\n4,2,3,c;four;five\n") == ("one two three", "four;five")
    assert parse_record("6,1,2,-,caller=T77;six\n") == ("six",)
    assert parse_record(" KEY=no\n  the end of something\n\n") == ("the end of something",)
    assert parse_record(r"no prefix, so \x0a stays") == (r"no prefix, so \x0a stays",)
    assert parse_record("") == parse_record("\n \n\n") == parse_record("6,1,2,-;") == ()


@pytest.mark.parametrize(
    "record",
    [
        r"6,1,1,-;NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) here\x0aNVRM: fallen off the bus and",
        "[ 1.5] NVRM: The NVIDIA GPU 0000:b3:00.0\n       NVRM: (PCI ID: 10de:26b5)\n       NVRM: fallen off the bus",
    ],
)
def test_a_gpu_that_was_lost_is_told_over_several_lines(record: str) -> None:
    (message,) = parse_record(record)
    found = event_of(message)
    assert found is not None
    assert (found.kind, found.pci_address) == (K.GPU_LOST, "0000:b3:00.0")


def test_the_text_is_one_bounded_printable_line() -> None:
    found = event_of("before\tNVRM: Xid (PCI:0000:9b:00): 79, \x1b[31m\r\n\u202e" + "x" * 1000)
    assert found is not None
    assert found.text.startswith("NVRM: Xid (PCI:0000:9b:00): 79, [31m xxx")
    assert len(found.text) == 300
    assert found.text.isprintable()
    assert event_of("x" * 4096 + "NVRM: Xid (PCI:0000:9b:00): 79") is None
    assert [len(message) for message in parse_record("x" * 5000 + "\n y" * 5000)] == [4096]


def test_what_it_means() -> None:
    named = {13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, *range(144, 151), 154}
    assert set(XID) == named
    assert all(m.reason and m.remedy for m in XID.values())
    assert KernelEvent(K.XID, "", 79, "").sense == KernelEvent(K.GPU_LOST, "", None, "").sense == XID[79]
    assert "reboot" in KernelEvent(K.XID, "", 79, "").meaning
    assert KernelEvent(K.XID, "", 9999, "").sense == UNKNOWN_XID
    assert KernelEvent(K.SXID, "", 79, "").sense is None
    assert KernelEvent(K.PORT, "", None, "").meaning == ""


LINES = st.lists(
    st.sampled_from(
        ["NVRM: ", "Xid (", "PCI:", "0000:9b:00", ".0", "): ", "79", "٣", "SXid (", "fallen off the bus", "mlx5_core ",
         " mlx5_0: Port: 1 Link DOWN", "3,1,1,-;", r"\x0a", r"\xff", "\n", " ", "K=v", "\x00", "\ud800"]
    )
).map("".join)  # fmt: skip


@given(st.text() | LINES | st.binary().map(lambda data: data.decode(errors="replace")))
@example("9" * 5000)
@example("3,1,1,-;\ud800")
@example("NVRM: Xid (" + "f" * 20 + ":00:00): 1")
def test_any_text(text: str) -> None:
    for message in (text, *parse_record(text)):
        found = event_of(message)
        assert found is None or (found.text.isprintable() and 0 < len(found.text) <= 300)
    assert all(message and message.isprintable() for message in parse_record(text))


@pytest.mark.parametrize(
    "piece",
    ["NVRM: ", "(PCI:0000:", "NVRM: Xid (0000:", "mlx5_core 0000:ab:00.0 ", "1,1,1,-;", r"\x0a", "0000:00:00", "a-", "f",
     "\n", "\n a", "a\n", " \n", "\n K=v"],
)  # fmt: skip
def test_a_megabyte_takes_no_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    assert event_of(text) is None
    assert [event_of(message) for message in parse_record(text)[:10] if event_of(message)] == []
    assert time.process_time() - began < 2


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captures() -> None:
    def events(file: str) -> list[tuple[str, str, int | None]]:
        found = map(event_of, parse_record((CAPTURES / file).read_text(errors="replace")))
        return [(e.kind.value, e.pci_address, e.code) for e in found if e is not None]

    assert events("kmsg/dmesg.xid-119.log") == [("xid", "0000:9b:00.0", 119)] * 5
    assert events("kmsg/mlx5-link-init-active.log") == [("port", "0000:ab:00.0", None)] * 2
    assert events("kmsg/fallen-off-bus-without-xid.log") == [("gpu-lost", "0000:b3:00.0", None)]
    logs = [f"fabricmanager/{file.name}" for file in (CAPTURES / "fabricmanager").iterdir()]
    quiet = ["kmsg/dmesg.nccl-segfault.log", "kmsg/kmsg.peermem-invalid-context.log", "kmsg/syslog.ib-flap.log"]
    assert not any(events(file) for file in [*quiet, *logs])
    assert logs
