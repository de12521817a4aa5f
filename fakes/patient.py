"""A machine for the doctor: a fake machine's folder with changes laid over it, and programs that answer at once.

A healthy one has everything that the doctor reads. A test lays over it what is wrong: files (``None``: cannot be
read; a list: one content after the other), answers of programs (``None``: not installed), the state of cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from fakes.machines.nvidia_smi import Smi
from fakes.machines.nvml import FakeNvml
from llmgw.discovery import nvml
from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from llmgw.discovery.sysfs import DiskReader
from llmgw.hardware.inventory import Host

NOW = 1_800_000_000.0
DAY_S = 86400.0
Said = tuple[int, str] | str | None
Laid = str | bytes | list[str] | None
MODULES = (
    "nvidia_uvm 1 0 - Live\nnvidia 1 9 nvidia_uvm Live\nnvidia_peermem 1 0 - Live\nmlx5_ib 1 0 - Live\n"
    "ib_uverbs 1 2 nvidia_peermem,mlx5_ib Live\nib_core 1 3 nvidia_peermem,ib_uverbs Live\nib_umad 1 0 - Live\n"
)
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max stack size            8388608              unlimited            bytes\n"
    "Max open files            1048576              1048576              files\n"
    "Max locked memory         unlimited            unlimited            bytes\n"
)
UNIT = "LoadState=loaded\nLimitMEMLOCK=infinity\nNeedDaemonReload=no\nMainPID=900\n"
NFT = "table inet filter {\n\tchain input {\n\t\ttype filter hook input priority 0; policy accept;\n\t}\n}\n"
DF = "Filesystem 1024-blocks Used Available Capacity Mounted on\n"
LSPCI = (
    "0000:10:01.0 PCI bridge: root\n\tCapabilities: [70] Express Root Port\n\n"
    "0000:12:00.0 PCI bridge: switch\n\tCapabilities: [70] Express (v2) Downstream Port\n"
    "\t\tACSCtl: SrcValid- TransBlk- ReqRedir- CmpltRedir-\n"
)


class Overlay(DiskReader):
    """Reads a folder with files laid over it; ``None`` hides what is there, and all that is below."""

    def __init__(self, root: Path, files: Mapping[str, Laid], shut: frozenset[str]) -> None:
        self._root, self._files, self._shut = str(root), files, shut
        self._hidden = tuple(name for name, value in files.items() if value is None)

    def _name(self, path: Path) -> str:
        return str(path)[len(self._root) + 1 :]

    def _is_hidden(self, name: str) -> bool:
        return any(name == h or name.startswith(f"{h}/") for h in self._hidden)

    def raw(self, path: Path, limit: int) -> bytes:
        name = self._name(path)
        laid = self._files.get(name)
        if isinstance(laid, list):
            laid = laid.pop(0) if len(laid) > 1 else laid[0]
        if laid is not None:
            return (laid.encode() if isinstance(laid, str) else laid)[:limit]
        return b"" if self._is_hidden(name) else super().raw(path, limit)

    def names(self, path: Path) -> tuple[str, ...]:
        name = self._name(path)
        if self._is_hidden(name):
            return ()
        prefix = f"{name}/"
        laid = (
            n[len(prefix) :].split("/")[0] for n, v in self._files.items() if v is not None and n.startswith(prefix)
        )
        there = (n for n in super().names(path) if not self._is_hidden(f"{prefix}{n}"))
        return tuple(dict.fromkeys((*there, *laid)))

    def usable(self, path: Path) -> bool:
        return self._name(path) not in self._shut


@frozen
class Patient:
    """A machine as the doctor meets it (see :class:`llmgw.discovery.machine.Machine`).

    ``cards`` is what the driver says of each (see :func:`fakes.machines.render.write_state`), ``program`` how all of
    nvidia-smi behaves. ``said`` maps a program, or a program with its first arguments, to what it answers.
    """

    root: Path
    files: Mapping[str, Laid] = field(factory=dict)
    said: Mapping[str, Said] = field(factory=dict)
    cards: Mapping[int, Mapping[str, Any]] = field(factory=dict)
    program: str = ""
    shut: frozenset[str] = frozenset()
    kernel: str = "6.8.0-45-generic"

    @property
    def reader(self) -> Overlay:
        return Overlay(self.root, self.files, self.shut)

    def host(self) -> Host:
        return Host("gpu-node-07", "b00t", self.kernel, "Linux", 128, 2_000_000)

    def with_(
        self,
        files: Mapping[str, Laid] | None = None,
        said: Mapping[str, Said] | None = None,
        cards: Mapping[int, Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> Patient:
        """The same machine with something else about it."""
        return evolve(
            self,
            files={**self.files, **(files or {})},
            said={**self.said, **(said or {})},
            cards={**self.cards, **(cards or {})},
            **more,
        )

    async def ask(self, program: str, *args: str) -> Ran:
        words = (program, *args)
        laid = [" ".join(words[:count]) for count in range(len(words), 0, -1)]
        key = next((k for k in laid if k in self.said), None)
        if key is not None:
            answer = self.said[key]
            if answer is None:
                raise DiscoveryError("not-found", program, "was not found", "")
            code, text = answer if isinstance(answer, tuple) else (0, answer)
            return Ran(words, code, text, "")
        if program == "nvidia-smi" and (self.root / "machine.json").exists():
            code, text = Smi(_described(self.root), self._state).run(list(args))
            return Ran(words, code, text, "")
        if program == "nvml" and (self.root / "machine.json").exists():
            return Ran(words, 0, self._nvml(), "")
        raise DiscoveryError("not-found", program, "was not found", "")

    def _nvml(self) -> str:
        """What the process that reads NVML prints."""
        try:
            found = nvml.read(FakeNvml(_described(self.root), self._state))
        except nvml.NvmlError as failed:
            return json.dumps({"error": {"code": failed.code, "said": str(failed)}})
        return json.dumps({"reading": asdict(found)})

    @property
    def _state(self) -> dict[str, Any]:
        return {"cards": {str(k): dict(v) for k, v in self.cards.items()}, "program": self.program}


@cache
def _described(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "machine.json").read_text())
    return found


@cache
def certificate(days: float = 90.0, begins: float = -1.0) -> bytes:
    """A certificate that ends so many days from :data:`NOW`."""
    from datetime import UTC, datetime

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "node")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(datetime.fromtimestamp(NOW + begins * DAY_S, UTC))
    made = made.not_valid_after(datetime.fromtimestamp(NOW + days * DAY_S, UTC))
    return made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def healthy(root: Path) -> Patient:
    """The machine rendered in ``root``, with nothing wrong about it."""
    described: dict[str, Any] = {"adapters": [], "driver": "", "cards": []}
    if (root / "machine.json").exists():
        described = _described(root)
    driver, adapters = described["driver"], described["adapters"]
    links: list[dict[str, Any]] = [interface("lo", "127.0.0.1/8"), interface("mgmt0", "10.1.0.5/24")]
    files: dict[str, Laid] = {
        "proc/modules": MODULES, "proc/900/limits": LIMITS, "proc/900/environ": "PATH=/usr/bin\0HOME=/root\0",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release\n",
        "proc/meminfo": "MemTotal: 2000000000 kB\nMemAvailable: 1900000000 kB\nHugePages_Total: 0\n"
        "Hugepagesize: 2048 kB\n",
        "proc/sys/kernel/numa_balancing": "0\n", "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "proc/stat": f"btime {int(NOW - DAY_S)}\n", "dev/nvidia-uvm": "", "dev/nvidiactl": "",
        "etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n", "var/log/fabricmanager.log": "[INFO] started\n",
        "opt/nvidia/nvlsm/sbin/nvlsm": "\x7fELF", "usr/sbin/ibstat": "\x7fELF", "opt/vllm/bin/vllm": "#!/bin/sh\n",
        "opt/vllm/lib/python3.12/site-packages/vllm-0.11.0.dist-info/METADATA": "x",
        "opt/vllm/lib/python3.12/site-packages/torch-2.8.0+cu126.dist-info/METADATA": "x",
        "opt/vllm/lib/python3.12/site-packages/nvidia_nccl_cu12-2.28.3.dist-info/METADATA": "x",
        "etc/llmgw/node.pem": certificate(), "etc/llmgw/ca.pem": certificate(), "var/lib/llmgw-agent/hub/x": "",
        "sys/devices/system/node/node0/cpulist": "0-63\n", "sys/devices/system/node/node1/cpulist": "64-127\n",
        "sys/class/dmi/id/product_name": "PowerEdge XE9680\n",
    }  # fmt: skip
    if described["cards"] and described["nvswitch"] and described["cards"][0]["capability"] != "10.0":
        device = "0x22a3" if described["cards"][0]["capability"] == "9.0" else "0x1af1"
        function = "sys/bus/pci/devices/0000:07:00.0"
        files |= {f"{function}/class": "0x068000\n", f"{function}/vendor": "0x10de\n", f"{function}/device": device}
    if described.get("cluster"):
        files["dev/nvidia-caps-imex-channels/channel0"] = ""
    for adapter in adapters:
        base = f"sys/class/infiniband/{adapter['name']}"
        names = ("symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
                 "port_xmit_discards", "link_downed")  # fmt: skip
        files |= {f"{base}/ports/1/counters/{name}": "7\n" for name in names}
        if adapter["link_layer"] == "Ethernet":
            files |= {f"{base}/ports/1/hw_counters/{n}": "3\n" for n in ("out_of_sequence", "packet_seq_err")}
        if adapter["netdev"]:
            links.append(interface(adapter["netdev"], adapter["address"] or "", mtu=4200))
    said: dict[str, Said] = {
        "ip": json.dumps(links), "dmesg": "[    1.0] Linux version\n", "lspci": LSPCI,
        f"systemctl show {AGENT}": UNIT,
        "systemctl show nvidia-fabricmanager": "LoadState=loaded\nActiveState=active\nResult=success\n",
        "nv-fabricmanager": f"Fabric Manager version is : {driver}\n", "nft": NFT,
        "getent": "10.1.0.5 STREAM gpu-node-07\n",
        "df -Pk": DF + "/dev/md0 4000000000 1000000000 3000000000 25% /\n" * 3,
        "df -Pi": DF + "/dev/md0 1000000 100000 900000 10% /\n" * 3,
        "df -Pk /dev/shm": DF + "tmpfs 1000000000 0 1000000000 0% /dev/shm\n",
        "timedatectl": "NTPSynchronized=yes\n", "nvidia-imex-ctl": "READY\n", "docker": "cgroupfs []\n",
        "nvidia-smi mig -lgi": lgi(described["cards"]),
    }  # fmt: skip
    return Patient(root, files, said)


AGENT = "llmgw-agent.service"


def interface(name: str, address: str = "", mtu: int = 1500, state: str = "UP") -> dict[str, Any]:
    """An entry of `ip -j addr show`."""
    local, _, prefix = address.partition("/")
    infos = [{"family": "inet", "local": local, "prefixlen": int(prefix)}] if address else []
    return {"ifname": name, "operstate": state, "mtu": mtu, "addr_info": infos}


def lgi(cards: list[dict[str, Any]], *more: str) -> str:
    """What `nvidia-smi mig -lgi` prints."""
    rows = [
        f"|   {n}  MIG {mig['profile']}   9        {mig['gpu_instance']}          0:4     |"
        for n, card in enumerate(cards)
        for mig in card["mig"] or ()
    ]
    return "\n".join(["| GPU   Name  Profile  Instance   Placement  |", *rows, *more, ""])
