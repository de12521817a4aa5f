"""Asking an engine how it is: two small GETs over plain HTTP, bounded in time and size."""

from __future__ import annotations

import trio
from attrs import frozen

from llmgw.agent.events import Probed
from llmgw.agent.records import Record
from llmgw.engines.activity import Activity, activity
from llmgw.router.chunks import ChunkDecoder
from llmgw.router.http1 import MAX_HEAD_BYTES, BadMessage, parse_response

METRICS_PATH = "/metrics"
_MAX_ANSWER_BYTES = 4 * 1024 * 1024


@frozen
class Answer:
    """A status and the bytes that came with it."""

    status: int
    body: bytes


async def get(host: str, port: int, path: str, api_key: str | None, timeout_s: float) -> Answer | None:
    """One GET; ``None`` when nothing answers in time. Cancelling it closes the connection."""
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    request = f"GET {path} HTTP/1.1\r\nHost: engine\r\n{key}Connection: close\r\n\r\n".encode()
    with trio.move_on_after(timeout_s):
        try:
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(request)
                return await _answer(stream)
        except (OSError, trio.BrokenResourceError, BadMessage):
            return None
    return None


async def _answer(stream: trio.abc.ReceiveStream) -> Answer | None:
    """Read one answer, to where its head says that it ends: not every server closes when it is asked to."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > MAX_HEAD_BYTES or not (more := await stream.receive_some()):
            return None
        data += more
    head, body = parse_response(data[: end + 4]), data[end + 4 :]
    decoder = ChunkDecoder() if head.chunked else None
    if decoder is not None:
        body = decoder.feed(body)
    while not (decoder.finished if decoder is not None else head.length is not None and len(body) >= head.length):
        if len(body) > _MAX_ANSWER_BYTES:
            return None
        more = await stream.receive_some()
        if not more:
            return Answer(head.status, body) if decoder is None and head.length is None else None
        body += more if decoder is None else decoder.feed(bytes(more))
    return Answer(head.status, bytes(body))


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


async def work_of(record: Record) -> Activity | None:
    """What the engine's metrics say of its work; ``None`` where it has none, or does not answer."""
    page = await get(record.host, record.port, METRICS_PATH, record.api_key, record.probe_timeout_s)
    if page is None or page.status != 200:
        return None
    return activity(record.profile.engine, page.body.decode(errors="replace"))
