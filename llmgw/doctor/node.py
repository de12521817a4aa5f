"""What the doctor reads of the agent, its settings and the host's services."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio
from attrs import evolve
from cryptography import x509

from llmgw.discovery.machine import Machine
from llmgw.discovery.sysfs import Reader
from llmgw.doctor import texts
from llmgw.doctor.facts import Netdev
from llmgw.doctor.gather import Gathered
from llmgw.doctor.node_facts import Certificate, Clock, Disk, Docker, Engine, Firewall, Limits, Reach, Stuck, Unit
from llmgw.doctor.tree import Missing
from llmgw.settings.daemon import EngineInstall

UNIT = "llmgw-agent.service"
_BIG = 1024 * 1024
_PROPERTIES = "LoadState,LimitMEMLOCK,NeedDaemonReload,MainPID"
_PLACES = ("usr/local/bin", "usr/bin", "bin", "usr/local/sbin", "usr/sbin")
_DIST = re.compile(r"(torch|vllm|sglang|nvidia_nccl_cu\d+)-([0-9][^-]*)\.dist-info")
_CUDA_TAG = re.compile(r"\+cu(\d+)(\d)\b")
_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*'([\d.]+)'", re.MULTILINE)


def interface(address: str, netdevs: tuple[Netdev, ...]) -> str:
    """The interface that has this address; empty where none does, or it is a name."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:
        return ""
    return next((n.name for n in netdevs if any(ipaddress.ip_interface(a).ip == wanted for a in n.addresses)), "")


def stuck(machine: Machine, holders: Mapping[int, str]) -> tuple[Stuck, ...]:
    """Those of these processes that are dead, or wait in the kernel. Blocking."""
    made = []
    for pid, name in sorted(holders.items()):
        said = machine.reader.text(machine.root / "proc" / str(pid) / "stat") or ""
        state = said.rpartition(")")[2].split()[:1]
        if state in (["D"], ["Z"]):
            made.append(Stuck(pid, name, state[0]))
    return tuple(made)


async def unit(g: Gathered) -> None:
    """The agent's unit, its running process, and what NCCL would be told by variables and files."""

    async def show() -> Unit:
        said = texts.pairs(await g.said("systemctl", "show", UNIT, "-p", _PROPERTIES))
        pid = said.get("MainPID", "0")
        return Unit(
            UNIT, said.get("LoadState", ""), said.get("LimitMEMLOCK", ""), said.get("NeedDaemonReload") == "yes",
            int(pid) if pid.isdigit() else 0,
        )  # fmt: skip

    await g.read("unit", show)
    known: Unit = g.found.get("unit", Unit())

    async def raw(path: str) -> str:
        data: bytes = await g.thread(g.machine.reader.raw, g.machine.root / path, _BIG)
        return data.decode(errors="replace")

    async def limits() -> Limits:
        if known.pid == 0:
            return Limits()
        said = await raw(f"proc/{known.pid}/limits")
        if not said:
            raise Missing(f"/proc/{known.pid}/limits cannot be read", root=True)
        return Limits(*(texts.limit(said, name) for name in ("Max locked memory", "Max open files", "Max stack size")))

    async def variables() -> Any:
        environment = "\n".join(f"{k}={v}" for k, v in sorted(g.asker.environment.items()))
        if known.pid:
            environment = (await raw(f"proc/{known.pid}/environ")).replace("\0", "\n")
            if not environment:
                raise Missing(f"/proc/{known.pid}/environ cannot be read", root=True)
        said = texts.pairs(environment)
        home = said.get("HOME", "/root").strip("/")
        found = list(texts.variables(environment, "environment"))
        # Not the file that NCCL_CONF_FILE names: engines get no such variable of the agent's.
        for path in (f"{home}/.nccl.conf", "etc/nccl.conf"):
            found += texts.variables(await raw(path), f"/{path}")
        return tuple(found)

    await g.read("limits", limits)
    await g.read("variables", variables)


async def network(g: Gathered) -> None:
    """What the host's name resolves to, and the firewall."""
    host = await g.thread(g.machine.host)

    async def names() -> tuple[str, ...]:
        said = await g.said("getent", "ahosts", host.hostname, ok=(0, 2))
        found = (line.split()[0].partition("%")[0] for line in said.splitlines() if line.split())
        return tuple(dict.fromkeys(address for address in found if _is_address(address)))

    async def firewall() -> Firewall:
        try:
            return texts.nft(await g.said("nft", "list", "ruleset"))
        except Missing as first:
            try:
                return texts.iptables(await g.said("iptables", "-S"))
            except Missing as second:
                raise (first if first.root else second) from None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(g.read, "host_addresses", names)
        nursery.start_soon(g.read, "firewall", firewall)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def storage(g: Gathered) -> None:
    """The disks that weights and logs fill, and shared memory."""
    agent = g.asker.agent
    purposes = {"/": "system"}
    if agent is not None:
        purposes |= {agent.state_dir: "state and logs", agent.weights_cache: "weights"}

    async def disks() -> tuple[Disk, ...]:
        # Below another root, or before the agent has made it, a folder may not be there: df would fail for all.
        def exist() -> dict[str, str]:
            names = g.machine.reader.names
            return {path: why for path, why in purposes.items() if path == "/" or names(g.agent_root / path.strip("/"))}

        there: dict[str, str] = await g.thread(exist)
        space = await g.said("df", "-Pk", *there, ok=(0, 1))
        inodes = await g.said("df", "-Pi", *there, ok=(0, 1))
        mounts = (await g.thread(g.machine.reader.raw, g.machine.root / "proc/mounts", _BIG)).decode(errors="replace")
        # The system's own disk may be meant to be so. By the mount and not by trying: nothing is changed, and who runs
        # the doctor need not be who runs the agent.
        fixed = {path for path in there if path != "/" and texts.read_only(mounts, path)}
        return tuple(evolve(d, writable=d.path not in fixed) for d in texts.disks(space, inodes, there))

    async def shm() -> int:
        found = texts.disks(await g.said("df", "-Pk", "/dev/shm"), "", {"/dev/shm": ""})  # noqa: S108 - only asked about
        if not found:
            raise Missing("df does not say how large /dev/shm is")
        return found[0].total_mib

    async with trio.open_nursery() as nursery:
        nursery.start_soon(g.read, "disks", disks)
        nursery.start_soon(g.read, "shm_mib", shm)


async def declared(g: Gathered) -> None:
    """The clock, and what agent.yaml declares against what is there."""
    async with trio.open_nursery() as nursery:
        for fact, how in (
            ("clock", _clock), ("docker", _docker), ("certificates", _certificates), ("known_cards", _known_cards),
            ("engines", _engines), ("reach", _reach),
        ):  # fmt: skip
            nursery.start_soon(g.read, fact, lambda how=how: how(g))


async def _clock(g: Gathered) -> Clock:
    try:
        said = texts.pairs(await g.said("timedatectl", "show", "-p", "NTPSynchronized"))
        return Clock(said.get("NTPSynchronized") == "yes", "timedatectl")
    except Missing as first:
        try:
            return Clock("Normal" in await g.said("chronyc", "tracking"), "chronyc")
        except Missing:
            raise first from None


async def _docker(g: Gathered) -> Docker:
    try:
        said = await g.said("docker", "info", "-f", "{{.CgroupDriver}} {{.CDISpecDirs}}")
    except Missing as missing:
        if "was not found" in missing.why:
            return Docker()
        raise
    driver, _, folders = said.strip().partition(" ")
    links = any(":" in name for name in await g.thread(g.machine.reader.names, g.machine.root / "dev/char"))
    specs = await g.thread(g.machine.reader.names, g.machine.root / "etc/cdi")
    return Docker(driver, "/" in folders and any("nvidia" in name for name in specs), links)


async def _certificates(g: Gathered) -> tuple[Certificate, ...]:
    if g.asker.agent is None:
        return ()
    made = []
    for path in (g.asker.agent.tls.certificate, g.asker.agent.tls.ca):
        data: bytes = await g.thread(g.machine.reader.raw, g.agent_root / path.strip("/"), _BIG)
        if not data:
            raise Missing(f"{path} cannot be read", root=True)
        try:
            made += [
                Certificate(path, one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp())
                for one in x509.load_pem_x509_certificates(data)
            ]
        except ValueError:
            made.append(Certificate(path, trouble="is no certificate that can be read"))
    return tuple(made)


async def _known_cards(g: Gathered) -> tuple[str, ...]:
    if g.asker.agent is None:
        return ()
    path = g.agent_root / g.asker.agent.state_dir.strip("/") / "hardware.json"
    data: bytes = await g.thread(g.machine.reader.raw, path, _BIG)
    if not data:
        return ()
    try:
        return tuple(str(card["uuid"]) for card in json.loads(data))
    except (ValueError, TypeError, KeyError):
        raise Missing(f"{path} is not a list of cards") from None


async def _engines(g: Gathered) -> tuple[Engine, ...]:
    if g.asker.agent is None:
        return ()
    if not await g.thread(g.machine.reader.names, g.agent_root):
        raise Missing("/ cannot be listed")
    reader = g.machine.reader
    return tuple([await g.thread(_engine, reader, g.agent_root, install) for install in g.asker.agent.engines])


def _engine(reader: Reader, root: Path, install: EngineInstall) -> Engine:
    """An installed engine by the packages beside its program: running it would take seconds."""
    program = install.command[0]
    places = [program.strip("/")] if program.startswith("/") else [f"{folder}/{program}" for folder in _PLACES]
    found = next((place for place in places if reader.raw(root / place, 4)), None)
    engine = Engine(install.kind.value, tuple(install.command), "" if found else f"{program} is not there")
    if found is None:
        return engine
    lib = root / found.rpartition("/")[0].rpartition("/")[0] / "lib"
    versions: dict[str, str] = {}
    cuda = ""
    for python in (name for name in reader.names(lib) if name.startswith("python3")):
        packages = lib / python / "site-packages"
        for name in reader.names(packages):
            if dist := _DIST.fullmatch(name):
                versions[re.sub(r"_cu\d+$", "", dist[1])] = dist[2]
        said = _CUDA_LINE.search(reader.text(packages / "torch/version.py") or "")
        cuda = cuda or (said[1] if said else "")
    if tag := _CUDA_TAG.search(versions.get("torch", "")):
        cuda = f"{tag[1]}.{tag[2]}"
    return Engine(
        engine.kind, engine.command, "", versions.get(install.kind.value, ""), cuda, versions.get("nvidia_nccl", "")
    )


async def _reach(g: Gathered) -> tuple[Reach, ...]:
    if g.asker.agent is None:
        return ()
    if g.asker.dial is None:
        raise Missing("nothing is dialled when a folder is read")
    made: dict[str, Reach] = {}

    async def try_one(host: str, port: int, name: str) -> None:
        assert g.asker.dial is not None
        made[name] = Reach(name, await g.asker.dial(host, port))

    async with trio.open_nursery() as nursery:
        for plane in g.asker.agent.control_planes:
            nursery.start_soon(try_one, plane.host, plane.port, str(plane))
    return tuple(made[str(plane)] for plane in g.asker.agent.control_planes)
