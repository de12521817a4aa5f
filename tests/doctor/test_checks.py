"""Every check has a machine that fails it, one that passes it, and one where its fact cannot be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from attrs import evolve, frozen

from fakes.patient import AGENT as UNIT_NAME
from fakes.patient import DF, LIMITS, MODULES, UNIT, Laid, certificate, interface, lgi
from llmgw.doctor.checks import CHECKS
from llmgw.doctor.peer_facts import Peer, PeerPath, PeerPort, Way
from llmgw.doctor.verdict import Severity, Verdict, judge
from llmgw.hardware.fabric import FabricRule, LinkLayer
from llmgw.settings.catalog import EngineKind
from llmgw.settings.daemon import EngineInstall
from tests.doctor.beds import IB, Change, examine, rendered

NOTHING = Change()


@frozen
class Case:
    """``also`` is laid over all three machines; ``on`` is another base for the one that fails."""

    base: str
    bad: Change
    blind: Change
    also: Change = NOTHING
    on: str = ""


NO_SMI = Change(said={"nvidia-smi": None, "nvml": None})
NO_CLASS = Change(files={"sys/class": None})
NO_LOG = Change(said={"dmesg": (1, "dmesg: read kernel buffer failed: Operation not permitted\n")})
NO_PCI = Change(files={"sys/bus": None})
NO_ENV = Change(files={"proc/900/environ": None})
NO_IP = Change(said={"ip": None})
NO_UNIT = Change(said={f"systemctl show {UNIT_NAME}": (1, "Failed to connect to bus\n")})
NO_ROOT = Change(files={"": None})
NAMED = Change(agent={"fabrics": (FabricRule("ib", adapters=tuple(f"mlx5_{n}" for n in range(8))),)})
DOCKER = Change(
    agent={
        "engines": (
            EngineInstall(
                EngineKind.VLLM,
                (
                    "docker",
                    "run",
                    "--device",
                    "/dev/infiniband",
                    "--ulimit",
                    "memlock=-1",
                    "--cap-add",
                    "IPC_LOCK",
                    "--ipc=host",
                ),
            ),
        )
    },
    files={"usr/bin/docker": "\x7fELF"},
)


def log(*lines: str) -> Change:
    return Change(said={"dmesg": "\n".join(lines) + "\n"})


def cards(index: int = 2, **state: object) -> Change:
    return Change(cards={index: state})


def env(**values: str) -> Change:
    return Change(files={"proc/900/environ": "HOME=/root\0" + "\0".join(f"{k}={v}" for k, v in values.items())})


def port(adapter: str, **files: str) -> Change:
    return Change(
        files={f"sys/class/infiniband/{adapter}/ports/1/{name}": f"{value}\n" for name, value in files.items()}
    )


def growing(adapter: str, counter: str) -> Change:
    return Change(files={f"sys/class/infiniband/{adapter}/ports/1/{counter}": ["7\n", "500\n"]})


def gid(adapter: str, *addresses: str) -> Change:
    """A port with these addresses in its GID table from index 2 on, and no other."""
    base = f"sys/class/infiniband/{adapter}/ports/1"
    zero = ":".join(["0000"] * 8)
    files: dict[str, Laid] = {f"{base}/gids/{n}": zero for n in range(2, 6)}
    for n, address in enumerate(addresses):
        a, b, c, d = (int(part) for part in address.split("."))
        for index, kind in ((2 + 2 * n, "IB/RoCE v1"), (3 + 2 * n, "RoCE v2")):
            files[f"{base}/gids/{index}"] = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
            files[f"{base}/gid_attrs/types/{index}"] = kind
            files[f"{base}/gid_attrs/ndevs/{index}"] = "rail0"
    return Change(files=files)


def links(*more: dict[str, object]) -> Change:
    rails = [interface(f"rail{n}", f"10.30.{n}.2/31", mtu=4200) for n in range(8)]
    return Change(
        said={"ip": json.dumps([interface("lo", "127.0.0.1/8"), interface("mgmt0", "10.1.0.5/24"), *rails, *more])}
    )


def limits(old: str, new: str) -> Change:
    return Change(files={"proc/900/limits": re.sub(rf"({old}\s+)\S+", rf"\g<1>{new}", LIMITS)})


def unit(**values: str) -> Change:
    text = UNIT
    for name, value in values.items():
        text = re.sub(rf"{name}=.*", f"{name}={value}", text)
    return Change(said={f"systemctl show {UNIT_NAME}": text})


def fabric(*rules: FabricRule) -> Change:
    return Change(agent={"fabrics": rules})


def both(*changes: Change) -> Change:
    """Several changes as one."""
    made = Change()
    for c in changes:
        made = evolve(
            made, files={**made.files, **c.files}, said={**made.said, **c.said}, cards={**made.cards, **c.cards},
            agent={**made.agent, **c.agent}, more={**made.more, **c.more}, dial=c.dial, peer=c.peer or made.peer,
        )  # fmt: skip
    return made


WAY = Way((PeerPort(20000), PeerPort(32768)), 1500, 1500)
PATH = PeerPath(0.2, 0.001, "10.1.0.5", "10.1.0.5", ("10.1.0.6",), ("10.1.0.5",), WAY, WAY)


def path(peer: Peer = Peer("node-2", "10.1.0.6", "node-2"), **more: object) -> Change:
    """A node that was tried, with something else about the path."""
    return Change(peer=(peer, evolve(PATH, **more)))


NO_PEER = Change(peer="the name of this node is not known")


H100, B200, A100, MIG, TRAY = "hgx-h100", "hgx-b200", "dgx-a100", "a100-mig", "tray"
ROCE0 = "mlx5_4"
XML_GONE = Change(more={"program": "no-driver"})

CASES: dict[str, Case] = {
    "gpu.none": Case(H100, Change(files={"sys/bus/pci/devices": None}, said={"nvidia-smi": None, "nvml": None}), NO_PCI),
    "gpu.driver.unreachable": Case(H100, Change(more={"program": "no-driver"}), NO_PCI),
    "gpu.driver.library-mismatch": Case(H100, Change(more={"program": "mismatch"}), NO_PCI),
    "gpu.source.smi": Case(H100, Change(said={"nvidia-smi": (1, "Segmentation fault\n")}), NO_SMI),
    "gpu.source.nvml": Case(H100, Change(more={"program": "nvml-broken"}), Change(said={"nvml": None})),
    "gpu.lost": Case(H100, log("NVRM: GPU at PCI:0000:33:00: GPU has fallen off the bus."), NO_SMI),
    "gpu.count.expected": Case(
        H100, Change(files={"var/lib/llmgw-agent/hardware.json": '[{"uuid": "GPU-gone"}]'}),
        Change(files={"var/lib/llmgw-agent/hardware.json": "{"}),
    ),
    "gpu.uvm.missing": Case(H100, Change(files={"dev/nvidia-uvm": None}), Change(files={"dev": None})),
    "gpu.xid.reset": Case(H100, log("[ 9.1] NVRM: Xid (PCI:0000:33:00): 119, pid=1, Timeout"), NO_LOG),
    "nvswitch.fm.not-running": Case(
        H100, Change(said={"systemctl show nvidia-fabricmanager": "LoadState=not-found\nActiveState=inactive\n"}),
        Change(said={"systemctl show nvidia-fabricmanager": None}),
    ),
    "nvswitch.fm.version": Case(
        A100, Change(said={"nv-fabricmanager": "Fabric Manager version is : 550.120\n"}),
        Change(said={"nv-fabricmanager": None}),
    ),
    "nvswitch.nvl5.prereq": Case(
        B200, Change(files={"opt/nvidia/nvlsm/sbin/nvlsm": None}), Change(files={"usr": None, "opt/nvidia": None})
    ),
    "nvswitch.fabric.state": Case(H100, cards(fabric="In Progress"), NO_SMI),
    "nvswitch.sxid.fatal": Case(
        H100,
        Change(files={"var/log/fabricmanager.log": "[ERROR] detected NVSwitch fatal error 20034 on NVSwitch pci bus id 00000000:86:00.0\n"}),
        Change(files={"var/log/fabricmanager.log": None}),
    ),
    "nvlink.down": Case(H100, cards(links_down=2), NO_SMI),
    "imex.not-ready": Case(TRAY, Change(said={"nvidia-imex-ctl": "DOWN\n"}), Change(said={"nvidia-imex-ctl": None})),
    "gpu.ecc.uncorrectable": Case(H100, cards(ecc=2), NO_SMI),
    "gpu.remap.failed": Case(H100, cards(remap_failed=True), NO_SMI),
    "gpu.remap.pending": Case(H100, cards(remap_pending=True), NO_SMI),
    "gpu.persistence": Case(H100, cards(no_persistence=True), NO_SMI),
    "gpu.throttle": Case(H100, cards(slowed="hw_thermal_slowdown"), NO_SMI),
    "gpu.ecc.mode": Case(H100, cards(ecc_off=True), NO_SMI),
    "gpu.zombie": Case(
        H100, both(cards(processes=[[77, "python", 9000]]), Change(files={"proc/77/stat": "77 (python) Z 1 77"})), NO_SMI
    ),
    "gpu.in-use": Case(H100, cards(processes=[[77, "python", 9000]]), NO_SMI),
    "mig.empty": Case(MIG, NOTHING, NO_SMI, on="empty-mig"),
    "mig.no-compute": Case(
        MIG, Change(said={"nvidia-smi mig -lgi": lgi([], "|   0  MIG 1g.10gb   19        9          6:1     |")}),
        Change(said={"nvidia-smi mig -lgi": (4, "Insufficient Permissions\n")}),
    ),
    "mig.pending": Case(MIG, cards(1, pending_mig=True), NO_SMI),
    "mig.mixed": Case("h100-7x1g", NOTHING, NO_SMI, on=MIG),
    "agent.memlock.running": Case(H100, limits("Max locked memory", "8388608"), Change(files={"proc/900/limits": None})),
    "agent.memlock.unit": Case(H100, unit(LimitMEMLOCK="8388608"), NO_UNIT),
    "rdma.modules.missing": Case(H100, Change(files={"sys/class/infiniband": None}), NO_CLASS),
    "rdma.verbs.no-device-node": Case(H100, Change(files={"dev/infiniband/uverbs3": None}), NO_CLASS),
    "fabric.declared.absent": Case(H100, fabric(FabricRule("ib", adapters=("mlx5_0", "mlx5_99"))), NO_CLASS),
    "fabric.declared.wrong-type": Case(
        H100, fabric(FabricRule("eth", adapters=("mlx5_0",), link_layer=LinkLayer.ETHERNET)), NO_CLASS
    ),
    "fabric.declared.nvlink-mgmt": Case(B200, fabric(FabricRule("ib", adapters=("mlx5_0",))), NO_CLASS),
    "fabric.mixed-linklayer": Case(H100, fabric(FabricRule("all", adapters=("mlx5_0", "mlx5_8"))), NO_CLASS),
    "fabric.no-usable-port": Case(H100, fabric(FabricRule("lab", subnets=("10.99.0.0/16",))), NO_CLASS),
    "roce.gid.none": Case(B200, gid(ROCE0), NO_CLASS),
    "roce.gid.linklocal-ipv4": Case(B200, gid(ROCE0, "169.254.7.9"), NO_CLASS),
    "roce.gid.pinned-wrong": Case(B200, env(NCCL_IB_GID_INDEX="1"), NO_ENV),
    "port.rails.count": Case(B200, gid(ROCE0), NO_CLASS),
    "roce.gid.index-differs": Case(B200, gid(ROCE0, "10.99.0.1", "10.30.0.2"), NO_CLASS, also=fabric(FabricRule("r", subnets=("10.30.0.0/16",)))),
    "roce.gid.foreign-netns": Case(
        B200,
        Change(files={f"sys/class/infiniband/{ROCE0}/ports/1/gid_attrs/types/{n}": None for n in range(4)}
               | {f"sys/class/infiniband/{ROCE0}/ports/1/gid_attrs/types/7": "RoCE v2"}),
        NO_CLASS,
    ),
    "fw.mixed": Case(H100, Change(files={"sys/class/infiniband/mlx5_3/fw_ver": "28.39.1002"}), NO_SMI),
    "soft.rdma": Case(
        H100,
        both(Change(files={"sys/class/infiniband/rxe0/node_type": "1: CA", "sys/class/infiniband/rxe0/fw_ver": "0.0.0"}),
             port("rxe0", state="4: ACTIVE", link_layer="Ethernet", rate="2.5 Gb/sec (1X SDR)")),
        NO_CLASS,
    ),
    "fabric.subnets.rails": Case(H100, NOTHING, NO_CLASS, on=B200),
    "unknown.adapter": Case(H100, fabric(IB), NO_CLASS),
    "port.down": Case(H100, port("mlx5_3", state="1: DOWN", phys_state="2: Polling"), NO_CLASS, also=NAMED),
    "port.init": Case(H100, port("mlx5_3", state="2: INIT"), NO_CLASS, also=NAMED),
    "port.rate.low": Case(H100, port("mlx5_3", rate="200 Gb/sec (2X NDR)"), NO_CLASS),
    "port.flap": Case(H100, log(*["mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN"] * 2), NO_LOG),
    "port.errors": Case(H100, growing("mlx5_3", "counters/symbol_error"), NO_CLASS),
    "roce.counters": Case(B200, growing(ROCE0, "hw_counters/out_of_sequence"), NO_CLASS),
    "roce.mtu": Case(B200, links(interface("rail3", "10.30.3.2/31", mtu=9000)), NO_IP),
    "counters.unreadable": Case(H100, port("mlx5_3", **{"counters/symbol_error": "N/A (no PMA)"}), NO_CLASS),
    "mgmt.ifname.missing": Case(B200, env(NCCL_SOCKET_IFNAME="eth2"), NO_IP),
    "mgmt.gloo.syntax": Case(B200, env(GLOO_SOCKET_IFNAME="^lo"), NO_IP),
    "mgmt.hostname.loopback": Case(B200, Change(said={"getent": "127.0.1.1 STREAM n\n"}), Change(said={"getent": None})),
    "mgmt.hostip.env": Case(B200, env(VLLM_HOST_IP="10.9.9.9"), NO_ENV),
    "mgmt.ifname.ambiguous": Case(
        B200, both(env(NCCL_SOCKET_IFNAME="mgmt0"), links(interface("mgmt0.29", "10.9.0.2/24"))), NO_IP
    ),
    "mgmt.ifname.unset": Case(
        B200, both(Change(agent={"address": "gpu-node-07"}), links(interface("docker0", "172.17.0.1/16"))), NO_IP
    ),
    "mgmt.firewall": Case(
        B200,
        Change(said={"nft": "table inet f {\n\tchain i {\n\t\ttype filter hook input priority 0; policy drop;\n\t}\n}\n"}),
        Change(said={"nft": (1, "Operation not permitted (you must be root)\n")}),
    ),
    "mgmt.is-fabric": Case(B200, Change(agent={"address": "10.30.0.2"}), NO_CLASS),
    "peer.reach": Case(H100, path(Peer("node-2", trouble="port 28029: Connection refused")), NO_PEER, also=path()),
    "peer.ports": Case(
        H100, path(back=evolve(WAY, ports=(PeerPort(20000, "no answer within 2 s"), PeerPort(32768)))), NO_PEER, also=path()
    ),
    "peer.mtu": Case(H100, path(there=evolve(WAY, largest=1400)), NO_PEER, also=path()),
    "peer.clock": Case(H100, path(ahead_s=-6.5), NO_PEER, also=path()),
    "peer.name": Case(H100, path(named_there=("127.0.1.1",)), NO_PEER, also=path()),
    "gdr.unavailable": Case(
        H100, Change(files={"proc/modules": MODULES.replace("nvidia_peermem", "other")}, more={"kernel": "5.4.0"}),
        Change(files={"proc/modules": None, "sys/module": None}),
    ),
    "gdr.peermem.not-registered": Case(
        H100,
        Change(files={"proc/modules": MODULES.replace("nvidia_peermem,", "")}, more={"kernel": "5.4.0"}),
        Change(files={"proc/modules": None}),
    ),
    "gdr.peermem.errors": Case(H100, log("nvidia-peermem nv_get_p2p: ERROR detected invalid context, skipping"), NO_LOG),
    "pci.acs": Case(
        H100,
        Change(said={"lspci": "0000:12:00.0 PCI bridge: x\n\tExpress (v2) Downstream Port\n\t\tACSCtl: SrcValid+ ReqRedir+\n"}),
        Change(said={"lspci": "0000:12:00.0 PCI bridge: x\n\tCapabilities: <access denied>\n"}),
    ),
    "pci.width": Case(H100, cards(lanes=8), NO_SMI),
    "topo.nic.far": Case(H100, port("mlx5_3", state="1: DOWN"), NO_SMI),
    "pci.speed": Case(H100, cards(pcie_gen=3, utilization=80), NO_SMI),
    "numa.unknown": Case(H100, Change(), Change()),
    "env.hca.syntax": Case(H100, env(NCCL_IB_HCA="mlx5_0, mlx5_1"), NO_ENV),
    "env.hca.per-rank": Case(
        H100, Change(agent={"engines": (EngineInstall(EngineKind.VLLM, ("env", "NCCL_IB_HCA=mlx5_0", "vllm")),)}), NO_ROOT
    ),
    "env.nccl.conf": Case(H100, Change(files={"etc/nccl.conf": "# site\nNCCL_IB_DISABLE=1\n"}), NO_ENV),
    "env.inherited": Case(H100, env(NCCL_DEBUG="INFO"), NO_ENV),
    "engine.missing": Case(H100, Change(files={"opt/vllm/bin/vllm": None}), NO_ROOT),
    "engine.cuda-driver": Case(
        H100,
        Change(files={"opt/vllm/lib/python3.12/site-packages/torch-2.8.0+cu126.dist-info": None,
                      "opt/vllm/lib/python3.12/site-packages/torch-2.9.0+cu130.dist-info/METADATA": "x"}),
        NO_SMI,
    ),
    "container.rdma": Case(
        H100, Change(agent={"engines": (EngineInstall(EngineKind.VLLM, ("docker", "run", "vllm")),)}), NO_CLASS, also=DOCKER
    ),
    "engine.nccl.version": Case(
        H100,
        both(Change(files={"opt/sgl/bin/python": "x", "opt/sgl/lib/python3.12/site-packages/nvidia_nccl_cu12-2.26.2.dist-info/M": "x"},
                    agent={"engines": (EngineInstall(EngineKind.SGLANG, ("/opt/sgl/bin/python", "-m", "sglang")),)})),
        NO_ROOT,
    ),
    "engine.shm": Case(
        H100, Change(said={"df -Pk /dev/shm": DF + "shm 65536 0 65536 0% /dev/shm\n"}), Change(said={"df -Pk /dev/shm": None})
    ),
    "container.gpus-lost": Case(
        H100, Change(said={"docker": "systemd []\n"}), Change(said={"docker": (1, "permission denied\n")}), also=DOCKER
    ),
    "time.sync": Case(
        H100, Change(said={"timedatectl": "NTPSynchronized=no\n"}), Change(said={"timedatectl": None, "chronyc": None})
    ),
    "disk.model-cache": Case(
        H100, Change(said={"df -Pk": DF + "/dev/md0 4000000000 3999900000 100000 99% /\n" * 3}), Change(said={"df": None, "df -Pk": None})
    ),
    "link.unreachable": Case(H100, Change(dial="Connection refused"), Change(dial=None)),
    "cert.expiry": Case(H100, Change(files={"etc/llmgw/node.pem": certificate(3)}), Change(files={"etc/llmgw/node.pem": None})),
    "mem.host": Case(
        H100, Change(files={"proc/meminfo": "MemTotal: 2000000000 kB\nMemAvailable: 9000000 kB\n"}),
        Change(files={"proc/meminfo": None}),
    ),
    "limits.nofile": Case(H100, limits("Max open files", "1024"), Change(files={"proc/900/limits": None})),
    "kernel.numa-balancing": Case(
        H100, Change(files={"proc/sys/kernel/numa_balancing": "1\n"}), Change(files={"proc/sys/kernel/numa_balancing": None})
    ),
    "limits.stack": Case(
        H100,
        both(limits("Max stack size", "unlimited"),
             Change(files={"opt/vllm/lib/python3.12/site-packages/nvidia_nccl_cu12-2.28.3.dist-info": None,
                           "opt/vllm/lib/python3.12/site-packages/nvidia_nccl_cu12-2.27.3.dist-info/M": "x"})),
        Change(files={"proc/900/limits": None}),
    ),
    "ipc.removeipc": Case(
        H100, Change(files={"etc/systemd/logind.conf": "[Login]\n"}), Change(files={"etc/systemd/logind.conf": None}),
        also=unit(LoadState="not-found", MainPID="0"),
    ),
}  # fmt: skip


def pci(patient_root: Path, **files: str) -> Change:
    """The same files in every PCI function of a GPU or adapter."""
    base = patient_root / "sys/bus/pci/devices"
    return Change(files={f"sys/bus/pci/devices/{d.name}/{n}": v for d in base.iterdir() for n, v in files.items()})


def specific(name: str, case: Case, root: Path) -> Case:
    """Machines that cannot be described before their folder is there."""
    if name == "numa.unknown":
        hidden = {f"sys/bus/pci/devices/{d.name}/numa_node": None for d in (root / "sys/bus/pci/devices").iterdir()}
        return evolve(case, bad=pci(root, numa_node="-1\n"), blind=Change(files=hidden))
    return case


_GOOD: dict[tuple[str, str], tuple[Verdict, ...]] = {}
"""A machine that passes one check passes others too: it is examined once."""


def test_every_check_has_its_machines() -> None:
    assert set(CASES) == {check.id for check in CHECKS}


@pytest.mark.parametrize("name", [c.id for c in CHECKS])
async def test_check(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = CASES[name]
    patient = rendered(case.base, tmp_path_factory)
    case = specific(name, case, patient.root)
    other = rendered(case.on or case.base, tmp_path_factory)
    check = next(c for c in CHECKS if c.id == name)
    if (key := (case.base, str(case.also))) not in _GOOD:
        _GOOD[key] = (await examine(patient, case.base, case.also))[1]
    good = {v.id: v for v in _GOOD[key]}
    bad = {v.id: v for v in (await examine(other, case.on or case.base, case.also, case.bad))[1]}
    blind = {v.id: v for v in (await examine(patient, case.base, case.also, case.blind))[1]}
    assert good[name].severity is Severity.OK, good[name]
    assert bad[name].severity is check.severity, bad[name]
    assert bad[name].text
    assert bad[name].remedy
    assert blind[name].severity is Severity.UNKNOWN, blind[name]
    assert blind[name].text


async def test_mig_devices_that_no_model_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    facts, _ = await examine(rendered(MIG, tmp_path_factory), MIG)
    classes = sorted({d.device_class for d in facts.devices if d.mig is not None})
    assert len(classes) > 1
    (check,) = [c for c in CHECKS if c.id == "mig.mixed"]
    (some,) = judge(evolve(facts, wanted_classes=(classes[0], "h100-80gb")), (check,))
    assert (some.severity, classes[0] in some.text, all(c in some.text for c in classes[1:])) == (
        Severity.WARN,
        False,
        True,
    )
    (every,) = judge(evolve(facts, wanted_classes=tuple(classes)), (check,))
    assert every.severity is Severity.INFO
