"""What the router counts. Counting costs a dictionary look-up a request; the exposition is built when it is asked for.

Labels are bounded: only models and endpoints of the table become labels, never what a client made up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmgw.router.metrics_files import MetricsFiles, families_of
from llmgw.telemetry.logging import logger

_log = logger("router")

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Distribution:
    """A histogram's counts."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition wants them."""
        made, running = [], 0
        for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), self.counts, strict=True):
            running += count
            made.append((bound, float(running)))
        return made


class RouterMetrics(Collector):
    """Counters of one worker; ``files`` are where it sees the others'.

    ``in_flight`` and ``waiting`` are asked for when the exposition is built.
    """

    def __init__(
        self, in_flight: Callable[[], Mapping[tuple[str, str], int]], waiting: Callable[[], Mapping[str, int]]
    ) -> None:
        self._in_flight = in_flight
        self._waiting = waiting
        self._choices: dict[tuple[str, str], int] = defaultdict(int)
        self._requests: dict[tuple[str, str, int], int] = defaultdict(int)
        self._rejected: dict[str, int] = defaultdict(int)
        self._retries: dict[tuple[str, str], int] = defaultdict(int)
        self._broken: dict[tuple[str, str], int] = defaultdict(int)
        self._gone: dict[str, int] = defaultdict(int)
        self._tokens: dict[tuple[str, str], int] = defaultdict(int)
        self._duration: dict[str, Distribution] = defaultdict(Distribution)
        self._first_byte: dict[str, Distribution] = defaultdict(Distribution)
        self.files: MetricsFiles | None = None
        self._snapshots = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, more: Collector) -> None:
        """Expose these too."""
        self._registry.register(more)

    def answered(
        self, model: str, endpoint: str, status: int, seconds: float, first_byte_s: float, usage: tuple[int, int] | None
    ) -> None:
        """An engine's answer was passed on to its end."""
        self._requests[model, endpoint, status] += 1
        self._duration[model].observe(seconds)
        self._first_byte[model].observe(first_byte_s)
        if usage is not None:
            self._tokens[model, "prompt"] += usage[0]
            self._tokens[model, "completion"] += usage[1]

    def chosen(self, model: str, reason: str) -> None:
        """An engine was chosen for a request, and why that one."""
        self._choices[model, reason] += 1

    @property
    def choices(self) -> dict[str, dict[str, int]]:
        """How many engines were chosen, by model and reason."""
        found: dict[str, dict[str, int]] = {}
        for (model, reason), count in self._choices.items():
            found.setdefault(model, {})[str(reason)] = count
        return found

    def rejected(self, status: int) -> None:
        """The router answered by itself, with an error."""
        self._rejected[str(status)] += 1

    def retried(self, model: str, endpoint: str) -> None:
        """This engine failed before anything was passed on, and another was asked."""
        self._retries[model, endpoint] += 1

    def broken(self, model: str, endpoint: str) -> None:
        """An engine ended an answer in its middle."""
        self._broken[model, endpoint] += 1

    def client_gone(self, model: str) -> None:
        """A client left before its answer was complete."""
        self._gone[model] += 1

    def collect(self) -> Iterable[Metric]:
        """Every family, for Prometheus."""
        requests = CounterMetricFamily(
            "llmgw_router_requests", "Answers of engines", labels=["model", "endpoint", "status"]
        )
        for (model, endpoint, status), count in self._requests.items():
            requests.add_metric([model, endpoint, str(status)], count)
        yield requests
        for name, help_text, label, counts in (
            ("llmgw_router_rejected", "Errors that the router answered by itself", "status", self._rejected),
            ("llmgw_router_client_gone", "Clients that left before the end", "model", self._gone),
        ):
            family = CounterMetricFamily(name, help_text, labels=[label])
            for key, count in counts.items():
                family.add_metric([key], count)
            yield family
        for name, help_text, labels, pairs in (
            ("llmgw_router_choices", "Engines chosen, by why that one", ["model", "reason"], self._choices),
            ("llmgw_router_retries", "Requests moved to another engine", ["model", "endpoint"], self._retries),
            ("llmgw_router_broken", "Answers that an engine cut short", ["model", "endpoint"], self._broken),
            ("llmgw_router_tokens", "Tokens by the engines' own count", ["model", "kind"], self._tokens),
        ):
            family = CounterMetricFamily(name, help_text, labels=labels)
            for pair, count in pairs.items():
                family.add_metric(list(pair), count)
            yield family
        for name, help_text, distributions in (
            ("llmgw_router_duration_seconds", "From the request's end to the answer's end", self._duration),
            (
                "llmgw_router_first_byte_seconds",
                "From the request's end to the first byte of the answer",
                self._first_byte,
            ),
        ):
            histogram = HistogramMetricFamily(name, help_text, labels=["model"])
            for model, distribution in distributions.items():
                histogram.add_metric([model], distribution.buckets(), distribution.total_s)
            yield histogram
        gauge = GaugeMetricFamily("llmgw_router_in_flight", "Requests at engines now", labels=["model", "endpoint"])
        for pair, count in self._in_flight().items():
            gauge.add_metric(list(pair), count)
        yield gauge
        held = GaugeMetricFamily("llmgw_router_waiting", "Requests that wait for an engine", labels=["model"])
        for model, count in self._waiting().items():
            held.add_metric([model], count)
        yield held

    def render(self) -> bytes:
        """The text exposition of this worker alone."""
        return generate_latest(self._registry)

    async def scrape(self) -> bytes:
        """The text exposition of all workers: of the others as they last wrote it down, a second ago at most."""
        if self.files is None:
            return self.render()
        self._snapshots += 1
        mine = families_of(self._registry.collect())
        try:
            return await trio.to_thread.run_sync(self.files.sum, self._snapshots, mine)
        except OSError as failed:
            _log.error("metrics of the other workers cannot be read", error=failed.strerror)
            return self.render()

    async def write(self) -> None:
        """Let the other workers see these metrics. Raises ``OSError``."""
        if self.files is not None:
            self._snapshots += 1
            await trio.to_thread.run_sync(self.files.write, self._snapshots, families_of(self._registry.collect()))
