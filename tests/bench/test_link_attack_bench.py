"""What other agents notice while one peer attacks. ``pytest -m bench -s tests/bench/test_link_attack_bench.py``.

One control plane's link in a process of its own, one agent that measures how long a heartbeat takes to be answered, and
an attacker in a third process of the lowest priority, as if it were on another machine.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from hyperframe.frame import DataFrame, PingFrame, SettingsFrame

from llmgw.link.client import connect
from llmgw.link.codec import encode
from llmgw.link.messages import Heartbeat, HeartbeatSeen, NotUnderstood, Register, Welcome
from llmgw.link.patience import LinkLimits
from llmgw.link.protocol import LinkProtocol, Role
from llmgw.link.server import serve
from llmgw.link.session import PeerGone, Session
from llmgw.link.tls import client_context
from llmgw.settings.daemon import Address, LinkListener, Log, LogLevel, TlsFiles
from llmgw.telemetry.collector import spare_what_is_loaded
from llmgw.telemetry.logging import configure
from tests.link.samples import TRUST_DOMAIN, WELCOME, make_pki, register

pytestmark = pytest.mark.bench

SECONDS = 4.0


async def answer(session: Session, _: Register) -> None:
    await session.send(WELCOME)
    while True:
        if isinstance(message := await session.receive(), Heartbeat):
            session.offer(HeartbeatSeen(message.sequence))


async def control_plane(folder: Path) -> None:
    tls = TlsFiles(*(str(folder / "server" / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(
            partial(serve, LinkListener(tls, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN), answer)
        )
        print(address.port, flush=True)


# Attacks: each goes on for ever against one port, connecting again when it is hung up on.


async def by_hand(port: int, tls: TlsFiles) -> tuple[trio.SSLStream[trio.SocketStream], LinkProtocol]:
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", port), client_context(tls), server_hostname="127.0.0.1"
    )
    await stream.do_handshake()
    protocol = LinkProtocol(Role.AGENT, 0, LinkLimits(window_bytes=2**20))
    await stream.send_all(protocol.data_to_send())
    while not protocol.opened:
        protocol.receive(bytes(await stream.receive_some()), 0)
    protocol.send(register("n2"), 0)
    await stream.send_all(protocol.data_to_send())
    return stream, protocol


async def frames(port: int, tls: TlsFiles, frame: bytes) -> None:
    stream, _ = await by_hand(port, tls)
    while True:
        await stream.send_all(frame * (16_384 // len(frame)))


async def messages(port: int, tls: TlsFiles, payload: bytes) -> None:
    stream, protocol = await by_hand(port, tls)
    while True:
        protocol._pending += payload
        while data := protocol.data_to_send():
            await stream.send_all(data)
        while not protocol.finished:
            protocol.receive(bytes(await stream.receive_some()), 0)
            while data := protocol.data_to_send():
                await stream.send_all(data)


async def connects(port: int, tls: TlsFiles) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    with trio.move_on_after(0.2):
        await stream.send_all(os.urandom(300))
        await stream.receive_some()
    await trio.aclose_forcefully(stream)


async def handshakes(port: int, tls: TlsFiles) -> None:
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", port), client_context(tls), server_hostname="127.0.0.1"
    )
    await stream.do_handshake()
    await trio.aclose_forcefully(stream)


LIST = b'{"type":"heartbeat","sequence":1,"loads":[' + b",".join([b"7"] * 24_000) + b"]}"
LARGE = b'{"type":"x","a":[' + b",".join([b"[1]"] * 12_000) + b"]}"

ATTACKS: dict[str, tuple[Callable[..., Awaitable[None]], int]] = {
    "PING flood": (partial(frames, frame=PingFrame(0, opaque_data=b"12345678").serialize()), 1),
    "SETTINGS flood": (partial(frames, frame=SettingsFrame(0, settings={4: 65_535}).serialize()), 1),
    "empty DATA": (partial(frames, frame=DataFrame(1, data=b"").serialize()), 1),
    "heartbeats without end": (partial(messages, payload=encode(Heartbeat(1)) * 500), 1),
    "messages of 4 MB": (partial(messages, payload=encode(NotUnderstood("x" * 4_000_000))), 1),
    "messages of many parts": (partial(messages, payload=len(LARGE).to_bytes(4, "big") + LARGE), 1),
    "messages of many faults": (partial(messages, payload=len(LIST).to_bytes(4, "big") + LIST), 1),
    "connections that are no TLS": (connects, 20),
    "handshakes": (handshakes, 8),
}


async def attack(name: str, folder: Path, port: int) -> None:
    tls = TlsFiles(*(str(folder / "attacker" / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    once, at_once = ATTACKS[name]

    async def again() -> None:
        while True:
            try:
                await once(port, tls)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(again)


async def measured(port: int, tls: TlsFiles) -> list[float]:
    """How long heartbeats take to be answered, in milliseconds."""
    took: list[float] = []
    async with connect(Address("127.0.0.1", port), tls, TRUST_DOMAIN) as session:
        await session.send(register("n1"))
        assert isinstance(await session.receive(), Welcome)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            began = time.perf_counter()
            await session.send(Heartbeat(len(took)))
            assert await session.receive() == HeartbeatSeen(len(took))
            took.append((time.perf_counter() - began) * 1000)
            await trio.sleep(0.003)
    return sorted(took)


def shown(took: list[float]) -> str:
    return f"p50 {statistics.median(took):7.2f} ms   p99 {took[int(len(took) * 0.99)]:7.2f} ms   n={len(took)}"


def program(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.test_link_attack_bench", *words]


async def test_others_under_attack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pki = make_pki(tmp_path)
    tls = pki.node("n1")
    attacker = Path(pki.node("n2").certificate).parent
    attacker.rename(tmp_path / "attacker")
    rows = [f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"]
    server = subprocess.Popen(program("serve", str(tmp_path)), stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        with server.stdout as said:
            port = int(said.readline())
            quiet = await measured(port, tls)
            rows.append(f"{'quiet':>28}: {shown(quiet)}")
            for name in ATTACKS:
                enemy = subprocess.Popen(
                    program("attack", str(tmp_path), str(port), name), preexec_fn=lambda: os.nice(19)
                )
                try:
                    await trio.sleep(1.0)
                    took = await measured(port, tls)
                finally:
                    enemy.send_signal(signal.SIGKILL)
                    enemy.wait()
                times = statistics.median(took) / statistics.median(quiet)
                rows.append(f"{name:>28}: {shown(took)}   {times:4.1f} times")
                await trio.sleep(0.3)
            again = await measured(port, tls)
            rows.append(f"{'quiet again':>28}: {shown(again)}")
    except PeerGone as gone:
        rows.append(str(gone))
        raise
    finally:
        server.kill()
        server.wait()
        with capsys.disabled():
            print("\n" + "\n".join(rows))


if __name__ == "__main__":
    configure(Log(level=LogLevel.ERROR), "bench")  # nobody reads the pipe
    if sys.argv[1] == "serve":
        spare_what_is_loaded()
        trio.run(control_plane, Path(sys.argv[2]))
    else:
        trio.run(attack, sys.argv[4], Path(sys.argv[2]), int(sys.argv[3]))
