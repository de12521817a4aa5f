"""Clients that never pause: each keeps its connection, opens another when it is told to, and counts what went wrong."""

from __future__ import annotations

import json
import ssl
from collections import Counter

import trio

BODY = json.dumps({"model": "m", "messages": []}).encode()


def chat(fields: bytes = b"", body: bytes = BODY) -> bytes:
    """A request with these fields in its head."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gw\r\n%bcontent-length: %d\r\n\r\n" % (fields, len(body))
    return head + body


REQUEST = chat()


class Load:
    """So many clients at a port; ``answered`` counts good answers, ``failed`` what else happened."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, pause_s: float = 0.002) -> None:
        self.port = port
        self.tls = tls
        self.pause_s = pause_s
        self.request = REQUEST
        self.answered = 0
        self.failed: Counter[str] = Counter()
        self._stop = False
        self._clients = 0

    async def stop(self) -> None:
        """Let every client finish what it is at."""
        self._stop = True
        with trio.fail_after(10):
            while self._clients:
                await trio.sleep(0.01)

    async def client(self) -> None:
        self._clients += 1
        try:
            await self._connections()
        finally:
            self._clients -= 1

    async def _connections(self) -> None:
        while not self._stop:
            try:
                stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", self.port)
                if self.tls is not None:
                    stream = trio.SSLStream(stream, self.tls, server_hostname="localhost", https_compatible=True)
                await self._requests(stream)
            except (OSError, trio.BrokenResourceError) as failed:
                self.failed[repr(failed)] += 1
                await trio.sleep(0.05)

    async def _requests(self, stream: trio.abc.Stream) -> None:
        async with stream:
            while not self._stop:
                await stream.send_all(self.request)
                data = b""
                while b"\r\n\r\n" not in data or not _whole(data):
                    more = await stream.receive_some(65536)
                    if not more:
                        self.failed[f"ended within an answer: {data[:200]!r}"] += 1
                        return
                    data += more
                if data.startswith(b"HTTP/1.1 200 "):
                    self.answered += 1
                else:
                    self.failed[repr(data[:200])] += 1
                if b"connection: close" in data:
                    return
                await trio.sleep(self.pause_s)


def _whole(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    if b"chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return len(body) >= length
