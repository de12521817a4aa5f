"""Keys and limits on real sockets: who is let in, and that every way out settles exactly what was used."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from attrs import evolve

from llmgw.router.body import Asked
from llmgw.router.errors import ApiError
from llmgw.router.gate import Gate
from llmgw.router.limits import LANES, SLOT_CELLS
from llmgw.router.table import Table
from llmgw.settings.catalog import Routing
from llmgw.settings.document import Auth, Price, RouterSettings
from llmgw.settings.keys import ApiKey, Limits, Period, Spent, digest_of, period_start, token_of
from llmgw.settings.usage import UsageRow
from tests.router import engines as e
from tests.router.engines import Script, Visit
from tests.router.test_server import Client, Router, router

ID = "aaaaaaaaaaaa"
TOKEN = token_of(ID, "s" * 40)
AUTH = b"authorization: Bearer " + TOKEN.encode() + b"\r\n"
PLAIN = json.dumps({"model": "m", "max_tokens": 10}).encode()
STREAM = json.dumps({"model": "m", "max_tokens": 10, "stream": True}).encode()
WORD = b'{"choices":[{"delta":{"content":"w"}}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
ALL = Limits(requests_per_minute=100, tokens_per_minute=10_000, concurrent=5, budget_tokens=100_000)


def key(version: int = 1, **more: object) -> ApiKey:
    return evolve(ApiKey(ID, 1, version, digest_of(TOKEN.encode()), 0.0), **more)


@asynccontextmanager
async def closed(*scripts: Script, limits: Limits = ALL, **more: object) -> AsyncIterator[Router]:
    """A router that wants keys, and has one."""
    async with router(*scripts, auth=Auth.KEYS) as it:
        it.server.gate.keys.apply(0, 1, (key(limits=limits, **more),), last=True)
        yield it


def cells(it: Router) -> tuple[int, int, int, int, int]:
    """Requests and tokens in the window, requests under way, tokens held, tokens spent."""
    found, base = it.server.gate.counts.cells(1)
    own = [found[base + at] for at in range(SLOT_CELLS)]
    flight, held = own[8 : 8 + LANES], own[8 + LANES : 8 + 2 * LANES]
    return own[1], own[2], sum(flight), sum(held), own[4]


async def settled(it: Router) -> tuple[int, int, int]:
    """Requests, tokens in the window and tokens spent, once nothing is under way."""
    with trio.fail_after(3):
        while cells(it)[2]:
            await trio.sleep(0.005)
    requests, tokens, _, held, spent = cells(it)
    assert held == 0
    return requests, tokens, spent


def used(it: Router) -> UsageRow:
    (row,) = it.server.gate.book.take()
    assert (row.key, row.model, row.requests) == (ID, "m", 1)
    return row


async def stream_with_usage(visit: Visit) -> None:
    while True:
        await visit.request()
        await visit.send(e.EVENTS + e.event(WORD) + e.event(WORD))
        await visit.send(e.event(USAGE) + e.event(b"[DONE]") + b"0\r\n\r\n")


async def says_no(visit: Visit) -> None:
    while True:
        await visit.request()
        await visit.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}")


async def words_and_silence(visit: Visit) -> None:
    await visit.request()
    await visit.send(e.EVENTS + e.event(WORD) * 8)
    await visit.gone()


async def words_and_death(visit: Visit) -> None:
    await visit.request()
    await visit.send(e.EVENTS + e.event(WORD) * 8)


# Who is let in.


async def refusal(client: Client, fields: bytes, body: bytes = PLAIN) -> tuple[int, str]:
    await client.post(body, fields=fields)
    status, head, content = await client.answer()
    if status == 401:
        assert head[b"www-authenticate"] == b"Bearer"
    return status, json.loads(content)["error"]["code"]


async def test_who_is_let_in() -> None:
    async with closed(e.answers) as it, it.client() as client:
        for fields in (AUTH, b"x-api-key: " + TOKEN.encode() + b"\r\n"):
            await client.post(PLAIN, fields=fields)
            assert (await client.answer())[0] == 200
        for fields in (b"", b"authorization: Bearer sk-no\r\n", AUTH.replace(b"s\r\n", b"t\r\n"),
                       b"authorization: Basic " + TOKEN.encode() + b"\r\n"):  # fmt: skip
            assert await refusal(client, fields) == (401, "invalid_api_key"), "and the connection goes on"
        assert len(it.engines[0].requests) == 2
        assert all(TOKEN.encode() not in head for head, _ in it.engines[0].requests)
        assert it.metric('llmgw_router_refused_total{reason="wrong"} 3.0')
        assert it.metric('llmgw_router_refused_total{reason="missing"} 1.0')
        for path, status in ((b"/healthz", 200), (b"/readyz", 200), (b"/metrics", 200), (b"/v1/models", 401)):
            await client.get(path)
            assert (await client.answer())[0] == status


async def test_a_large_body_of_nobody_is_not_read() -> None:
    async with closed(e.answers) as it, it.client() as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 7000000\r\n\r\n")
        status, head, _ = await client.answer()
        assert (status, head[b"connection"]) == (401, b"close")


async def test_revoked_from_one_request_to_the_next() -> None:
    async with closed(e.answers) as it, it.client() as client:
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200
        it.server.gate.keys.apply(1, 2, (key(2, revoked=1.0),), last=True)
        assert await refusal(client, AUTH) == (401, "invalid_api_key")


async def test_what_is_under_way_for_a_revoked_key_is_cut_and_nothing_else() -> None:
    async with closed(words_and_silence) as it, it.client() as client, it.client() as other:
        token = token_of("b" * 12, "s" * 40)
        second = ApiKey("b" * 12, 2, 2, digest_of(token.encode()), 0.0)
        it.server.use_keys(1, 2, (second,), last=True)
        for who, fields in ((client, AUTH), (other, b"x-api-key: " + token.encode() + b"\r\n")):
            await who.post(STREAM, fields=fields)
            while who.buffer.count(WORD) < 8:
                who.buffer += await who.stream.receive_some()
        it.server.use_keys(2, 3, (key(3, owner="new"),), last=True)
        assert cells(it)[2] == 1, "another change cuts nothing"
        it.server.use_keys(3, 4, (key(4, revoked=1.0),), last=True)
        with trio.fail_after(2):
            assert b"0\r\n\r\n" not in await client.rest(), "it does not look complete"
            await it.engines[0].left.wait()
        assert (await settled(it))[0] == 1
        assert it.server.directory.outstanding() == {"e0": 1}, "the other's goes on"


async def test_as_long_as_nobody_can_be_told_apart_nobody_is_let_in_nor_wrong() -> None:
    async with router(e.answers, auth=Auth.KEYS) as it, it.client() as client:
        assert it.server.ready() == "no API keys yet"
        for fields in (AUTH, b""):
            assert await refusal(client, fields) == (503, "starting")
        it.server.gate.keys.apply(0, 0, (), last=False)
        assert await refusal(client, AUTH) == (503, "starting")
        it.server.gate.keys.apply(0, 1, (key(),), last=True)
        assert it.server.ready() == ""
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200


def test_before_the_first_table_nobody_is_let_in_either() -> None:
    gate = Gate()
    with pytest.raises(ApiError) as found:
        gate.known(b"")
    assert (found.value.status, found.value.retry_after_s) == (503, 1)


async def test_an_open_router_lets_everyone_in_and_counts_for_good_keys() -> None:
    async with router(e.answers) as it, it.client() as client:
        it.server.gate.keys.apply(0, 1, (key(limits=Limits(requests_per_minute=1)),), last=True)
        for fields, status in ((b"", 200), (b"authorization: Bearer sk-any\r\n", 200), (AUTH, 200), (AUTH, 429)):
            await client.post(PLAIN, fields=fields)
            assert (await client.answer())[0] == status
        rows = {row.key: row.requests for row in it.server.gate.book.take()}
        assert rows == {"": 2, ID: 1}


async def test_models_of_a_key() -> None:
    async with closed(e.answers, models=("m",)) as it, it.client() as client:
        get = b"GET %b HTTP/1.1\r\nhost: g\r\n" + AUTH + b"\r\n"
        await client.send(get % b"/v1/models")
        assert [m["id"] for m in json.loads((await client.answer())[2])["data"]] == ["m"]
        for path, status in ((b"/v1/models/m", 200), (b"/v1/models/empty", 403), (b"/v1/models/nope", 403)):
            await client.send(get % path)
            assert (await client.answer())[0] == status
        for model in ("empty", "nope"):
            code = await refusal(client, AUTH, json.dumps({"model": model}).encode())
            assert code == (403, "model_not_allowed"), "whether it exists is not said"


async def test_tenants_share_nothing_of_an_engine_s_cache() -> None:
    for owner, salt in (("", ID), ("team-a", "team-a")):
        async with closed(e.answers, owner=owner) as it, it.client() as client:
            route = it.server.directory.table.routes[0]
            salted = evolve(route, endpoints=tuple(evolve(x, salted=True) for x in route.endpoints))
            it.server.use(Table(2, (salted,), it.server.directory.table.settings))
            for path in (b"/v1/chat/completions", b"/v1/embeddings"):
                await client.post(b'{"model":"m","cache_salt":"theirs"}', path, AUTH)
                assert (await client.answer())[0] == 200
            chat, embeddings = (json.loads(body) for _, body in it.engines[0].requests)
            assert chat == {"model": "m", "cache_salt": salt}
            assert embeddings == {"model": "m"}
            it.server.use(Table(3, (route,), it.server.directory.table.settings))
            for body in (b'{"model":"m","cache_salt":"theirs"}', b'{"model":"m","c\\u0061che_s\\u0061lt" :"theirs"}'):
                await client.post(body, b"/v1/chat/completions", AUTH)
                assert (await client.answer())[0] == 200
                assert json.loads(it.engines[0].requests[-1][1]) == {"model": "m"}, "an engine of whatever kind"


# Every way out.


async def test_an_answer_is_settled_by_the_engines_own_count() -> None:
    async with closed(e.answers) as it, it.client() as client:
        await client.post(PLAIN, fields=AUTH)
        _, head, _ = await client.answer()
        reserved = len(PLAIN) // 4 + 10
        assert head[b"x-ratelimit-limit-requests"] == b"100"
        assert head[b"x-ratelimit-remaining-requests"] == b"99"
        assert head[b"x-ratelimit-limit-tokens"] == b"10000"
        assert head[b"x-ratelimit-remaining-tokens"] == str(10_000 - reserved).encode()
        assert 58 <= int(head[b"x-ratelimit-reset-tokens"][:-1]) <= 62
        assert await settled(it) == (1, 3, 3)
        row = used(it)
        assert (row.prompt, row.completion, row.failed, row.estimated) == (2, 1, 0, 0)


async def test_a_stream_is_asked_for_its_usage_which_the_client_does_not_see() -> None:
    async with closed(stream_with_usage) as it, it.client() as client:
        await client.post(STREAM, fields=AUTH)
        await client.head()
        while not client.buffer.endswith(b"0\r\n\r\n"):
            client.buffer += await client.stream.receive_some()
        assert b"usage" not in client.buffer
        assert client.buffer.count(WORD) == 2
        assert b"[DONE]" in client.buffer
        assert await settled(it) == (1, 10, 10)
        assert (used(it).prompt, json.loads(it.engines[0].requests[0][1])["stream_options"]) == (
            7,
            {"include_usage": True},
        )
        client.buffer = b""
        await client.post(STREAM[:-1] + b',"stream_options":{"include_usage":true}}', fields=AUTH)
        await client.head()
        while not client.buffer.endswith(b"0\r\n\r\n"):
            client.buffer += await client.stream.receive_some()
        assert USAGE in client.buffer, "who asks for it gets it"
        assert await settled(it) == (2, 20, 20)


async def test_requests_and_answers_may_be_cut_at_every_byte() -> None:
    """Each answer is cut where its request is, and once more."""
    events = e.event(WORD) + e.event(USAGE) + e.event(b"[DONE]") + b"0\r\n\r\n"
    answer = e.EVENTS + events
    request = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\n%btransfer-encoding: chunked\r\n\r\n" % AUTH
    request += b"%x\r\n%b\r\n3\r\n   \r\n0\r\n\r\n" % (len(STREAM), STREAM)
    at = 0

    async def arrived() -> None:
        for _ in range(3):  # what was sent on loopback can be read at once, by whoever is woken
            await trio.testing.wait_all_tasks_blocked()

    async def cut(visit: Visit) -> None:
        while True:
            await visit.request()
            first, second = sorted((at % len(answer), (at * 7) % len(answer)))
            for piece in (answer[:first], answer[first:second], answer[second:]):
                await visit.send(piece)
                await arrived()

    async with closed(cut, limits=Limits()) as it, it.client() as client:
        for at in range(max(len(request), len(answer))):
            for piece in (request[: at % len(request)], request[at % len(request) :]):
                await client.send(piece)
                await arrived()
            with trio.fail_after(2):
                assert (await client.head())[0] == 200
                while not client.buffer.endswith(b"0\r\n\r\n"):
                    client.buffer += await client.stream.receive_some()
            content = b"".join(client.buffer.split(b"\r\n")[1::2])
            client.buffer = b""
            assert content == b"data: %b\n\ndata: [DONE]\n\n" % WORD, at
        assert {json.loads(body)["stream"] for _, body in it.engines[0].requests} == {True}
        (row,) = it.server.gate.book.take()
        assert (row.prompt, row.estimated) == (7 * row.requests, 0)


async def test_a_client_that_knows_no_chunks_sees_nothing_of_the_usage_either() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(e.EVENTS + e.event(WORD) + e.event(USAGE) + e.event(b"[DONE]") + b"0\r\n\r\n")

    async with closed(script) as it, it.client() as client:
        await client.send(
            b"POST /v1/completions HTTP/1.0\r\n%bcontent-length: %d\r\n\r\n%b" % (AUTH, len(STREAM), STREAM)
        )
        assert (await client.head())[0] == 200
        assert await client.rest() == b"data: %b\n\ndata: [DONE]\n\n" % WORD
        assert used(it).prompt == 7


async def test_an_engine_that_refuses_used_nothing() -> None:
    async with closed(says_no) as it, it.client() as client:
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 400
        assert await settled(it) == (1, 0, 0)
        assert (used(it).failed, used_nothing(it)) == (1, True)


def used_nothing(it: Router) -> bool:
    return it.server.gate.book.take() == ()


@pytest.mark.parametrize("script", [e.dies_at_once, e.dies_after_its_head])
async def test_what_no_engine_answered_was_as_if_never_asked(script: Script) -> None:
    async with closed(script) as it, it.client() as client:
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 502
        assert await settled(it) == (0, 0, 0)
        assert used_nothing(it)


async def test_no_engine_at_all() -> None:
    async with closed(e.answers) as it, it.client() as client:
        assert await refusal(client, AUTH, b'{"model":"empty"}') == (503, "no_ready_replica")
        assert await settled(it) == (0, 0, 0)
        assert used_nothing(it)


async def test_cut_by_the_engine_is_settled_by_what_was_passed_on() -> None:
    async with closed(words_and_death) as it, it.client() as client:
        await client.post(STREAM, fields=AUTH)
        assert b"upstream_error" in await client.rest()
        expected = len(STREAM) // 4 + 8
        assert await settled(it) == (1, expected, expected)
        row = used(it)
        assert (row.failed, row.estimated, row.completion) == (1, 1, 8)


async def test_the_client_leaves_in_the_stream() -> None:
    async with closed(words_and_silence) as it:
        async with it.client() as client:
            await client.post(STREAM, fields=AUTH)
            while client.buffer.count(WORD) < 8:
                client.buffer += await client.stream.receive_some()
        expected = len(STREAM) // 4 + 8
        assert await settled(it) == (1, expected, expected)
        assert (used(it).failed, used_nothing(it)) == (1, True)


async def test_the_client_leaves_before_the_first_byte() -> None:
    async with closed(e.says_nothing) as it:
        async with it.client() as client:
            await client.post(PLAIN, fields=AUTH)
            with trio.fail_after(2):
                while not it.engines[0].requests:
                    await trio.sleep(0.005)
            assert cells(it)[2:4] == (1, len(PLAIN) // 4 + 10)
        assert await settled(it) == (1, len(PLAIN) // 4, len(PLAIN) // 4), "its prompt was worked on"
        assert (used(it).estimated, used_nothing(it)) == (1, True)


async def test_the_router_is_stopped_in_the_stream() -> None:
    async with closed(words_and_silence) as it, it.client() as client:
        await client.post(STREAM, fields=AUTH)
        while client.buffer.count(WORD) < 8:
            client.buffer += await client.stream.receive_some()
        it.server.drain(0.05)
        assert (await settled(it))[2] == len(STREAM) // 4 + 8
        assert used(it).failed == 1


# Limits.


async def test_requests_at_once() -> None:
    async with closed(e.says_nothing, e.says_nothing, limits=Limits(concurrent=1)) as it, it.client() as other:
        async with it.client() as client:
            await client.post(PLAIN, fields=AUTH)
            with trio.fail_after(2):
                while not cells(it)[2]:
                    await trio.sleep(0.005)
            await other.post(PLAIN, fields=AUTH)
            status, head, content = await other.answer()
            assert (status, head[b"retry-after"] in (b"1", b"2")) == (429, True)
            assert json.loads(content)["error"]["code"] == "concurrency_limit_exceeded"
            assert b"x-should-retry" not in head
        await settled(it)
        await other.post(PLAIN, fields=AUTH)
        with trio.fail_after(2):
            while not cells(it)[2]:
                await trio.sleep(0.005)


async def test_requests_a_minute() -> None:
    async with closed(e.answers, limits=Limits(requests_per_minute=2)) as it, it.client() as client:
        for left in (b"1", b"0"):
            await client.post(PLAIN, fields=AUTH)
            assert (await client.answer())[1][b"x-ratelimit-remaining-requests"] == left
        await client.post(PLAIN, fields=AUTH)
        status, head, content = await client.answer()
        assert (status, head[b"x-ratelimit-remaining-requests"]) == (429, b"0")
        assert 58 <= int(head[b"retry-after"]) <= 67
        said = json.loads(content)["error"]
        assert (said["code"], said["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "2 requests a minute" in said["message"]
        assert it.metric('llmgw_router_refused_total{reason="requests"} 1.0')
        it.server.gate.keys.apply(1, 2, (key(2, limits=Limits(requests_per_minute=3)),), last=True)
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200, "a new limit counts what was used before"
        assert await refusal(client, AUTH) == (429, "rate_limit_exceeded")


async def test_tokens_that_can_never_be_had() -> None:
    async with closed(e.answers, limits=Limits(tokens_per_minute=50)) as it, it.client() as client:
        await client.post(json.dumps({"model": "m", "max_tokens": 500}).encode(), fields=AUTH)
        status, head, content = await client.answer()
        assert (status, head[b"x-should-retry"]) == (429, b"false")
        assert b"retry-after" not in head
        assert "lower max_tokens" in json.loads(content)["error"]["message"]
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200


async def test_a_budget_is_learnt_used_up_and_said() -> None:
    limits = Limits(budget_tokens=100, budget_cost=1000, budget_period=Period.DAY)
    async with closed(e.answers, limits=limits) as it, it.client() as client:
        gate = it.server.gate
        since = period_start(Period.DAY, time.time())
        gate.learn((Spent(1, since, 75, 0, Period.DAY),))
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200
        await settled(it)
        gate.learn((Spent(1, since, 76, 0, Period.DAY),))  # the store is behind
        assert cells(it)[4] == 78
        gate.learn((Spent(1, since - 86400, 9999, 0, Period.DAY),))
        assert cells(it)[4] == 78
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200
        gate.learn((Spent(1, since, 95, 0, Period.DAY),))
        await client.post(PLAIN, fields=AUTH)
        status, head, content = await client.answer()
        assert (status, head[b"x-should-retry"]) == (429, b"false")
        assert 0 < int(head[b"retry-after"]) <= 86405
        assert json.loads(content)["error"]["code"] == "insufficient_quota"


async def test_costs() -> None:
    prices = {"m": Price(prompt=3.0, completion=10.0)}
    async with router(e.answers, auth=Auth.KEYS, prices=prices) as it, it.client() as client:
        it.server.gate.keys.apply(0, 1, (key(limits=Limits(budget_cost=200)),), last=True)
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200
        await settled(it)
        assert it.server.gate.book.take()[0].cost == 2 * 3 + 1 * 10
        found, base = it.server.gate.counts.cells(1)
        assert found[base + 5] == 16
        await client.post(json.dumps({"model": "m", "max_tokens": 20}).encode(), fields=AUTH)
        assert (await client.answer())[0] == 429, "what it may cost is held before"


async def test_numbers_that_nobody_means() -> None:
    async def boasts(visit: Visit) -> None:
        await visit.request()
        await visit.send(e.whole(b'{"usage":{"prompt_tokens":%d,"completion_tokens":1}}' % 10**30))

    async with router(boasts, auth=Auth.KEYS, prices={"m": Price(1e9, 1e9)}) as it, it.client() as client:
        it.server.gate.keys.apply(0, 1, (key(limits=ALL),), last=True)
        await client.post(PLAIN, fields=AUTH)
        assert (await client.answer())[0] == 200
        assert used(it).prompt == 2**40
        await client.post(json.dumps({"model": "m", "max_tokens": 10**30}).encode(), fields=AUTH)
        assert (await client.answer())[0] == 429


def test_settled_once_whatever_happens() -> None:
    gate = Gate(RouterSettings())
    gate.keys.apply(0, 1, (key(limits=ALL),), last=True)
    holder = gate.known(b"Bearer " + TOKEN.encode())
    ticket = gate.admit(holder, b"/v1/completions", "m", PLAIN, Asked("m"))
    with pytest.raises(ZeroDivisionError):
        with ticket:
            raise ZeroDivisionError
    with ticket:
        pass
    found, base = gate.counts.cells(1)
    assert not any(found[base + at] for at in (1, 2, *range(4, SLOT_CELLS)))


@pytest.mark.parametrize(
    ("change", "status"),
    [({"revoked": 1.0}, 401), ({"digest": digest_of(b"another")}, 401), ({"models": ("other",)}, 403), ({}, 200)],
    ids=["revoked", "rotated", "not for this model", "renamed"],
)
async def test_a_key_that_is_changed_before_all_of_its_request_is_there(change: dict[str, object], status: int) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n%b\r\n" % (len(PLAIN), AUTH)
    async with closed(e.answers) as it, it.client() as client:
        await client.send(head + PLAIN[:5])
        await trio.testing.wait_all_tasks_blocked(0.01)
        it.server.use_keys(1, 2, [key(2, **change)], last=True)
        await client.send(PLAIN[5:])
        assert (await client.answer())[0] == status
        assert len(it.engines[0].requests) == (status == 200)


async def test_a_key_that_is_revoked_while_its_request_waits_for_its_turn() -> None:
    async with closed(e.begins_a_stream) as it, it.client() as first, it.client() as waits, it.client() as idle:
        table = it.server.directory.table
        routing = Routing(concurrency=1, queue=5, queue_s=30)
        it.server.use(Table(2, (evolve(table.routes[0], routing=routing),), table.settings))
        await idle.send(b"GET /v1/models HTTP/1.1\r\nhost: g\r\n" + AUTH + b"\r\n")
        assert (await idle.answer())[0] == 200
        await first.post(STREAM, fields=AUTH)
        await first.head()
        await waits.post(STREAM, fields=AUTH)
        with trio.fail_after(2):
            while not it.server.directory.waiting:
                await trio.sleep(0.002)
        it.server.use_keys(1, 2, [key(2, revoked=1.0)], last=True)
        with trio.fail_after(5):
            assert await waits.rest() == b""
            assert await first.rest() == e.event(b'{"n":1}')
        assert len(it.engines[0].requests) == 1
        assert not it.metric("llmgw_router_client_gone_total{"), "they did not leave"
        await idle.post(STREAM, fields=AUTH)
        assert (await idle.answer())[0] == 401, "and who asks nothing is told when it does"


@pytest.mark.parametrize("model", ["m", "nope"])
async def test_a_connection_outlives_its_key_and_its_next_request_hears_why(model: str) -> None:
    async with closed(e.answers) as it, it.client() as client:
        await client.post(json.dumps({"model": model}).encode(), fields=AUTH)
        assert (await client.answer())[0] == (200 if model == "m" else 404)
        it.server.use_keys(1, 2, [key(2, revoked=1.0)], last=True)
        await client.post(PLAIN, fields=AUTH)
        with trio.fail_after(5):
            assert (await client.answer())[0] == 401
