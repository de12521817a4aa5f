"""The gate of one worker: who a client is, what it may have now, and what it used in the end.

Two calls a request: :meth:`Gate.known` before its body is read, :meth:`Gate.admit` before an engine is looked for. What
the latter gives is a context manager that settles, once, whatever way the request ends.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmgw.router import limits
from llmgw.router.body import Asked
from llmgw.router.counts import Counts, OwnCounts
from llmgw.router.errors import ApiError, again_in
from llmgw.router.keys import Holder, KeyRefused, KeyTable
from llmgw.router.limits import Grant, Refused
from llmgw.router.usage_filter import TOKENS_MOST, UsageFilter, Wish, answer_guess, asking, prompt_guess, wish_of
from llmgw.settings.document import Auth, RouterSettings
from llmgw.settings.keys import Spent
from llmgw.settings.usage import DAY_S, UsageBook

_SOON_S = 1


class Answer(Protocol):
    """What a request's settlement looks at: see :class:`llmgw.router.exchange.Exchange`."""

    status: int
    usage: tuple[int, int] | None
    whole: bool
    events: bool
    tail: bytes

    @property
    def passed(self) -> int: ...


class Gate(Collector):
    """Keys, counts and usage of one worker. ``settings`` are those in use, ``None`` while there are none."""

    def __init__(
        self,
        settings: RouterSettings | None = None,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.keys = KeyTable()
        self.book = UsageBook()
        self.unkept: Callable[[], int] = lambda: 0
        self.settings = settings
        self.counts: Counts = counts if counts is not None else OwnCounts()
        self._clock = clock
        self._wall = wall
        self._refused: Counter[str] = Counter()

    # Who it is.

    def known(self, authorization: bytes) -> Holder | None:
        """The key that a client presents; ``None`` for one without, where that is allowed.

        Raises :class:`ApiError`: 401, or 503 as long as nobody can be told apart.
        """
        settings = self.settings
        if settings is None:
            raise self._refuse(ApiError(503, "The router has just started.", "starting", retry_after_s=_SOON_S))
        closed = settings.auth is Auth.KEYS
        if not closed and not authorization:
            return None
        if closed and not self.keys.complete:
            raise self._refuse(
                ApiError(503, "The router does not have its keys yet.", "starting", retry_after_s=_SOON_S)
            )
        try:
            return self.keys.find(authorization, self._wall())
        except KeyRefused as refused:
            if not closed:
                return None
            self._refused[refused.reason] += 1
            raise ApiError(401, refused.text, "invalid_api_key") from refused

    def _refuse(self, error: ApiError) -> ApiError:
        self._refused[error.code or ""] += 1
        return error

    # What it may have.

    def admit(self, holder: Holder | None, path: bytes, model: str, body: bytes, asked: Asked) -> Ticket:
        """Reserve what a permitted request will need. Raises :class:`ApiError` with 429; nothing is reserved then."""
        ticket = Ticket(self, holder, model, body)
        if holder is None:
            return ticket
        wish = wish_of(path, body, asked)
        ticket.prompt = wish.prompt
        if wish.ask:
            ticket.body = asking(body)
            ticket.filter = UsageFilter()
        if holder.limited:
            self._reserve(holder, ticket, wish)
        return ticket

    def permit(self, holder: Holder | None, model: str) -> None:
        """Raises :class:`ApiError` with 403 when the key is not for this model, which need not exist."""
        if holder is not None and not holder.allows(model):
            raise self._refuse(
                ApiError(403, f"This API key is not for the model {model[:200]!r}.", "model_not_allowed", "model")
            )

    def _cost(self, model: str, prompt: int, completion: int) -> int:
        settings = self.settings
        if settings is None or not settings.prices or (price := settings.prices.get(model)) is None:
            return 0
        return min(price.of(prompt, completion), TOKENS_MOST)

    def _reserve(self, holder: Holder, ticket: Ticket, wish: Wish) -> None:
        counts, key, now = self.counts, holder.key, self._clock()
        cost = self._cost(ticket.model, wish.prompt, wish.answers)
        try:
            cells, base = counts.cells(key.slot)
        except OSError as failed:
            raise self._refuse(ApiError(503, "Limits cannot be counted now.", "no_counts", retry_after_s=5)) from failed
        counts.lock(key.slot)
        try:
            granted = limits.reserve(
                cells, base, counts.lane, key.limits, now, self._wall(), wish.prompt + wish.answers, cost
            )
            left = limits.left(cells, base, key.limits, now) if holder.rated else None
        finally:
            counts.unlock(key.slot)
        lines = b"" if left is None else _rate_lines(holder, *left)
        if isinstance(granted, Refused):
            self._refused[granted.what] += 1
            raise _too_much(granted, lines)
        ticket.grant, ticket.lines = granted, lines

    # What it used.

    def settle(self, ticket: Ticket, *, left: bool) -> None:
        """Count a request that has ended; ``left`` when it was ended before its answer was."""
        answer, holder, grant = ticket.answer, ticket.holder, ticket.grant
        reached = answer is not None and (answer.status > 0 or left)
        prompt = completion = cost = 0
        estimated = False
        if answer is not None and reached and answer.status < 400:
            if answer.usage is not None:
                prompt, completion = answer.usage
                if prompt > TOKENS_MOST or completion > TOKENS_MOST:
                    prompt, completion = min(prompt, TOKENS_MOST), min(completion, TOKENS_MOST)
                if not answer.whole and answer.events and b'"message_start"' in answer.tail:
                    # Of Anthropic's streams the first event has a block too, and its answer is still to come.
                    estimated, completion = True, answer_guess(answer.passed, answer.tail, events=True)
            else:
                # The engine never said: it was cut short, or it does not count.
                estimated = True
                prompt = ticket.prompt or prompt_guess(ticket.body)
                if not answer.whole or answer.events:
                    completion = answer_guess(answer.passed, answer.tail, events=answer.events)
            cost = self._cost(ticket.model, prompt, completion)
        wall = self._wall()
        ident = ""
        if holder is not None:
            key, ident = holder.key, holder.key.id
            if grant is not None:
                counts = self.counts
                cells, base = counts.cells(key.slot)
                counts.lock(key.slot)
                try:
                    limits.settle(
                        cells, base, counts.lane, grant, key.limits, self._clock(), wall, prompt + completion, cost,
                        counts=reached,
                    )  # fmt: skip
                finally:
                    counts.unlock(key.slot)
        if answer is not None and reached:
            failed = not answer.whole or answer.status >= 400
            self.book.add(
                ident, ticket.model, int(wall // DAY_S), prompt, completion, cost, failed=failed, estimated=estimated
            )

    def learn(self, rows: Iterable[Spent]) -> None:
        """What is written down of budgets."""
        for row in rows:
            try:
                cells, base = self.counts.cells(row.slot)
            except OSError:
                continue  # no room for its cells: its requests are refused until there is
            self.counts.lock(row.slot)
            try:
                limits.learn(cells, base, row)
            finally:
                self.counts.unlock(row.slot)

    def collect(self) -> Iterable[Metric]:
        """For Prometheus. No key and no owner is a label: their number has no bound."""
        refused = CounterMetricFamily("llmgw_router_refused", "Requests refused by the gate", labels=["reason"])
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily("llmgw_router_keys", "API keys known, revoked ones too", value=len(self.keys))
        yield GaugeMetricFamily("llmgw_router_keys_version", "Version of the table of keys", value=self.keys.version)
        yield GaugeMetricFamily("llmgw_router_usage_unkept", "Batches of usage not in the store", value=self.unkept())


class Ticket:
    """One admitted request: ``body`` is what the engine gets, ``lines`` go into the answer's head, and its events go
    through ``filter``. ``answer`` is set by whoever asks an engine."""

    __slots__ = ("_gate", "answer", "body", "filter", "grant", "holder", "lines", "model", "prompt")

    def __init__(self, gate: Gate, holder: Holder | None, model: str, body: bytes) -> None:
        self._gate: Gate | None = gate
        self.holder = holder
        self.model = model
        self.body = body
        self.lines = b""
        self.filter: UsageFilter | None = None
        self.grant: Grant | None = None
        self.answer: Answer | None = None
        self.prompt = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.settle(self, left=kind is not None and issubclass(kind, trio.Cancelled | OSError))


def _rate_lines(holder: Holder, requests: int, tokens: int, reset_s: float) -> bytes:
    """As OpenAI's clients know them (https://platform.openai.com/docs/guides/rate-limits)."""
    limits_ = holder.key.limits
    reset = math.ceil(reset_s) if reset_s > 0 else 0
    of_requests = limits_.requests_per_minute, requests, reset
    of_tokens = limits_.tokens_per_minute, tokens, reset
    if limits_.tokens_per_minute is None:
        return b"" if limits_.requests_per_minute is None else _REQUESTS_LEFT % of_requests
    if limits_.requests_per_minute is None:
        return _TOKENS_LEFT % of_tokens
    return _BOTH_LEFT % (*of_requests, *of_tokens)


_REQUESTS_LEFT = (
    b"x-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\nx-ratelimit-reset-requests: %ds\r\n"
)
_TOKENS_LEFT = _REQUESTS_LEFT.replace(b"requests", b"tokens")
_BOTH_LEFT = _REQUESTS_LEFT + _TOKENS_LEFT


_WORDS = {
    "requests": ("requests a minute", "rate_limit_exceeded"),
    "tokens": ("tokens a minute", "rate_limit_exceeded"),
    "concurrent": ("requests at once", "concurrency_limit_exceeded"),
    "budget": ("tokens or cost", "insufficient_quota"),
}


def _too_much(refused: Refused, lines: bytes) -> ApiError:
    """429. Where waiting a little does not help, the client libraries are told not to try again by themselves."""
    words, code = _WORDS[refused.what]
    if refused.what == "budget":
        message = "The budget of this API key is used up."
    else:
        message = f"Rate limit of this API key reached: {refused.limit} {words}, {refused.used} used"
        message += f", {refused.asked} asked for." if refused.what == "tokens" else "."
    after = refused.after_s
    if after is None:
        message += " This request can never be granted as it is."
        if refused.what == "tokens":
            message += " Ask for fewer tokens: lower max_tokens or shorten the prompt."
    if after is None or refused.what == "budget":
        lines += b"x-should-retry: false\r\n"
    return ApiError(429, message, code, retry_after_s=None if after is None else again_in(after), lines=lines)
