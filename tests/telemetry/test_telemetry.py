from __future__ import annotations

import io
import json

import pytest
import structlog

from llmgw.scheduler.decide import decide
from llmgw.settings.daemon import Log, LogFormat, LogLevel
from llmgw.telemetry.logging import Lines, configure, logger
from llmgw.telemetry.metrics import ControlPlaneMetrics
from tests.scheduler.clusters import NOW, cluster, device, model, node


@pytest.fixture(autouse=True)
def quiet_again():
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_lines_carry_who_and_what_and_no_secret() -> None:
    out = io.StringIO()
    configure(Log(LogLevel.INFO, LogFormat.JSON), "agent", out)
    log = logger("shard")
    log.debug("not this")
    log.warning("this", shard="m-1.0", api_key="sk-x", token="t")
    (line,) = out.getvalue().splitlines()
    said = json.loads(line)
    assert (said["event"], said["level"], said["daemon"], said["subject"]) == ("this", "warning", "agent", "shard")
    assert (said["api_key"], said["token"]) == ("[redacted]", "[redacted]")
    assert said["timestamp"].endswith("Z")


def test_text_for_people_and_exceptions_in_both() -> None:
    for form in (LogFormat.TEXT, LogFormat.JSON):
        out = io.StringIO()
        configure(Log(LogLevel.ERROR, form), "server", out)
        try:
            raise ValueError("boom")
        except ValueError:
            logger("x").exception("failed")
        assert "boom" in out.getvalue()
        assert "failed" in out.getvalue()


@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_what_somebody_else_said_neither_steers_a_terminal_nor_fills_a_disk(form: LogFormat) -> None:
    said = "\x1b[2J\nfake=line\u202e\x07\u2028"
    out = io.StringIO()
    configure(Log(LogLevel.INFO, form), "server", out)
    log = logger("link")
    log.warning(f"quoted {said}", short=said, tag="\x1b[31m", long="x" * 4_000_000, many=[said])
    try:
        raise ValueError(said)
    except ValueError:
        log.exception("failed")
    lines = out.getvalue().splitlines(keepends=True)
    assert all(line[:-1].isprintable() for line in lines), "no control character but the line's own end"
    assert not any(line.lstrip().startswith("fake=") for line in lines if form is LogFormat.JSON)
    assert len(out.getvalue()) < 10_000
    assert "x… (4000000 characters)" in out.getvalue() or "x\\u2026 (4000000 characters)" in out.getvalue()


@pytest.mark.parametrize(
    ("form", "level"), [(LogFormat.JSON, "info"), (LogFormat.TEXT, "info"), (LogFormat.JSON, "warning")]
)
def test_lines_of_one_kind_are_as_any_other_line(form: LogFormat, level: str) -> None:
    out, other = io.StringIO(), io.StringIO()
    fields = {"path": "/\u2028\x1b", "n": 7}
    configure(Log(LogLevel(level), form), "router", other)
    logger("access").info("request", **fields)
    configure(Log(LogLevel(level), form), "router", out)
    lines = Lines("access", "request")
    for _ in range(100):
        lines.add(fields)
    written = len(out.getvalue().splitlines())
    assert written == {"JSON": 64, "TEXT": 100}[form.name] * (level == "info")
    lines.flush()
    lines.flush()
    assert len(out.getvalue().splitlines()) == 100 * (level == "info")

    def read(line: str) -> object:
        return {**json.loads(line), "timestamp": ""} if form is LogFormat.JSON else line.partition(" ")[2]

    assert all(read(line) == read(other.getvalue()[:-1]) for line in out.getvalue().splitlines())


def test_gauges_are_what_the_last_pass_saw() -> None:
    metrics = ControlPlaneMetrics()
    state = cluster((node(devices=(device(0), device(1, fault="broken"))),), (model(replicas=2),))
    outcome = decide(state, NOW)
    metrics.observe_pass(0.01, state, outcome)
    text = metrics.render().decode()
    for line in (
        'llmgw_nodes{state="connected"} 1.0',
        'llmgw_devices{device_class="h100-80g"} 2.0',
        "llmgw_devices_faulty 1.0",
        'llmgw_replicas{goal="run",model="m"} 1.0',
        'llmgw_unplaced{model="m"} 1.0',
        'llmgw_decisions_total{kind="place"} 1.0',
    ):
        assert line in text
    metrics.observe_pass(0.01, cluster((), ()), decide(cluster((), ()), NOW))
    assert "llmgw_devices{" not in metrics.render().decode()
