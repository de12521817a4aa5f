"""The body of one answer on its way to a client, in the framing that it comes in and in the one that it goes in."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from llmgw.router.chunks import ChunkDecoder
from llmgw.router.http1 import BadMessage, ResponseHead
from llmgw.router.relay import Relay
from llmgw.router.sockets import Peer, Ticker, Watch
from llmgw.router.usage import TAIL_BYTES
from llmgw.router.usage_filter import UsageFilter

_ENDED = "ended the connection within its answer"


class Cut(Exception):
    """An answer ended in its middle, for this ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Passage:
    """One body. ``put`` writes to the client what can be written at once, ``send`` all of what is left; ``more`` gives
    more of the answer, nothing at its end, and raises :class:`Cut` for an engine that was given up.

    ``chunks_out`` is whether the client knows chunks, ``between_chunks`` whether it got whole ones, so that another one
    can follow; ``passed`` are the bytes so far, and ``tail`` the end of them.
    """

    def __init__(
        self,
        put: Callable[[bytes], bytes | memoryview],
        send: Callable[[bytes | memoryview], Awaitable[None]],
        more: Callable[[], Awaitable[bytes]],
        events_filter: UsageFilter | None,
        *,
        chunks_out: bool,
    ) -> None:
        self._put = put
        self._send = send
        self._more = more
        self._filter = events_filter
        self._chunks_out = chunks_out
        self._passed = 0
        self._tail = b""
        self._relay: Relay | None = None
        self._whole_chunks = False

    @property
    def passed(self) -> int:
        """Bytes of the body that were passed on."""
        return self._passed if self._relay is None else self._relay.passed

    @property
    def tail(self) -> bytes:
        """The end of what came, for a chunked body that goes on as it is with its framing."""
        return self._tail if self._relay is None else self._relay.tail

    @property
    def heard(self) -> float | None:
        """When something came last, where nobody asks for ``more``."""
        return None if self._relay is None else self._relay.heard

    @property
    def between_chunks(self) -> bool:
        """Whether the client got whole chunks."""
        return self._whole_chunks if self._relay is None else self._relay.between_chunks

    def _count(self, part: bytes) -> None:
        self._passed += len(part)
        self._tail = (self._tail + part)[-TAIL_BYTES:]

    async def chunked(self, peer: Peer, watch: Watch, ticker: Ticker, head: bytes, data: bytes) -> bool:
        """A chunked body, as it is. Returns whether nothing came behind it.

        Raises :class:`BadMessage` as long as nothing was sent, and then :class:`Cut`.
        """
        relay = self._relay = Relay(peer, self._put, watch, ticker, self._filter)
        relay.take(data, head)
        try:
            while not relay.over:
                if relay.unsent:
                    unsent, relay.unsent = relay.unsent, b""
                    relay.heard = math.inf  # while the client takes it, the engine need not say anything
                    await self._send(unsent)
                    relay.heard = ticker.now
                if relay.ended:
                    return relay.exact
                await relay.wait()
        except BadMessage as bad:
            self._relay, self._passed, self._tail = None, relay.passed, relay.tail
            raise Cut(bad.reason) from bad
        raise Cut(_ENDED)

    async def sized(self, length: int, head: bytes, data: bytes) -> bool:
        """A body of so many bytes. Returns whether nothing came behind it. Raises :class:`Cut`."""
        left, send = length, head
        while True:
            exact = len(data) <= left
            data = data[:left]
            left -= len(data)
            self._count(data)
            if unsent := self._put(send + data if send else data):
                await self._send(unsent)
            send = b""
            if left == 0:
                return exact
            if not (data := await self._more()):
                raise Cut(_ENDED)

    async def rest(self, response: ResponseHead, lines: bytes, data: bytes) -> None:
        """A body that ends with the engine's connection, or a chunked one for a client that knows no chunks; ``lines``
        are more of its head. Raises :class:`Cut`."""
        decoder = ChunkDecoder() if response.chunked else None
        chunks_out = self._whole_chunks = self._chunks_out
        if chunks_out:
            lines = b"transfer-encoding: chunked\r\n" + lines
        elif b"connection: close\r\n" not in lines:
            lines = b"connection: close\r\n" + lines.replace(b"connection: keep-alive\r\n", b"")
        send = response.start_unframed + lines
        try:
            while True:
                part = data if decoder is None else decoder.feed(data)
                self._count(part)
                if self._filter is not None:
                    part = self._filter.content(part)
                if part or send:
                    framed = b"%x\r\n%b\r\n" % (len(part), part) if chunks_out and part else part
                    await self._send(send + framed)
                    send = b""
                finished = decoder is not None and decoder.finished
                if finished or not (data := await self._more()):
                    break
        except BadMessage as bad:
            raise Cut(bad.reason) from bad
        if decoder is not None and not decoder.finished:
            raise Cut("ended within its answer")
        held = b"" if self._filter is None else self._filter.rest()
        if chunks_out:
            await self._send((b"%x\r\n%b\r\n" % (len(held), held) if held else b"") + b"0\r\n\r\n")
        elif held:
            await self._send(held)
