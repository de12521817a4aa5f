"""Real shims and fake engines: started, watched, stopped; and the helpers of the other tests of agents."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attrs import evolve

from llmgw.agent import logs, process, records
from llmgw.agent.shards import Shards
from llmgw.agent.supervisor import Supervisor
from llmgw.cli.demo_files import fakes_dir, free_ports
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device, Host, Inventory, MigInstance
from llmgw.link.messages import StartShard
from llmgw.scheduler.state import Exit, ShardReport, ShardState
from llmgw.settings.catalog import EngineKind, Limits, Profile
from llmgw.settings.daemon import Address, AgentConfig, EngineInstall, TlsFiles

DEVICES = tuple(Device(n, f"GPU-{n}", "x", "h100-80g", 81559, 1) for n in range(4))
INVENTORY = Inventory(Host("h", "b"), "nvidia-smi", DEVICES)
S = ShardState
SLEEPER = ("/bin/sh", "-c", "exec sleep 3600")
"""An engine that is up within milliseconds, and serves nothing."""


def config(folder: Path, command: tuple[str, ...] | None = None) -> AgentConfig:
    (first,) = free_ports(1)
    first = min(first, 65500)
    return AgentConfig(
        id="n1",
        control_planes=(Address("127.0.0.1", 1),),
        tls=TlsFiles("c", "k", "ca"),
        state_dir=str(folder),
        port_first=first,
        port_last=first + 30,
        engines=(EngineInstall(EngineKind.VLLM, command or (sys.executable, str(fakes_dir() / "engine.py"), "serve")),),
    )


def written(settings: AgentConfig, path: Path) -> Path:
    """An ``agent.yaml`` that says this, as far as these tests set it."""
    said = {
        "id": settings.id,
        "control_planes": [str(address) for address in settings.control_planes],
        "trust_domain": settings.trust_domain,
        "tls": attrs.asdict(settings.tls),
        "state_dir": settings.state_dir,
        "ports": f"{settings.port_first}-{settings.port_last}",
        "discovery": {
            "source": settings.discovery.source.value,
            "root": settings.discovery.root,
            "interval_s": settings.discovery.interval_s,
        },
        "engines": {engine.kind.value: list(engine.command) for engine in settings.engines},
    }
    path.write_text(json.dumps(said))
    return path


def start(name: str = "m-1.0", generation: int = 1, devices: tuple[int, ...] = (0,), **engine: Any) -> StartShard:
    profile = Profile(
        "p", EngineKind.VLLM, "/w", ("h100-80g",), gpus=len(devices), tp=len(devices),
        env={"FAKE_ENGINE": json.dumps(engine)}, limits=Limits(start_s=20, load_s=20, drain_s=2, stop_s=1),
    )  # fmt: skip
    return StartShard(f"{name}#{generation}", 1, "c1", name[:-2], name, generation, 0, "m", profile, "d", devices)


class Node:
    """The shards of one agent, with everything that they reported."""

    def __init__(self, settings: AgentConfig, **more: Any) -> None:
        self.said: list[ShardReport] = []
        self.shards = Shards(settings, self.said.append, time.time, **more)

    def states(self, shard: str = "m-1.0") -> list[ShardState]:
        seen = [r.state for r in self.said if r.shard == shard]
        return [s for at, s in enumerate(seen) if at == 0 or seen[at - 1] is not s]

    def get(self, shard: str = "m-1.0", generation: int = 1) -> Supervisor:
        found = self.shards.find(shard, generation)
        assert found is not None
        return found

    async def until(self, state: ShardState, shard: str = "m-1.0", generation: int = 1) -> ShardReport:
        with trio.fail_after(15):
            while self.get(shard, generation).shard.state is not state:
                assert not self.get(shard, generation).shard.state.ended, self.get(shard, generation).shard
                await trio.sleep(0.01)
        return self.get(shard, generation).report()

    async def until_ended(self, shard: str = "m-1.0", generation: int = 1) -> ShardReport:
        with trio.fail_after(15):
            await self.get(shard, generation).done.wait()
        return self.get(shard, generation).report()


@asynccontextmanager
async def running(settings: AgentConfig, **more: Any) -> AsyncIterator[Node]:
    """An agent's shards; leaving the block is what a stopping agent does."""
    node = Node(settings, **more)
    async with trio.open_nursery() as nursery:
        await nursery.start(node.shards.run)
        yield node
        nursery.cancel_scope.cancel(reason="the agent stops")


def alive(pid: int | None) -> bool:
    return pid is not None and process.start_time(pid) is not None


def marked(folder: Path) -> list[int]:
    """Every process whose command line names this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in line and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def processes(place: Path) -> set[int]:
    """Shims and engines of this state folder that live: told by where they work, or by what they were told."""
    found = set(marked(place))
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(place) and alive(int(entry.name)):
                found.add(int(entry.name))
    return found


def shim_of(folder: Path) -> int:
    pids = records.pids(folder / "shards/m-1.0-g1")
    assert pids is not None
    return pids.shim


def soon(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def until(seen: Callable[[], Any], seconds: float = 15.0) -> None:
    with trio.fail_after(seconds):
        while not seen():
            await trio.sleep(0.01)


async def test_a_life(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(start_s=0.3, load_s=0.5), INVENTORY)
        ready = await node.until(S.READY)
        assert node.states() == [S.STARTING, S.LOADING, S.READY]
        assert ready.endpoint is not None
        assert ready.api_key is not None
        assert alive(ready.pid)
        record = folder / "shards/m-1.0-g1/record.json"
        assert record.stat().st_mode & 0o777 == 0o600
        environment = Path(f"/proc/{ready.pid}/environ").read_bytes()
        assert f"VLLM_API_KEY={ready.api_key}".encode() in environment
        assert b"CUDA_VISIBLE_DEVICES=GPU-0\0" in environment
        assert ready.api_key.encode() not in Path(f"/proc/{ready.pid}/cmdline").read_bytes()
        node.get().drain("scaled down")
        node.get().stop("not wanted", 1.0)
        stopped = await node.until(S.STOPPED)
        assert (stopped.reason, stopped.exit.code if stopped.exit else None) == ("not wanted; exit code 0", 0)
        assert not alive(ready.pid)
        assert marked(folder) == []
        await node.shards.forget("m-1.0", 1)
        assert list((folder / "shards").iterdir()) == []
        assert node.shards.reports() == ()


async def test_a_crash_is_reported_with_how_it_ended_and_its_last_lines(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(load_s=0.2, crash="load", exit_code=7), INVENTORY)
        failed = await node.until(S.FAILED)
        assert failed.exit is not None
        assert failed.exit.code == 7
        assert "without being asked" in failed.reason
        assert "told to crash at load" in failed.log_tail[-1]
        assert failed.pid is None


async def test_exit_0_unasked_and_sigkill_are_failures(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(crash="start", exit_code=0), INVENTORY)
        assert "exit code 0" in (await node.until(S.FAILED)).reason
        await node.shards.start(start("m-2.0"), INVENTORY)
        ready = await node.until(S.READY, "m-2.0")
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        assert "killed by signal 9" in (await node.until(S.FAILED, "m-2.0")).reason


async def test_a_command_that_is_not_there(folder: Path) -> None:
    async with running(config(folder, ("/nothing/vllm",))) as node:
        await node.shards.start(start(), INVENTORY)
        failed = await node.until(S.FAILED)
        assert failed.reason == "/nothing/vllm cannot be started: No such file or directory"
        assert failed.remedy.startswith("correct the engine's command in agent.yaml")
    async with running(config(folder)) as node:
        assert node.get().report().remedy == failed.remedy, "for the next agent as well"


async def test_an_engine_that_ignores_sigterm_is_killed_after_its_grace(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(ignore_sigterm=True), INVENTORY)
        pid = (await node.until(S.READY)).pid
        began = trio.current_time()
        node.get().stop("x", 0.5)
        await node.until(S.STOPPED)
        assert 0.5 <= trio.current_time() - began < 4
        assert not alive(pid)


async def test_a_shim_that_somebody_has_stopped_is_woken_to_end_its_engine(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        pid = (await node.until(S.READY)).pid
        os.kill(shim_of(folder), signal.SIGSTOP)
        node.get().stop("enough", 60)
        assert ((await node.until_ended()).exit, alive(pid)) == (Exit(0), False)


@pytest.mark.parametrize("how", ["workers", "escaped_worker"])
async def test_workers_end_with_their_engine(folder: Path, how: str) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(**{how: 1}), INVENTORY)
        pid = (await node.until(S.READY)).pid
        assert pid is not None
        worker = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        began = trio.current_time()
        os.kill(pid, signal.SIGKILL)
        await node.until(S.FAILED)
        assert not alive(worker), "a worker that outlives its engine holds the GPU"
        assert trio.current_time() - began < 2, "it is asked to end at once, and killed only if it does not"


async def test_an_engine_whose_first_process_is_gone_is_said_so_before_its_workers_are(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(daemon=True), INVENTORY)
        ready = await node.until(S.READY)
        assert ready.pid is not None
        with trio.fail_after(5):
            while records.read(node.get().folder).state is not S.READY:
                await trio.sleep(0.01)
        os.kill(ready.pid, signal.SIGKILL)
        going = await node.until(S.STOPPING)
        assert going.reason == "the engine ended without being asked while ready"
        assert going.endpoint is None
        await trio.sleep(0.2)
        told = records.read(node.get().folder).state
        assert told is not S.STOPPING, "who reads that takes the end for one that was asked for"
        failed = await node.until_ended()
        assert (failed.state, failed.exit) == (S.FAILED, Exit(signal=9))
        assert "killed by signal 9" in failed.reason


HOARDER = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = SharedMemory(create=True, size=4096)
print("holds", held.name, flush=True)
time.sleep(86400)
"""


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_shared_memory_goes_with_its_engine(folder: Path, how: str) -> None:
    """Python's resource tracker removes what a killed process left, if it is let."""
    script = folder.parent / "hoarder.py"
    script.write_text(HOARDER)
    async with running(config(folder, (sys.executable, str(script)))) as node:
        await node.shards.start(start(), INVENTORY)
        said = folder / "shards/m-1.0-g1/engine.log"
        with trio.fail_after(10):
            while not (words := said.read_text().split() if said.exists() else []):
                await trio.sleep(0.01)
        held = Path("/dev/shm") / words[1]
        assert held.exists()
        if how == "stopped":
            node.get().stop("x", 0.1)
            await node.until(S.STOPPED)
        else:
            pid = node.get().report().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await node.until(S.FAILED)
        assert not held.exists()


async def test_a_launch_that_is_under_way_is_not_cut_off(folder: Path) -> None:
    """Its session may end at any moment: cut off in the middle, nobody would know whether there is an engine."""
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("enough", 1)
        await node.until_ended()
    place = folder / "shards/m-1.0-g1"
    for name in ("shim.json", "exit.json"):
        (place / name).unlink()
    env = {**os.environ, "LLMGW_LAUNCH": records.read(place).launch}
    with trio.CancelScope() as session:
        session.cancel()
        await process.spawn(place, ("/bin/sh", "-c", "exec sleep 3600"), env)
    pids = records.pids(place)
    assert pids is not None
    assert alive(pids.engine)


async def test_what_cannot_be_started_says_why(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        for command, said in (
            (start("m-2.0"), "gpu-0: is held by shard m-1.0"),
            (start("m-2.0", devices=(9,)), "device 9: is not on n1"),
            (evolve(start("m-2.0", devices=(1,)), profile=Profile("p", EngineKind.SGLANG, "/w", ("h100-80g",))),
             "engine sglang: is not installed on n1"),
            (evolve(start("m-2.0", devices=(1,)), profile=Profile("p", EngineKind.VLLM, "/w", ("l4-22g",))),
             "gpu-1 is h100-80g, the profile wants l4-22g"),
            (start("../x.0", devices=(1,)), "is not a shard's name"),
        ):  # fmt: skip
            with pytest.raises(OperatorError, match=said.replace("(", r"\(")):
                await node.shards.start(command, INVENTORY)
        assert len(node.shards.reports()) == 1
        with pytest.raises(OperatorError, match="stop it first"):
            await node.shards.forget("m-1.0", 1)
        await node.until(S.READY)


PARENT = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def end(*_):
    time.sleep(0.2)
    print("child", "ended" if child.poll() is not None else "lives", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(("version", "said"), [("0.32.0", "child lives"), ("0.16.0", "child ended")])
async def test_an_engine_that_ends_in_order_is_asked_by_its_first_process(
    folder: Path, version: str, said: str
) -> None:
    install = EngineInstall(EngineKind.VLLM, (sys.executable, "-c", PARENT), version)
    async with running(evolve(config(folder), engines=(install,))) as node:
        await node.shards.start(start(), INVENTORY)
        log = folder / "shards/m-1.0-g1/engine.log"
        with trio.fail_after(10):
            while not (log.exists() and log.read_text()):
                await trio.sleep(0.01)
        node.get().stop("x", 5.0)
        stopped = await node.until(S.STOPPED)
        assert log.read_text().split("\n")[1] == said
        assert stopped.exit is not None
        assert stopped.exit.code == 0
    assert soon(lambda: marked(folder) == [])


HOLDER = "import os, time; print(oct(os.stat('sglang.yaml').st_mode), flush=True); time.sleep(60)"


async def test_what_an_engine_reads_is_written_into_its_folder_for_it_alone(folder: Path) -> None:
    install = EngineInstall(EngineKind.SGLANG, (sys.executable, "-c", HOLDER), "0.5.23")
    async with running(evolve(config(folder), engines=(install,))) as node:
        command = start()
        await node.shards.start(evolve(command, profile=evolve(command.profile, engine=EngineKind.SGLANG)), INVENTORY)
        report, place = node.get().report(), folder / "shards/m-1.0-g1"
        key = node.get().record.api_key
        assert key is not None
        assert (place / "sglang.yaml").read_text() == f'api-key: "{key}"\n'
        assert key.encode() not in Path(f"/proc/{report.pid}/cmdline").read_bytes()
        with trio.fail_after(10):
            while not (place / "engine.log").exists() or not (place / "engine.log").read_text():
                await trio.sleep(0.01)
        assert (place / "engine.log").read_text() == "0o100600\n"
        node.get().stop("x", 0.1)
        await node.until(S.STOPPED)
        await node.shards.forget("m-1.0", 1)
        assert not list(folder.rglob("sglang.yaml"))


async def test_two_engines_never_share_a_memory(folder: Path) -> None:
    name = "h100-80g-mig-1c.3g.40gb"
    both = tuple(
        Device(1000 + n, f"MIG-{n}", "x", name, 40448, 1, mig=MigInstance(0, n, "1c.3g.40gb", 1, n)) for n in range(2)
    )
    inventory = evolve(INVENTORY, devices=both)

    def on(shard: str, number: int) -> StartShard:
        command = start(shard, devices=(number,))
        return evolve(command, profile=evolve(command.profile, device_class=(name,)))

    async with running(config(folder)) as node:
        await node.shards.start(on("m-1.0", 1000), inventory)
        with pytest.raises(
            OperatorError, match=r"gpu-0/mig1: shares its memory with gpu-0/mig0, which shard m-1.0 has"
        ):
            await node.shards.start(on("m-2.0", 1001), inventory)


async def test_a_start_that_is_cancelled_before_its_record_leaves_nothing(folder: Path) -> None:
    """The session may end just then: a shard that nobody watches would be `starting` for ever."""
    async with running(config(folder)) as node:
        with trio.CancelScope() as session:
            session.cancel()
            await node.shards.start(start(), INVENTORY)
        assert session.cancelled_caught
        assert node.shards.reports() == ()
        await node.shards.start(start(), INVENTORY)
        await node.until(S.READY)
        node.get().stop("over", 1)
        await node.until_ended()


async def test_two_shards_have_two_ports(folder: Path) -> None:
    async with running(config(folder)) as node:
        await node.shards.start(start(), INVENTORY)
        await node.shards.start(start("m-2.0", devices=(1, 2)), INVENTORY)
        ports = {(await node.until(S.READY, name)).endpoint for name in ("m-1.0", "m-2.0")}
        assert len(ports) == 2


async def test_the_log_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 256 * 1024)
    async with running(config(folder)) as node:
        await node.shards.start(start(log_mib=8), INVENTORY)
        await node.until(S.READY)
        place = folder / "shards/m-1.0-g1"
        with trio.fail_after(10):
            while not (place / "engine.log.1").exists() or (place / "engine.log").stat().st_size > 512 * 1024:
                await trio.sleep(0.05)
        assert logs.tail(place), "what is left is still readable"
        assert b"\0" not in (place / "engine.log").read_bytes()


async def test_the_device_that_is_meant_is_told_by_its_uuid(folder: Path) -> None:
    async with running(config(folder)) as node:
        # Meanwhile the node numbered its devices anew: what was 0 is 1 now.
        renumbered = evolve(INVENTORY, devices=tuple(evolve(d, number=d.number + 1) for d in DEVICES))
        await node.shards.start(evolve(start(load_s=0.1), uuids=("GPU-0",)), renumbered)
        ready = await node.until(S.READY)
        assert (ready.devices, ready.uuids) == ((1,), ("GPU-0",))
        assert b"CUDA_VISIBLE_DEVICES=GPU-0\0" in Path(f"/proc/{ready.pid}/environ").read_bytes()
        with pytest.raises(OperatorError, match="is held by shard m-1"):
            await node.shards.start(evolve(start("x-1.0", devices=(5,)), uuids=("GPU-0",)), renumbered)
        with pytest.raises(OperatorError, match="GPU-9"):
            await node.shards.start(evolve(start("x-1.0"), uuids=("GPU-9",)), renumbered)


async def test_a_failure_that_is_known_is_told_with_its_cause_and_remedy(folder: Path) -> None:
    said = "ValueError: Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    program = f"import sys; print({said!r}); [print('line', n) for n in range(100)]; sys.exit(1)"
    async with running(config(folder, (sys.executable, "-c", program))) as node:
        await node.shards.start(start(), INVENTORY)
        failed = await node.until(S.FAILED)
        assert failed.reason.startswith("the model's 4 attention heads cannot be divided by tp 3; the engine ended")
        assert (failed.remedy, failed.final) == ("choose a tp that divides 4", True)
        assert failed.log_tail[-1] == "line 99", "the cause stands above what is told of the log"
        assert len(failed.log_tail) == 30
    async with running(config(folder)) as node:
        (again,) = node.shards.reports()
        assert (again.remedy, again.final) == ("choose a tp that divides 4", True)
        assert again.reason.startswith("the model's 4 attention heads")


async def test_an_engine_that_hangs_while_it_answers_is_ended_and_said(folder: Path) -> None:
    async with running(config(folder)) as node:
        command = start(load_s=0.1, hang=True)
        command = evolve(command, profile=evolve(command.profile, limits=evolve(command.profile.limits, hang_s=0.5)))
        await node.shards.start(command, INVENTORY)
        ready = await node.until(S.READY)
        assert ready.endpoint is not None
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}).encode()
        host, port = ready.endpoint.removeprefix("http://").split(":")
        async with await trio.open_tcp_stream(host, int(port)) as client:
            await client.send_all(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ready.api_key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            failed = await node.until(S.FAILED)
        assert failed.reason.startswith("hung: 1 request runs and no token came for ")
        assert S.STOPPING in node.states()


@pytest.mark.parametrize("how", ["the clock is set", "the agent stood still"])
async def test_time_that_nobody_watched_ends_no_engine(folder: Path, how: str) -> None:
    """The network's time came after a boot, or the machine slept; or the agent was stopped for a while."""
    ahead, still = 0.0, how == "the agent stood still"
    shards = Shards(
        config(folder),
        lambda _: None,
        lambda: time.time() + ahead,
        steady=lambda: time.monotonic() + (ahead if still else 0.0),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(shards.run)
        await shards.start(start(start_s=3600), INVENTORY)
        known = shards.find("m-1.0", 1)
        assert isinstance(known, Supervisor)
        deadline = known.shard.deadline
        assert deadline is not None
        for ahead in (100_000.0, 300_000.0) if still else (100_000.0, -100_000.0):
            await until(lambda by=ahead: abs((known.shard.deadline or 0.0) - deadline - by) < 5)
            await trio.sleep(0.3)  # so long until the next look at its deadline
            assert known.shard.state is S.STARTING, known.shard
        known.stop("enough", 1)
        await known.done.wait()
        nursery.cancel_scope.cancel()
