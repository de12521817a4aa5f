from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.smi_text import ListedMig, parse_capabilities, parse_list, parse_xml, pci_address, process_name
from llmgw.hardware.devices import devices
from llmgw.hardware.inventory import Load, Wear
from llmgw.hardware.reading import CardHealth, CardReading, ProcessReading


def xml(*gpus: str) -> str:
    inner = "".join(f'<gpu id="00000000:1{n}:00.0">{g}</gpu>' for n, g in enumerate(gpus))
    return (
        '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "x.dtd">'
        f"<nvidia_smi_log><driver_version>570.1</driver_version>{inner}</nvidia_smi_log>"
    )


CARD = "<product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid>"
MEMORY = "<fb_memory_usage><total>81559 MiB</total><used>3 MiB</used></fb_memory_usage>"


def card(inside: str) -> CardReading:
    (found,) = parse_xml(xml(CARD + inside)).cards
    return found


def health(inside: str) -> CardHealth:
    return card(MEMORY + inside).health


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("<ecc_errors><volatile><double_bit><total>2</total></double_bit></volatile></ecc_errors>", {"uncorrected": 2}),
        (
            "<ecc_errors><volatile><dram_uncorrectable>1</dram_uncorrectable></volatile></ecc_errors>",
            {"uncorrected": 1},
        ),
        (
            "<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>"
            "<sram_uncorrectable_secded>1</sram_uncorrectable_secded></volatile></ecc_errors>",
            {"uncorrected": 1},
        ),
        ("<ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>", {}),
        ("<ecc_errors><aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate></ecc_errors>", {}),
        ("<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>", {"remap_pending": True}),
        ("<remapped_rows><remapped_row_failure>No</remapped_row_failure></remapped_rows>", {"remap_failed": False}),
        ("<remapped_rows>N/A</remapped_rows>", {}),
        ("<retired_pages><pending_blacklist>Yes</pending_blacklist></retired_pages>", {"retirement_pending": True}),
        ("<retired_pages><pending_retirement>No</pending_retirement></retired_pages>", {"retirement_pending": False}),
        (
            "<ecc_errors><channel_repair_pending>No</channel_repair_pending><tpc_repair_pending>Yes</tpc_repair_pending></ecc_errors>",
            {"repair_pending": True},
        ),
        ("<compute_mode>Prohibited</compute_mode>", {"prohibited": True}),
        ("<compute_mode>Exclusive_Process</compute_mode>", {"prohibited": False}),
        ("<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status>", {"wants_reset": True}),
        ("<gpu_recovery_action>Drain and Reset</gpu_recovery_action>", {"recovery": "drain and reset"}),
        ("<gpu_recovery_action>None</gpu_recovery_action>", {"recovery": "none"}),
        ("<gpu_recovery_action>N/A</gpu_recovery_action>", {}),
        ("<utilization><gpu_util>[GPU requires reset]</gpu_util></utilization>", {"wants_reset": True}),
        ("<utilization><gpu_util>GPU is lost</gpu_util></utilization>", {"lost": True}),
        ("<fabric><state>In Progress</state><status>N/A</status></fabric>", {"fabric_state": "in progress"}),
        (
            "<fabric><state>Completed</state><status>Success</status><health><summary>Healthy</summary></health></fabric>",
            {"fabric_state": "completed", "fabric_status": "success", "fabric_health": "healthy"},
        ),
        (
            "<fabric><state>N/A</state><health><route_unhealthy>True</route_unhealthy></health></fabric>",
            {"fabric_health": "unhealthy"},
        ),
        ("<fabric><health><bandwidth>Degraded</bandwidth></health></fabric>", {"fabric_health": "unhealthy"}),
        ("<fabric><health><bandwidth>Full</bandwidth></health></fabric>", {}),
        (
            "<ecc_errors><aggregate><sram_threshold_exceeded>Yes</sram_threshold_exceeded></aggregate></ecc_errors>",
            {"sram_threshold": True},
        ),
        (
            "<ecc_errors><unrepairable_memory>No</unrepairable_memory></ecc_errors>",
            {"unrepairable": False},
        ),
        ("<something_new><total>x</total></something_new>", {}),
    ],
)
def test_health_in_every_layout(inside: str, said: dict[str, object]) -> None:
    assert health(inside) == CardHealth(**said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said", ["N/A", "[N/A]", "Not Supported", "[Insufficient Permissions]", "-5 MiB", "GPU is lost"]
)
def test_unknown_is_never_zero(said: str) -> None:
    found = card(f"<fb_memory_usage><total>{said}</total><used>{said}</used></fb_memory_usage>")
    assert (found.total_mib, found.used_mib, found.health.memory_error) == (None, None, False)
    assert found.memory_hidden == ("Insufficient" in said)


@pytest.mark.parametrize("said", ["Unknown Error", "[Unknown Error]", "ERR!"])
def test_memory_that_the_driver_fails_to_read_is_a_fault(said: str) -> None:
    found = card(f"<fb_memory_usage><total>{said}</total></fb_memory_usage>")
    assert (found.total_mib, found.health.memory_error) == (None, True)


def test_a_lost_card_hides_no_other() -> None:
    lost = "<product_name>NVIDIA H100</product_name><uuid>GPU is lost</uuid>"
    first, second = parse_xml(xml(lost, CARD + MEMORY)).cards
    assert (first.health.lost, first.uuid) == (True, "")
    assert (second.index, second.total_mib, second.health) == (1, 81559, CardHealth())


def test_only_the_memory_of_the_card_counts() -> None:
    other = "<bar1_memory_usage><total>131072 MiB</total></bar1_memory_usage>"
    more = "<cc_protected_memory_usage><total>7 MiB</total></cc_protected_memory_usage>"
    assert card(other + more).total_mib is None
    assert card(other + more + MEMORY).total_mib == 81559


@pytest.mark.parametrize(
    ("inside", "watts"),
    [
        ("<power_readings><power_draw>70.50 W</power_draw></power_readings>", 71),
        ("<gpu_power_readings><power_draw>70.49 W</power_draw></gpu_power_readings>", 70),
        (
            "<gpu_power_readings><average_power_draw>68.57 W</average_power_draw>"
            "<instant_power_draw>90 W</instant_power_draw></gpu_power_readings>"
            "<module_power_readings><power_draw>900 W</power_draw></module_power_readings>",
            69,
        ),
        (
            "<gpu_power_readings><average_power_draw>N/A</average_power_draw><instant_power_draw>5 W</instant_power_draw></gpu_power_readings>",
            5,
        ),
    ],
)
def test_power_under_each_of_its_names(inside: str, watts: int) -> None:
    assert card(inside).load.power_w == watts


def test_load_and_wear() -> None:
    found = card(
        "<temperature><gpu_temp>41 C</gpu_temp></temperature><utilization><gpu_util>7 %</gpu_util></utilization>"
        "<remapped_rows><remapped_row_corr>2</remapped_row_corr><remapped_row_unc>1</remapped_row_unc></remapped_rows>"
        "<ecc_errors><aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate></ecc_errors>"
    )
    assert (found.load, found.wear) == (Load(41, None, 7), Wear(3, 5))


def test_processes() -> None:
    def process(pid: object, name: str, used: str, more: str = "") -> str:
        return (
            f"<process_info>{more}<pid>{pid}</pid><process_name>{name}</process_name>"
            f"<used_memory>{used}</used_memory></process_info>"
        )

    ids = "<gpu_instance_id>2</gpu_instance_id><compute_instance_id>0</compute_instance_id>"
    found = card(
        MEMORY
        + "<processes>"
        + process(7, "/usr/bin/python3 -m vllm --x", "9 MiB", ids)
        + process(8, "[Insufficient Permissions]", "N/A")
        + process(0, "no", "1 MiB")
        + process(99999999, "mangled", "1 MiB")
        + process(9, "odd", "99999999 MiB")
        + "</processes><accounted_processes>"
        + process(3, "dead", "1 MiB")
        + "</accounted_processes>"
    )
    assert found.processes == (
        ProcessReading(7, "python3", 9, 2, 0),
        ProcessReading(8, "unknown"),
        ProcessReading(9, "odd"),
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a b", "a"), (None, "unknown"), ("", "unknown"), ("VLLM::Worker_TP0", "VLLM::Worker_TP0"), ("/", "unknown")],
)
def test_process_names(path: str | None, name: str) -> None:
    assert process_name(path) == name


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:8F:00.0", "0000:8f:00.0"),
        ("0000:8F:00.0", "0000:8f:00.0"),
        ("00000008:06:00.0", "0008:06:00.0"),
        ("", ""),
    ],
)
def test_bus_ids_as_sysfs_writes_them(text: str, address: str) -> None:
    assert pci_address(text) == address


MIG = (
    "<mig_mode><current_mig>Enabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode><mig_devices>"
    "<mig_device><index>3</index><gpu_instance_id>2</gpu_instance_id><compute_instance_id>1</compute_instance_id>"
    "<ecc_error_count><volatile_count><sram_uncorrectable>4</sram_uncorrectable></volatile_count></ecc_error_count>"
    "<{0}><total>40448 MiB</total><used>12 MiB</used></{0}></mig_device></mig_devices>"
)


@pytest.mark.parametrize("tag", ["fb_memory_usage", "shared_fb_memory_usage"])
def test_mig_devices(tag: str) -> None:
    found = card(MEMORY + MIG.format(tag))
    assert (found.mig, found.mig_pending) == (True, False)
    (mig,) = found.instances
    assert (mig.index, mig.gpu_instance, mig.compute_instance) == (3, 2, 1)
    assert (mig.total_mib, mig.used_mib, mig.uncorrected, mig.uuid, mig.profile) == (40448, 12, 4, "", "")


def test_no_mig_mode() -> None:
    found = card("<mig_mode><current_mig>N/A</current_mig></mig_mode><mig_devices>None</mig_devices>")
    assert (found.mig, found.mig_pending, found.instances) == (None, None, ())


def test_list_in_every_layout() -> None:
    found = parse_list(
        "Unable to determine the device handle for gpu 0000:01:00.0: GPU is lost.\n"
        " GPU 1: A100-SXM4-40GB (UUID: GPU-b)\n"
        "  MIG 3g.20gb Device 0: (UUID: MIG-GPU-b/1/0)\n"
        "  MIG 1c.3g.71gb  Device  1: (UUID: MIG-c)\n"
        "  MIG 1g.24gb+me.all Device 2: (UUID: MIG-d)\n"
        "GPU 10: Orin (nvgpu) (UUID: 54d0709b-aa)\n"
        "  MIG nonsense\n"
    )
    assert dict(found.cards) == {"GPU-b": 1, "54d0709b-aa": 10}
    assert found.migs == (
        ListedMig(1, 0, "3g.20gb", "MIG-GPU-b/1/0"),
        ListedMig(1, 1, "1c.3g.71gb", "MIG-c"),
        ListedMig(1, 2, "1g.24gb+me.all", "MIG-d"),
    )


def test_instances_below_a_card_that_cannot_be_told_are_nobody_s() -> None:
    found = parse_list(
        "GPU 0: A100 (UUID: GPU-a)\n  MIG 3g.20gb Device 0: (UUID: MIG-a)\n"
        "GPU 1: Unable to determine\n  MIG 3g.20gb Device 0: (UUID: MIG-b)\n"
    )
    assert [(m.card, m.uuid) for m in found.migs] == [(0, "MIG-a")]


def test_capabilities() -> None:
    said = 'GPU-a, 8.9\nGPU-b, [N/A]\nField "compute_cap" is not a valid field to query.\nGPU-c, 12.1\n'
    assert parse_capabilities(said) == {"GPU-a": 89, "GPU-c": 121}


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


@pytest.mark.parametrize(
    "text", [" " * 2_000_000, "GPU 0: " * 300_000, "  MIG " * 300_000, "<nvidia_smi_log>" + "[" * 2_000_000]
)
def test_megabytes_take_no_time(text: str) -> None:
    began = time.process_time()
    parse_list(text)
    parse_list(text.replace(" ", "\n"))
    parse_capabilities(text)
    with pytest.raises(DiscoveryError):
        parse_xml(text)
    assert time.process_time() - began < 5


PIECES = st.sampled_from(
    ["<nvidia_smi_log>", "</nvidia_smi_log>", "<gpu>", "</gpu>", CARD, MEMORY, MIG.format("fb_memory_usage"), "N/A",
     "\x00", "&#0;", "<uuid>", "]]>", "<!DOCTYPE", "GPU 0: x (UUID: y)\n", "  MIG 1g.5gb Device 0: (UUID: MIG-z)\n",
     ", 9.0\n", "<processes><process_info><pid>5</pid></process_info></processes>"]
)  # fmt: skip


@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=20).map("".join))
def test_only_our_error_comes_out(text: str) -> None:
    parse_list(text)
    parse_capabilities(text)
    try:
        log = parse_xml(text)
    except DiscoveryError:
        return
    for found in log.cards:
        assert devices(found, None)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 400))
def test_damage_in_a_good_document(noise: bytes, at: int, cut: int) -> None:
    good = xml(CARD + MEMORY + MIG.format("fb_memory_usage"), CARD + MEMORY)
    text = good[:at] + noise.decode(errors="replace") + good[at + cut :]
    try:
        log = parse_xml(text)
    except DiscoveryError:
        return
    for found in log.cards:
        assert devices(found, None)
