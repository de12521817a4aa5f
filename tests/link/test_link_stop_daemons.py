"""SIGTERM to the real daemons, whatever state their links are in: each is gone within a second."""

from __future__ import annotations

import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from fakes.proxy import Proxy
from llmgw.cli.demo_files import NODE, DemoEngine, Engine, prepare
from llmgw.cli.demo_run import survivors
from llmgw.link.client import connect
from llmgw.link.codec import encode
from llmgw.link.messages import Heartbeat, NotUnderstood, Register, Welcome
from llmgw.link.patience import LinkLimits
from llmgw.link.protocol import LinkProtocol, Role
from llmgw.link.server import serve
from llmgw.link.session import PeerGone, Session
from llmgw.link.tls import client_context, handshake, server_context
from llmgw.settings.daemon import Address, LinkListener, TlsFiles
from tests.link.samples import TRUST_DOMAIN, WELCOME, Pki, register

pytestmark = pytest.mark.e2e

WITHIN_S = 1.0


class Daemon:
    """A process of ours, and its log."""

    def __init__(self, kind: str, config: Path) -> None:
        self.log = config.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmgw", kind, "--config", str(config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    async def until_it_says(self, text: str, within_s: float = 20.0) -> None:
        with trio.fail_after(within_s):
            while text not in self.log.read_text():
                assert self.process.poll() is None, self.log.read_text()
                await trio.sleep(0.02)

    async def stopped(self) -> float:
        """SIGTERM; how long the end took, in seconds."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with trio.fail_after(10):
            await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
        took = time.monotonic() - began
        assert self.process.returncode == 0, self.log.read_text()
        assert '"stopped"' in self.log.read_text()
        return took


@asynccontextmanager
async def agent(folder: Path, pki: Pki, address: Address, node: str = "n1") -> AsyncIterator[Daemon]:
    tls = pki.node()
    config = folder / "agent.yaml"
    config.write_text(
        f"id: {node}\ncontrol_planes: ['localhost:{address.port}']\nstate_dir: {folder / 'state'}\n"
        f"trust_domain: {TRUST_DOMAIN}\ndiscovery: {{source: none}}\n"
        f"tls: {{certificate: {tls.certificate}, key: {tls.key}, ca: {tls.ca}}}\n"
    )
    daemon = Daemon("agent", config)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            os.killpg(daemon.process.pid, signal.SIGKILL)
            daemon.process.wait()


@asynccontextmanager
async def raw_listener(play: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[Address]:
    async def handle(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with stream:
                await play(stream)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        yield Address("127.0.0.1", listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


class ByHand:
    """A control plane played by hand: it reads messages, and gives windows back, only when the test says so."""

    def __init__(self, pki: Pki) -> None:
        self._context = server_context(pki.server)
        self.reached = trio.Event()

    async def open(self, transport: trio.SocketStream, limits: LinkLimits) -> None:
        self.stream = trio.SSLStream(transport, self._context, server_side=True)
        await handshake(self.stream, "agent", 5)
        self.protocol = LinkProtocol(Role.SERVER, trio.current_time(), limits)
        await self.flush()
        while not isinstance(self.protocol.take(), Register):
            await self.read()
        self.protocol.send(WELCOME, trio.current_time())
        await self.flush()

    async def read(self) -> None:
        self.protocol.receive(bytes(await self.stream.receive_some()), trio.current_time())
        await self.flush()

    async def flush(self) -> None:
        while data := self.protocol.data_to_send():
            await self.stream.send_all(data)


async def test_with_the_link_up(tmp_path: Path, pki: Pki) -> None:
    beats = trio.Event()

    async def handler(session: Session, _: Register) -> None:
        await session.send(Welcome(1, "0", "c", 1, 0.05))
        while True:
            if isinstance(await session.receive(), Heartbeat):
                beats.set()

    async with trio.open_nursery() as nursery:
        listener = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, listener, handler))
        async with agent(tmp_path, pki, address) as daemon:
            await beats.wait()
            assert await daemon.stopped() < WITHIN_S
        nursery.cancel_scope.cancel()


async def test_with_the_link_half_open(tmp_path: Path, pki: Pki) -> None:
    """Nothing of what the agent says arrives anywhere, and nothing comes: its goodbye must not wait for anybody."""
    up = trio.Event()

    async def handler(session: Session, _: Register) -> None:
        await session.send(Welcome(1, "0", "c", 1, 0.05))
        await session.receive()
        up.set()
        await session.receive()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listener = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, listener, handler))
        proxy: Proxy = await nursery.start(Proxy(address).run)
        async with agent(tmp_path, pki, proxy.address) as daemon:
            await up.wait()
            proxy.partition()
            await trio.sleep(0.3)
            assert await daemon.stopped() < WITHIN_S
        nursery.cancel_scope.cancel()


async def test_refused(tmp_path: Path, pki: Pki) -> None:
    async def handler(session: Session, _: Register) -> None:
        raise AssertionError("it must not get this far")

    async with trio.open_nursery() as nursery:
        listener = LinkListener(pki.server, Address("127.0.0.1", 0), trust_domain=TRUST_DOMAIN)
        (address,) = await nursery.start(partial(serve, listener, handler))
        async with agent(tmp_path, pki, address, node="n2") as daemon:
            await daemon.until_it_says("refused by the control plane")
            assert await daemon.stopped() < WITHIN_S
        nursery.cancel_scope.cancel()


async def test_in_the_tls_handshake(tmp_path: Path, pki: Pki) -> None:
    hello = trio.Event()

    async def silent(stream: trio.SocketStream) -> None:
        assert await stream.receive_some()
        hello.set()
        await trio.sleep_forever()

    async with raw_listener(silent) as address, agent(tmp_path, pki, address) as daemon:
        await hello.wait()
        assert await daemon.stopped() < WITHIN_S


async def test_in_backoff(tmp_path: Path, pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with agent(tmp_path, pki, Address("127.0.0.1", port)) as daemon:
        await daemon.until_it_says("cannot be reached")
        assert await daemon.stopped() < WITHIN_S


async def test_with_flow_control_windows_at_zero(tmp_path: Path, pki: Pki) -> None:
    """The agent waits to send, and so it has stopped reading: both directions stand still."""
    plane = ByHand(pki)

    async def play(transport: trio.SocketStream) -> None:
        await plane.open(transport, LinkLimits(window_bytes=65_535))
        unknown = Heartbeat(1)  # it is asked about something that it does not know, and answers each time
        while True:
            with trio.move_on_after(0.5) as waited:
                while plane.protocol.room:
                    plane.protocol.send(unknown, trio.current_time())
                await plane.flush()
                await plane.read()
            if waited.cancelled_caught and not plane.protocol.room:
                assert plane.protocol._h2.remote_flow_control_window(1) < 200
                plane.reached.set()
                await trio.sleep_forever()

    async with raw_listener(play) as address, agent(tmp_path, pki, address) as daemon:
        with trio.fail_after(20):
            await plane.reached.wait()
        assert await daemon.stopped() < WITHIN_S


async def test_in_the_middle_of_a_message_of_four_megabytes(tmp_path: Path, pki: Pki) -> None:
    plane = ByHand(pki)

    async def play(transport: trio.SocketStream) -> None:
        await plane.open(transport, LinkLimits())
        plane.protocol.send(NotUnderstood("x" * (4 * 1024 * 1024 - 50)), trio.current_time())
        while len(plane.protocol._pending) > 2 * 1024 * 1024:
            await plane.flush()
            await plane.read()
        plane.reached.set()
        await trio.sleep_forever()

    async with raw_listener(play) as address, agent(tmp_path, pki, address) as daemon:
        with trio.fail_after(20):
            await plane.reached.wait()
        assert await daemon.stopped() < WITHIN_S


async def test_a_session_that_sends_four_megabytes_to_somebody_who_stops_reading(pki: Pki) -> None:
    plane = ByHand(pki)

    async def play(transport: trio.SocketStream) -> None:
        await plane.open(transport, LinkLimits())
        for _ in range(20):
            await plane.read()
        plane.reached.set()
        await trio.sleep_forever()

    async with raw_listener(play) as address:
        with trio.CancelScope() as scope:
            async with connect(Address("localhost", address.port), pki.node(), TRUST_DOMAIN) as session:
                await session.send(register())
                await session.receive()
                await session.send(NotUnderstood("x" * (4 * 1024 * 1024 - 50)))
                await plane.reached.wait()
                began = time.monotonic()
                scope.cancel()
                await trio.sleep_forever()
        assert time.monotonic() - began < WITHIN_S


# The control plane


async def test_a_control_plane_with_all_of_these_at_once(tmp_path: Path) -> None:
    demo = prepare(tmp_path / "d", Engine(DemoEngine.FAKE), None)
    demo.server_yaml.write_text(demo.server_yaml.read_text().replace("format: text", "format: json"))
    certs = demo.folder / "certs" / NODE
    tls = TlsFiles(*(str(certs / name) for name in ("cert.pem", "key.pem", "ca.pem")))
    where = Address("127.0.0.1", demo.link_port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        server = Daemon("server", demo.server_yaml)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        await server.until_it_says('"ready"')
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] > 512, "an agent is a file"
        async with trio.open_nursery() as nursery:
            # Silent, and in the middle of the handshake.
            silent = await trio.open_tcp_stream(where.host, where.port)
            stuck = await trio.open_tcp_stream(where.host, where.port)
            context = client_context(tls)
            unused, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
            with pytest.raises(ssl.SSLWantReadError):
                context.wrap_bio(unused, hello, server_hostname=where.host).do_handshake()
            await stuck.send_all(hello.read()[:200])
            # Half-open: registered, then nothing comes through.
            proxy: Proxy = await nursery.start(Proxy(where).run)

            async def half_open(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                with suppress(PeerGone):
                    async with connect(proxy.address, tls, "demo.llmgw") as session:
                        await session.send(register(NODE))
                        assert isinstance(await session.receive(), Welcome)
                        proxy.partition()
                        task_status.started()
                        await trio.sleep_forever()

            await nursery.start(half_open)
            # Another one in the middle of a message of four megabytes, whose windows are shut besides.
            stream = trio.SSLStream(
                await trio.open_tcp_stream(where.host, where.port), context, server_hostname=where.host
            )
            await handshake(stream, "server", 5)
            protocol = LinkProtocol(Role.AGENT, 0, LinkLimits(window_bytes=65_535))
            await stream.send_all(protocol.data_to_send())
            while not protocol.opened:
                protocol.receive(bytes(await stream.receive_some()), 0)
            large = encode(NotUnderstood("x" * (4 * 1024 * 1024 - 50)))
            protocol._pending += large[: 200 * 1024]
            while data := protocol.data_to_send():
                await stream.send_all(data)
            await trio.sleep(0.2)
            took = await server.stopped()
            for each in (silent, stuck, stream):
                await trio.aclose_forcefully(each)
            nursery.cancel_scope.cancel()
        assert took < WITHIN_S
    finally:
        for pid, _ in survivors(demo.folder):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
