from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.smi import _devices
from llmgw.discovery.smi_text import parse_capabilities, parse_list, parse_xml

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "gpu"


def xml(*gpus: str) -> str:
    inner = "".join(f'<gpu id="00000000:1{n}:00.0">{g}</gpu>' for n, g in enumerate(gpus))
    return (
        '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "x.dtd">'
        f"<nvidia_smi_log><driver_version>570.1</driver_version>{inner}</nvidia_smi_log>"
    )


CARD = "<product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid>"
MEMORY = "<fb_memory_usage><total>81559 MiB</total><used>3 MiB</used></fb_memory_usage>"


def codes(*gpus: str) -> list[list[str]]:
    return [[f.code for f in g.faults] for g in parse_xml(xml(*gpus)).gpus]


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        ("<ecc_errors><volatile><double_bit><total>2</total></double_bit></volatile></ecc_errors>", "ecc-uncorrected"),
        ("<ecc_errors><volatile><dram_uncorrectable>1</dram_uncorrectable></volatile></ecc_errors>", "ecc-uncorrected"),
        (
            "<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>"
            "<sram_uncorrectable_secded>1</sram_uncorrectable_secded></volatile></ecc_errors>",
            "ecc-uncorrected",
        ),
        ("<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>", "needs-reset"),
        ("<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>", "failed"),
        ("<retired_pages><pending_blacklist>Yes</pending_blacklist></retired_pages>", "needs-reset"),
        ("<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status>", "needs-reset"),
        ("<gpu_recovery_action>Reset</gpu_recovery_action>", "needs-reset"),
        ("<utilization><gpu_util>[GPU requires reset]</gpu_util></utilization>", "needs-reset"),
        ("<fabric><state>In Progress</state></fabric>", "not-ready"),
        ("<fabric><state>Completed</state><status>Failure</status></fabric>", "not-ready"),
    ],
)
def test_faults(inside: str, code: str) -> None:
    assert codes(CARD + MEMORY + inside, CARD + MEMORY) == [[code], []]


@pytest.mark.parametrize(
    "inside",
    [
        "<remapped_rows>N/A</remapped_rows>",
        "<ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>",
        "<ecc_errors><aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate></ecc_errors>",
        "<gpu_recovery_action>None</gpu_recovery_action>",
        "<fabric><state>N/A</state><status>N/A</status></fabric>",
        "<fabric><state>Completed</state><status>Success</status></fabric>",
        "<something_new><total>x</total></something_new>",
    ],
)
def test_what_is_no_fault(inside: str) -> None:
    assert codes(CARD + MEMORY + inside) == [[]]


def test_unknown_is_never_zero() -> None:
    for said in ("N/A", "[N/A]", "Unknown Error", "[Insufficient Permissions]", "ERR!", "-5 MiB"):
        (gpu,) = parse_xml(xml(CARD + f"<fb_memory_usage><total>{said}</total></fb_memory_usage>")).gpus
        assert gpu.total_mib is None
        assert gpu.used_mib is None


def test_a_lost_card_hides_no_other() -> None:
    lost = "<product_name>NVIDIA H100</product_name><uuid>GPU is lost</uuid>"
    first, second = parse_xml(xml(lost, CARD + MEMORY)).gpus
    assert [f.code for f in first.faults] == ["failed"]
    assert (second.index, second.total_mib, second.faults) == (1, 81559, ())


def test_processes_stand_once() -> None:
    process = "<process_info><pid>7</pid><type>{}</type><process_name>/usr/bin/python3</process_name><used_memory>9 MiB</used_memory></process_info>"
    (gpu,) = parse_xml(xml(CARD + f"<processes>{process.format('C')}{process.format('G')}</processes>")).gpus
    assert [(p.pid, p.name, p.used_mib) for p, _, _ in gpu.processes] == [(7, "python3", 9)]


def test_mig_needs_both_outputs() -> None:
    mig = (
        "<mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode><mig_devices>"
        "<mig_device><index>0</index><gpu_instance_id>2</gpu_instance_id><compute_instance_id>0</compute_instance_id>"
        "<fb_memory_usage><total>40448 MiB</total><used>12 MiB</used></fb_memory_usage></mig_device></mig_devices>"
    )
    (gpu,) = parse_xml(xml(CARD + MEMORY + mig)).gpus
    listed = parse_list("GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: MIG-a/b)\n")
    (named,) = _devices(gpu, listed, {})
    assert (named.number, named.label, named.uuid) == (1000, "gpu-0/mig0", "MIG-a/b")
    assert (named.device_class, named.total_mib) == ("h100-80g-mig-3g.40gb", 40448)
    (nameless,) = _devices(gpu, (), {})
    assert [f.code for f in nameless.faults] == ["unreadable"]


def test_mig_mode_with_nothing_carved_and_mode_pending() -> None:
    mode = "<mig_mode><current_mig>Enabled</current_mig><pending_mig>{}</pending_mig></mig_mode><mig_devices>None</mig_devices>"
    (gpu,) = parse_xml(xml(CARD + MEMORY + mode.format("Disabled"))).gpus
    (device,) = _devices(gpu, (), {})
    assert [f.code for f in device.faults] == ["not-ready", "mig-empty"]


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found", "<nvidia_smi_log><gpu>", "<nvidia_smi_log>&x;</nvidia_smi_log>",
     "<nvidia_smi_log" + "<a>" * 5000],
)  # fmt: skip
def test_malformed(text: str) -> None:
    with pytest.raises(DiscoveryError) as caught:
        parse_xml(text)
    assert caught.value.code == "malformed"


def test_entities_are_never_expanded() -> None:
    bomb = '<!DOCTYPE a [<!ENTITY x "boom">]><nvidia_smi_log><driver_version>&x;</driver_version></nvidia_smi_log>'
    with pytest.raises(DiscoveryError):
        parse_xml(bomb)


PIECES = st.sampled_from(
    ["<nvidia_smi_log>", "</nvidia_smi_log>", "<gpu>", "</gpu>", CARD, MEMORY, "<mig_devices>", "N/A", "\x00", "&#0;",
     "<uuid>", "]]>", "<!DOCTYPE", "GPU 0: x (UUID: y)\n", "  MIG 1g.5gb Device 0: (UUID: MIG-z)\n", ", 9.0\n"]
)  # fmt: skip


@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=20).map("".join))
def test_only_our_error_comes_out(text: str) -> None:
    parse_list(text)
    parse_capabilities(text)
    try:
        log = parse_xml(text)
    except DiscoveryError:
        return
    for gpu in log.gpus:
        _devices(gpu, (), {})


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captures() -> None:
    read = 0
    for path in sorted(p for p in CAPTURES.rglob("*") if p.is_file()):
        text = path.read_text(errors="replace")
        parse_list(text)
        parse_capabilities(text)
        try:
            log = parse_xml(text)
        except DiscoveryError as failed:
            assert path.parent.name != "xml", f"{path.name}: {failed}"
            continue
        for gpu in log.gpus:
            assert _devices(gpu, (), {}), path.name
            assert gpu.name
        read += 1
    assert read > 40
