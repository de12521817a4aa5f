"""Asking an engine how it is: two small GETs over plain HTTP, bounded in time and size."""

from __future__ import annotations

import trio
from attrs import frozen

from llmgw.agent.records import Record
from llmgw.agent.shard import Probed

_MAX_ANSWER_BYTES = 1024 * 1024


@frozen
class Answer:
    """A status and the bytes that came with it."""

    status: int
    body: bytes


async def get(host: str, port: int, path: str, api_key: str | None, timeout_s: float) -> Answer | None:
    """One GET; ``None`` when nothing answers in time. Cancelling it closes the connection."""
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    request = f"GET {path} HTTP/1.1\r\nHost: engine\r\n{key}Connection: close\r\n\r\n".encode()
    data = bytearray()
    with trio.move_on_after(timeout_s):
        try:
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(request)
                async for chunk in stream:
                    data += chunk
                    if len(data) > _MAX_ANSWER_BYTES:
                        return None
        except (OSError, trio.BrokenResourceError):
            return None
        return _parse(bytes(data))
    return None


def _parse(data: bytes) -> Answer | None:
    head, separator, body = data.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return None
    return Answer(int(words[1]), body)


async def probe(record: Record) -> Probed:
    """Whether the process is up and whether the model is loaded: two questions with two answers."""
    health = await get(record.host, record.port, record.health_path, record.api_key, record.probe_timeout_s)
    if health is None:
        return Probed(healthy=False, listed=False, said=f"nothing answers on port {record.port}")
    if health.status != 200:
        return Probed(healthy=False, listed=False, said=f"{record.health_path} answers {health.status}")
    models = await get(record.host, record.port, record.models_path, record.api_key, record.probe_timeout_s)
    # The list is JSON in whatever framing; the name as a JSON string cannot stand in it by accident.
    listed = models is not None and models.status == 200 and f'"{record.ready_name}"'.encode() in models.body
    return Probed(healthy=True, listed=listed, said="")
