"""Usage is asked for and taken out again, and nothing else of a stream changes, wherever it is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.body import asked_in_json
from llmgw.router.chunks import ChunkDecoder, ChunkWalker
from llmgw.router.usage_filter import TOKENS_MOST, UsageFilter, answer_guess, asking, prompt_guess, wish_of

CHAT = b"/v1/chat/completions"


def event(value: object, end: str = "\n\n") -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}{end}".encode()


WORD = {"choices": [{"delta": {"content": 'a "usage":{} \n\n b'}}]}
ODD = {"choices": [{"delta": {}}], "usage": {"prompt_tokens": 1}}
USAGE = {"id": "x", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
NULL = {"choices": [{"delta": {}}], "usage": None}
NO_EVENT = ": ping\n\n"


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts if p) + b"0\r\n\r\n"


def through(raw: bytes, cuts: list[int]) -> bytes:
    """What a client decodes of a chunked body that came in these pieces."""
    events, walker, decoder = UsageFilter(), ChunkWalker(), ChunkDecoder()
    made = b""
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        if piece := raw[start:end]:
            finished = walker.feed(piece) >= 0
            made += decoder.feed(events.chunks(piece, walker.boundary, events=walker.events, finished=finished))
    assert decoder.finished
    assert decoder.rest == b""
    return made


ENDS = st.sampled_from(["\n\n", "\r\n\r\n"])


@given(st.data(), ENDS)
def test_only_the_usage_event_goes(data: st.DataObject, end: str) -> None:
    kinds = data.draw(st.lists(st.sampled_from([WORD, ODD, USAGE, NULL, "[DONE]"]), max_size=6))
    content = b"".join(event(kind, end) for kind in kinds) + data.draw(st.sampled_from([b"", b"data: half"]))
    parts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    raw = chunked([content[a:b] for a, b in zip([0, *parts], [*parts, len(content)], strict=True)])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    assert through(raw, cuts) == content.replace(event(USAGE, end), b"")


def test_chunked_at_every_byte() -> None:
    content = event(USAGE) + event("[DONE]")
    for at in range(1, len(content)):
        assert through(chunked([content[:at], content[at:]]), []) == event("[DONE]"), at


def test_cut_at_every_byte() -> None:
    content = event(WORD) + event(USAGE) + event("[DONE]")
    raw = chunked([event(WORD), event(USAGE), event("[DONE]")])
    for cut in range(len(raw) + 1):
        assert through(raw, [cut]) == content.replace(event(USAGE), b"")
    assert through(raw, list(range(1, len(raw)))) == content.replace(event(USAGE), b"")


def test_what_needs_no_look_is_the_same_object() -> None:
    events = UsageFilter()
    word = chunked([event(WORD["choices"])])[:-5]
    assert events.chunks(word, len(word), events=True, finished=False) is word
    both = word + chunked([event(USAGE)])[:-5]
    assert events.chunks(both, len(both), events=True, finished=False) == word, "what came before it is not taken apart"
    said = chunked([event(USAGE)])[:-5]
    assert events.chunks(said, len(said), events=True, finished=False) == b""
    assert events.chunks(word, len(word), events=True, finished=False) is word, "and so it goes on"
    last = chunked([event("[DONE]")])
    assert events.chunks(last, 0, events=True, finished=True) is last


def test_a_chunk_without_end_is_not_held_for_ever() -> None:
    events = UsageFilter()
    part = event("half")[:-1]
    first = b"%x\r\n%b\r\n" % (len(part), part)
    assert events.chunks(first, len(first), events=False, finished=False) == b""
    begun = b"7fffffff\r\n" + b"x" * 256 * 1024
    assert events.chunks(begun, 0, events=True, finished=False) == first + begun
    assert events.chunks(b"more", 0, events=True, finished=False) == b"more"


def test_what_is_no_event_is_not_held_for_ever() -> None:
    events = UsageFilter()
    assert events.content(b"x" * 256 * 1024) == b""
    assert len(events.content(b"y")) == 256 * 1024 + 1


@pytest.mark.parametrize(
    ("body", "ask"),
    [
        ({"stream": True}, True),
        ({"stream": True, "stream_options": None}, True),
        ({"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, False),
        ({"stream": False}, False),
        ({}, False),
    ],
)
def test_usage_is_asked_for_where_it_is_not_yet(body: dict[str, object], ask: bool) -> None:
    text = json.dumps({"model": "m", "text": 'ü "stream_options"', **body}).encode()
    assert wish_of(CHAT, text, asked_in_json(text)).ask is ask
    assert not wish_of(b"/v1/embeddings", text, asked_in_json(text)).ask
    if ask:
        asked = json.loads(asking(b" " + text))
        options = {**(body.get("stream_options") or {}), "include_usage": True}  # type: ignore[dict-item]
        assert asked == {"model": "m", "text": 'ü "stream_options"', **body, "stream_options": options}


@pytest.mark.parametrize("name", ["stream_option\\u0073", "stream\\u005foptions"])
def test_no_spelling_keeps_usage_from_being_asked_for(name: str) -> None:
    body = b'{"model":"m","stream":true,"%b":{"include_usage":false}}' % name.encode()
    assert json.loads(asking(body))["stream_options"] == {"include_usage": True}


def test_what_cannot_be_written_anew_stays_as_it_is() -> None:
    body = b'{"model":"m","stream":true,"stream_options":null,"x":"\\ud800"}'
    assert asking(body) == body


def test_wishes() -> None:
    def answers(members: str, path: bytes = CHAT) -> int:
        body = b'{"model":"m",%b}' % members.encode()
        return wish_of(path, body, asked_in_json(body)).answers

    assert answers('"max_tokens":5,"n":3') == 15
    assert answers('"max_tokens":5,"max_completion_tokens":7') == 7
    assert answers('"max_output_tokens":9') == 9
    assert answers('"max_tokens":-5') == 0
    assert answers('"x":1') == 256
    assert answers('"x":1', b"/v1/embeddings") == 0
    assert answers('"n":"5"') == 256, "what is wrong with it the engine says"
    assert answers('"stream_options":5') == 256
    assert answers('"max_tokens":99999999999999999999999,"n":9') == TOKENS_MOST


def test_prompts_are_guessed_without_their_media() -> None:
    assert prompt_guess(b"x" * 400) == 100
    image = b'{"url":"data:image/png;base64,' + b"A" * 400_000 + b'"}'
    assert prompt_guess(image) < 1100


def test_answers_are_guessed_by_their_events() -> None:
    one = event({"choices": [{"delta": {"content": "w"}}]})
    assert answer_guess(len(one) * 50, one * 10, events=True) == 50
    assert answer_guess(400, b"", events=True) == 0
    assert answer_guess(400, b"x", events=False) == 100
