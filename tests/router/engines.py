"""Engines of the router's tests: a script says, byte for byte, what each connection gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from attrs import define, field

Script = Callable[["Visit"], Awaitable[None]]


class Visit:
    """One connection to a scripted engine."""

    def __init__(self, stream: trio.SocketStream, engine: ScriptedEngine) -> None:
        self.stream = stream
        self.engine = engine
        self._buffer = b""

    async def request(self) -> tuple[bytes, bytes]:
        """The next request: head and body. Raises ``EOFError`` when the router is gone."""
        while b"\r\n\r\n" not in self._buffer:
            await self._more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        while len(self._buffer) < length:
            await self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        self.engine.requests.append((head, body))
        return head, body

    async def _more(self) -> None:
        data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError
        self._buffer += data

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def gone(self) -> None:
        """Wait until the router closes this connection."""
        try:
            while await self.stream.receive_some(65536):
                pass
        except trio.BrokenResourceError:
            pass
        self.engine.left.set()


@define(eq=False)
class ScriptedEngine:
    """A listening socket whose connections follow ``script``."""

    script: Script
    port: int = 0
    connections: int = 0
    requests: list[tuple[bytes, bytes]] = field(factory=list)
    left: trio.Event = field(factory=trio.Event)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._visit, [listener])

    async def _visit(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        try:
            await self.script(Visit(stream, self))
        except (EOFError, trio.BrokenResourceError):
            pass
        finally:
            await trio.aclose_forcefully(stream)


def whole(content: bytes = b'{"usage":{"prompt_tokens":2,"completion_tokens":1}}') -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: bytes) -> bytes:
    data = b"data: " + text + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answers(visit: Visit) -> None:
    """Answers everything, on a kept connection."""
    while True:
        await visit.request()
        await visit.send(whole())


async def dies_at_once(visit: Visit) -> None:
    """Takes the request and hangs up."""
    await visit.request()


async def dies_after_its_head(visit: Visit) -> None:
    """Sends a head and nothing behind it."""
    await visit.request()
    await visit.send(EVENTS)


async def dies_in_the_stream(visit: Visit) -> None:
    """Sends some of a stream."""
    await visit.request()
    await visit.send(EVENTS + event(b'{"n":1}') + event(b'{"n":2}'))


async def dies_in_a_chunk(visit: Visit) -> None:
    """Ends in the middle of a chunk."""
    await visit.request()
    await visit.send(EVENTS + event(b'{"n":1}') + b"ff\r\ndata: {")


async def says_nothing(visit: Visit) -> None:
    """Takes the request and never answers."""
    await visit.request()
    await visit.gone()


async def streams_for_ever(visit: Visit) -> None:
    """An endless stream, as fast as it is taken."""
    await visit.request()
    await visit.send(EVENTS)
    try:
        while True:
            await visit.send(event(b"x" * 1000))
            await trio.sleep(0)
    except trio.BrokenResourceError:
        visit.engine.left.set()


async def begins_a_stream(visit: Visit) -> None:
    """One event, and then silence."""
    await visit.request()
    await visit.send(EVENTS + event(b'{"n":1}'))
    await visit.gone()
