"""The chunked body of an answer on its way to a client.

What is the same for every piece is done where the kernel says that there is one, without waking a task. Whatever is not
- the end, a client that does not keep up, a failure - is left to the connection's task, which waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from llmgw.router.chunks import ChunkWalker, is_one_event
from llmgw.router.sockets import READ_BYTES, Peer, Ticker, Watch
from llmgw.router.steps import own_task
from llmgw.router.usage import TAIL_BYTES
from llmgw.router.usage_filter import UsageFilter

_PIECES_MOST = 16

_room = memoryview(bytearray(READ_BYTES))
"""What is read is read into this: pieces of streams are small, and one memory that is at hand is faster than many."""


class Relay:
    """One body. After each :meth:`take` and :meth:`wait`: ``unsent`` has to be sent before anything else, ``ended``
    says that the body is complete, and then ``exact`` that nothing came behind it; ``over`` that the engine ended the
    connection. ``passed`` are its bytes so far, ``heard`` is when the last ones came."""

    __slots__ = (
        "_aligned", "_failed", "_filter", "_peer", "_pieces", "_put", "_recv_into", "_task", "_ticker", "_walker",
        "_watch", "ended", "exact", "heard", "over", "passed", "unsent",
    )  # fmt: skip

    def __init__(
        self,
        peer: Peer,
        put: Callable[[bytes], bytes | memoryview],
        watch: Watch,
        ticker: Ticker,
        events_filter: UsageFilter | None,
    ) -> None:
        self._peer = peer
        self._recv_into = peer.sock.recv_into
        self._put = put
        self._watch = watch
        self._ticker = ticker
        self._filter = events_filter
        self._walker = ChunkWalker()
        self._pieces: list[bytes] = []
        self._task: trio.lowlevel.Task | None = None
        self._failed: Exception | None = None
        self._aligned = False  # nothing of a chunk or of an event is held or still to come
        self.unsent: bytes | memoryview = b""
        self.ended = self.exact = self.over = False
        self.passed = 0
        self.heard = ticker.now

    @property
    def tail(self) -> bytes:
        """The end of what came, framing included."""
        return b"".join(self._pieces)[-TAIL_BYTES:]

    @property
    def between_chunks(self) -> bool:
        """Whether the client got whole chunks, so that another one can follow."""
        return self._walker.between_chunks or (self._filter is not None and not self._filter.through)

    def take(self, data: bytes, head: bytes = b"") -> None:
        """Pass a piece on, behind the answer's ``head`` if it is the first one. Raises :class:`BadMessage`, and
        ``OSError`` for the client."""
        walker = self._walker
        end = walker.feed(data)
        if end >= 0:
            self.ended, self.exact = True, end == len(data)
            data = data[:end]
        self.passed += len(data)
        if len(data) >= TAIL_BYTES:
            self._pieces = [data[-TAIL_BYTES:]]
        else:
            self._pieces.append(data)
            if len(self._pieces) > _PIECES_MOST:
                self._pieces = [self.tail]
        self._aligned = walker.boundary == len(data) and not self.ended
        if self._filter is not None:
            data = self._filter.chunks(data, walker.boundary, events=walker.events, finished=self.ended)
            self._aligned = self._aligned and self._filter.holds_nothing
        if head:
            data = head + data
        if data:
            # The last of it is for the task: a client that has it all must find its request counted and settled.
            self.unsent = data if self.ended else self._put(data)

    async def wait(self) -> None:
        """Pass on what comes until there is something else to do. Raises what :meth:`take` does."""
        if self._peer.steps is not None:
            await own_task()
        self._task = trio.lowlevel.current_task()
        self._watch.relay(self._peer.sock, self._ready)
        try:
            await trio.lowlevel.wait_task_rescheduled(self._cancelled)
        finally:
            self._watch.rest(self._peer.sock)
        if self._failed is not None:
            raise self._failed

    def _cancelled(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._watch.rest(self._peer.sock)
        return trio.lowlevel.Abort.SUCCEEDED

    def _ready(self) -> None:
        """There is something to read. Nothing is raised here: it would end the watch that all connections share."""
        try:
            data = _room[: self._recv_into(_room)].tobytes()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if data:
                self.heard = self._ticker.now
                if self._aligned and is_one_event(data) and (self._filter is None or data.find(b'"usage"') < 0):
                    # As a stream's pieces are when they come one by one; nothing that is remembered changes by it.
                    self.passed += len(data)
                    self._pieces.append(data)
                    if len(self._pieces) > _PIECES_MOST:
                        self._pieces = [self.tail]
                    self.unsent = self._put(data)
                else:
                    self.take(data)
                if not (self.unsent or self.ended):
                    return
            else:
                self.over = True
        except Exception as failed:  # noqa: BLE001
            self._failed = failed
        assert self._task is not None
        self._watch.rest(self._peer.sock)
        trio.lowlevel.reschedule(self._task)
