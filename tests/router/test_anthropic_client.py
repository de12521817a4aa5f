"""The official ``anthropic`` client before a router with keys: what it makes of answers, streams and every refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from llmgw.settings.keys import Limits
from tests.router import engines as e
from tests.router.test_gate import TOKEN, closed, settled

anthropic = pytest.importorskip("anthropic")

USAGE = {"input_tokens": 7, "output_tokens": 2}
MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn",
    "stop_sequence": None, "content": [{"type": "text", "text": "Hello there"}], "usage": USAGE,
}  # fmt: skip
EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " there"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
    {"type": "message_stop"},
)


def event(what: dict[str, Any]) -> bytes:
    data = f"event: {what['type']}\ndata: {json.dumps(what)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def speaks(visit: e.Visit) -> None:
    """As vLLM serves this API: https://docs.anthropic.com/en/docs/build-with-claude/streaming."""
    while True:
        head, body = await visit.request()
        asked = json.loads(body)
        if b"count_tokens" in head:
            await visit.send(e.whole(b'{"input_tokens":7}'))
        elif not asked.get("stream"):
            await visit.send(e.whole(json.dumps(MESSAGE).encode()))
        elif asked["max_tokens"] == 13:
            await visit.send(e.EVENTS + b"".join(map(event, EVENTS[:3])))
            return
        else:
            await visit.send(e.EVENTS + b"".join(map(event, EVENTS)) + b"0\r\n\r\n")


def use_client(port: int) -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=TOKEN, max_retries=0, timeout=10)
    asks: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    said = client.messages.create(**asks)
    assert (said.content[0].text, said.usage.output_tokens) == ("Hello there", 2)
    with client.messages.stream(**asks) as stream:
        assert list(stream.text_stream) == ["Hello", " there"]
        assert stream.get_final_message().usage.input_tokens == 7
    assert client.messages.count_tokens(model="m", messages=asks["messages"]).input_tokens == 7
    with pytest.raises(anthropic.APIStatusError, match="ended the connection within its answer"):
        with client.messages.stream(**asks | {"max_tokens": 13}) as stream:
            list(stream.text_stream)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**asks | {"model": "nope"})
    with pytest.raises(anthropic.InternalServerError, match=r"is loading \(45 %\)") as down:
        client.messages.create(**asks | {"model": "empty"})
    assert (down.value.status_code, down.value.response.headers["retry-after"] in "23") == (503, True)
    with pytest.raises(anthropic.BadRequestError):
        client.post("/v1/messages", body=[], cast_to=dict[str, Any])
    wrong = client.copy(api_key=f"{TOKEN[:-1]}x")
    with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
        wrong.messages.create(**asks)
    with pytest.raises(anthropic.RateLimitError, match="1000 tokens a minute"):
        client.messages.create(**asks | {"max_tokens": 2000})


async def test_the_anthropic_client() -> None:
    async with closed(speaks, limits=Limits(tokens_per_minute=1000)) as it:
        await trio.to_thread.run_sync(use_client, it.port)
        assert (await settled(it))[0] == 4
        (row,) = it.server.gate.book.take()
        assert (row.requests, row.estimated) == (4, 2), "the count of tokens, and the stream that was cut"
        assert row.completion == 2 + 2 + 0 + 3
