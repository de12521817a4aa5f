from __future__ import annotations

import contextlib
import itertools

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.router.chunks import ChunkDecoder, ChunkWalker
from llmgw.router.http1 import BadMessage, parse_request, parse_response

HOST = b"Host: gw\r\n"


def request(fields: bytes = HOST, first: bytes = b"POST /v1/completions HTTP/1.1\r\n") -> bytes:
    return first + fields + b"\r\n"


@pytest.mark.parametrize(
    ("head", "status", "said"),
    [
        (request(b""), 400, "Host is missing"),
        (request(HOST + HOST), 400, "host stands there twice"),
        (request(b"Host: a b\r\n"), 400, "not a host name"),
        (request(HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), 400, "both Content-Length"),
        (request(HOST + b"Content-Length: 5\r\nContent-Length: 5\r\n"), 400, "twice"),
        (request(HOST + b"Content-Length: +5\r\n"), 400, "not a number"),
        (request(HOST + b"Content-Length: 5, 5\r\n"), 400, "not a number"),
        (request(HOST + b"Content-Length: -1\r\n"), 400, "not a number"),
        (request(HOST + b"Transfer-Encoding: gzip, chunked\r\n"), 400, "chunked"),
        (request(HOST + b"Transfer-Encoding: xchunked\r\n"), 400, "chunked"),
        (request(HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), 400, "twice"),
        (request(HOST + b"Transfer-Encoding : chunked\r\n"), 400, "not valid"),
        (request(HOST + b"A: b\r\n c\r\n"), 400, "not valid"),
        (request(HOST + b"A: b\nC: d\r\n"), 400, "not valid"),
        (request(HOST + b"A: b\rC: d\r\n"), 400, "not valid"),
        (request(HOST + b"A: \x00\r\n"), 400, "not valid"),
        (request(HOST + b"A\x80: b\r\n"), 400, "not valid"),
        (request(HOST + b"Authorization: a\r\nAuthorization: b\r\n"), 400, "twice"),
        (request(HOST + b"Authorization: a\r\nx-api-key: b\r\n"), 400, "both Authorization and x-api-key"),
        (request(HOST + b"Expect: tea\r\n"), 417, "100-continue"),
        (request(HOST + b"Content-Type: a;boundary=a\r\ncontent-type: a;boundary=b\r\n"), 400, "content-type stands"),
        (request(HOST + b"X: y\r\n" * 101), 431, "more than 100"),
        (request(first=b"GET  / HTTP/1.1\r\n"), 400, "not valid"),
        (request(first=b"GET / HTTP/2.0\r\n"), 400, "not valid"),
        (request(first=b"get / HTTP/1.1\r\n"), 400, "not valid"),
        (request(first=b"GET /\x7f HTTP/1.1\r\n"), 400, "not valid"),
        (b"\r\n" + request(), 400, "not valid"),
        (request(b"", b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n"), 400, "HTTP/1.1"),
    ],
)
def test_hostile_heads(head: bytes, status: int, said: str) -> None:
    with pytest.raises(BadMessage) as caught:
        parse_request(head)
    assert (caught.value.status, said in caught.value.reason) == (status, True), caught.value.reason


def test_what_is_forwarded() -> None:
    head = parse_request(
        request(
            HOST + b"User-Agent: x\r\nAuthorization: Bearer k\r\nConnection: X-Gone, keep-alive\r\nX-Gone: 1\r\n"
            b"Accept-Encoding: gzip\r\nCookie: c\r\nX-LLMGW-Evil: 1\r\nTE: trailers\r\nContent-Length: 7\r\nX-Request-Id: r.1\r\n"
        )
    )
    assert head.forwarded == b"User-Agent: x\r\n"
    assert (head.length, head.authorization, head.request_id, head.keep_alive) == (7, b"Bearer k", b"r.1", True)
    assert parse_request(request(HOST + b"x-api-key: k\r\n")).authorization == b"Bearer k"
    assert parse_request(request(HOST + b"X-Request-Id: a b\r\n")).request_id == b""


def test_keep_alive() -> None:
    assert parse_request(request()).keep_alive
    assert not parse_request(request(HOST + b"Connection: close\r\n")).keep_alive
    assert not parse_request(request(b"", b"GET / HTTP/1.0\r\n")).keep_alive
    assert parse_request(request(b"Connection: keep-alive\r\n", b"GET / HTTP/1.0\r\n")).keep_alive


def test_responses() -> None:
    head = parse_response(
        b"HTTP/1.1 200 Fine\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\nKeep-Alive: 5\r\nX-Request-Id: theirs\r\n\r\n"
    )
    assert (head.status, head.chunked, head.event_stream, head.keep_alive) == (200, True, True, True)
    assert (
        head.start
        == b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    )
    for wrong in (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTP/1.1 200 OK\r\n\r\n",
                  b"HTTP/1.1 99 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n"):  # fmt: skip
        with pytest.raises(BadMessage) as caught:
            parse_response(wrong)
        assert caught.value.status == 502


@given(st.binary(max_size=300), st.binary(max_size=100))
def test_only_bad_message_comes_out(junk: bytes, more: bytes) -> None:
    for head in (junk, request(HOST + junk), b"POST " + junk + b" HTTP/1.1\r\n\r\n", junk + b"\r\n\r\n" + more):
        with contextlib.suppress(BadMessage):
            parse_request(head)
        with contextlib.suppress(BadMessage):
            parse_response(head)


TOKENS = st.sampled_from([b"Host: gw", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Connection: close", b"A: b",
                          b"Expect: 100-continue", b"A:", b"A : b", b" folded", b"Content-Length: 03", b"X: \xff"])  # fmt: skip


@given(st.lists(TOKENS, max_size=6))
@settings(max_examples=300)
def test_what_we_accept_another_strict_parser_reads_the_same(lines: list[bytes]) -> None:
    head = b"POST /x HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    try:
        mine = parse_request(head)
    except BadMessage:
        return
    oracle = h11.Connection(h11.SERVER)
    oracle.receive_data(head)
    theirs = oracle.next_event()
    assert isinstance(theirs, h11.Request)
    assert theirs.target == mine.target
    named = dict(theirs.headers)
    assert (named.get(b"content-length") is not None) == (mine.length is not None)
    assert (b"transfer-encoding" in named) == mine.chunked


def chunked(parts: list[bytes], style: int) -> bytes:
    sizes = (lambda n: b"%x" % n, lambda n: b"%X;a=b" % n, lambda n: b"%08x" % n)
    return b"".join(sizes[style % 3](len(p)) + b"\r\n" + p + b"\r\n" for p in parts if p) + (
        b"0\r\nTrailer: x\r\n\r\n" if style >= 3 else b"0\r\n\r\n"
    )


bodies = st.builds(
    lambda parts, style: (b"".join(parts), chunked(parts, style)),
    st.lists(st.one_of(st.binary(min_size=1, max_size=60), st.just(b"0\r\n\r\n"), st.just(b"\r\n")), max_size=5),
    st.integers(0, 5),
)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    points = sorted({min(a, len(data)) for a in at} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(points)]


@given(bodies, st.lists(st.integers(0, 400), max_size=20), st.binary(max_size=10))
@settings(max_examples=400)
def test_the_end_of_a_chunked_body_is_found_wherever_it_is_cut(
    body: tuple[bytes, bytes], at: list[int], behind: bytes
) -> None:
    content, wire = body
    walker, decoder = ChunkWalker(), ChunkDecoder()
    seen, decoded, end = 0, b"", -1
    for piece in cut(wire + behind, at):
        decoded += decoder.feed(piece)
        assert end < 0 or seen >= len(wire), "went on behind the end"
        if end < 0:
            found = walker.feed(piece)
            if found >= 0:
                end = seen + found
        seen += len(piece)
    assert end == len(wire)
    assert walker.finished
    assert decoder.finished
    assert decoded == content
    assert decoder.rest == behind


def test_a_chunk_s_content_is_given_out_as_it_comes() -> None:
    decoder = ChunkDecoder()
    given = [decoder.feed(data) for data in (b"f", b"fffffff;x=y\r", b"\nabc", b"d" * 1000)]
    assert given == [b"", b"", b"abc", b"d" * 1000], "nothing of it is held until all of it is there"
    decoder = ChunkDecoder()
    assert decoder.feed(b"1\r\nx\r\n" * 10_000 + b"0\r\na: b\r\n\r\nrest") == b"x" * 10_000
    assert (decoder.finished, decoder.rest) == (True, b"rest")


def test_many_chunks_are_taken_apart_in_turns() -> None:
    wire = b"1\r\nx\r\n" * 25 + b"0\r\n\r\nrest"
    for most in (1, 10, 25, 26):
        decoder = ChunkDecoder(most)
        turns = [decoder.feed(wire)]
        while decoder.behind:
            turns.append(decoder.feed(b""))
        assert b"".join(turns) == b"x" * 25
        assert max(map(len, turns)) <= most
        assert (decoder.finished, decoder.rest) == (True, b"rest")


@pytest.mark.parametrize("size", [b"0x5", b"+5", b"5_0", b" 5", b"-1", b"", b"g", b"123456789", b"5;\x00"])
def test_sizes_that_int_would_take(size: bytes) -> None:
    for reader in (ChunkWalker(), ChunkDecoder()):
        with pytest.raises(BadMessage):
            reader.feed(size + b"\r\nhello\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "wire",
    [
        b"3\nabc\n0\n\n", b"3\r\nabcXY0\r\n\r\n", b"0\r\na: b\n\r\n\r\n", b"0\r\na\r\n\r\n", b"0\r\na: b\r\n c\r\n\r\n", b"1" * 300,
        b"0\r\n" + b"a: b\r\n" * 3000,
    ],
)  # fmt: skip
def test_lines_of_a_body_that_others_may_read_otherwise(wire: bytes) -> None:
    with pytest.raises(BadMessage):
        ChunkDecoder().feed(wire)


def test_a_chunk_longer_than_its_size_is_refused_wherever_it_is_cut() -> None:
    wire = b"3\r\nabcXY\r\n0\r\n\r\n"
    for at, kind in itertools.product(range(len(wire)), (ChunkWalker, ChunkDecoder)):
        reader = kind()
        with pytest.raises(BadMessage):
            [reader.feed(piece) for piece in (wire[:at], wire[at:])]
    for kind in (ChunkWalker, ChunkDecoder):
        with pytest.raises(BadMessage):
            kind().feed(b"0\r\n" + b"a: b\r\n" * 3000)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_junk_is_refused_or_unfinished(junk: bytes, at: list[int]) -> None:
    for reader in (ChunkWalker(), ChunkDecoder()):
        with contextlib.suppress(BadMessage):
            for piece in cut(junk, at):
                reader.feed(piece)
