"""``llmgw demo --check``: what the demo promises, tried with the real ``openai`` client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from attrs import define, field

from llmgw.cli.demo_files import DemoEngine
from llmgw.cli.demo_run import DemoRun
from llmgw.cli.explain import explain_lines
from llmgw.errors import OperatorError

_PROMPT = "Say something short."


def client(run: DemoRun) -> Any:
    """An ``openai`` client of the demo's router."""
    try:
        import openai
    except ImportError as missing:
        raise OperatorError(
            "llmgw demo --check", "the openai client is not installed", "pip install 'llmgw[demo]'"
        ) from missing
    return openai.OpenAI(base_url=f"http://127.0.0.1:{run.demo.router_port}/v1", api_key="none", max_retries=0)


@define
class _Stream:
    """A streamed answer read in a thread, while other things happen to the daemons."""

    api: Any
    model: str
    tokens: int
    text: list[str] = field(factory=list)
    finish: str | None = None
    failure: BaseException | None = None
    begun: threading.Event = field(factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for chunk in self.api.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": _PROMPT}],
                max_tokens=self.tokens,
                stream=True,
                temperature=0,
                timeout=60,
            ):
                if chunk.choices:
                    self.text.append(chunk.choices[0].delta.content or "")
                    self.finish = chunk.choices[0].finish_reason or self.finish
                    self.begun.set()
        except Exception as failed:  # noqa: BLE001 - handed to the thread that waits for it
            self.failure = failed
            self.begun.set()

    def result(self) -> str:
        assert self.thread is not None
        self.thread.join(90)
        if self.failure is not None:
            raise OperatorError(f"stream of {self.model}", f"was cut: {self.failure}")
        if self.thread.is_alive() or self.finish is None:
            raise OperatorError(f"stream of {self.model}", "did not finish")
        return "".join(self.text)


def _require(ok: bool, what: str, found: object) -> None:
    if not ok:
        raise OperatorError("llmgw demo --check", f"{what}, found {found}")


def _pids(run: DemoRun) -> dict[str, int]:
    return {r["id"]: r["pid"] for r in run.replicas()}


def check(run: DemoRun) -> None:
    """Go through every promise; raises at the first that does not hold."""
    with client(run) as api:
        _check(run, api)


def _check(run: DemoRun, api: Any) -> None:
    say: Callable[[str, str], None] = run.say
    served = [m.id for m in api.models.list()]
    _require(set(served) == set(run.demo.models), f"/v1/models should list {run.demo.models}", served)
    for model in run.demo.models:
        plain = api.chat.completions.create(
            model=model, messages=[{"role": "user", "content": _PROMPT}], max_tokens=8, temperature=0, timeout=60
        )
        _require(bool(plain.choices[0].message.content), f"{model} should answer", plain)
        say("client", f"{model} answered: {plain.choices[0].message.content!r}, {plain.usage.completion_tokens} tokens")
        stream = _Stream(api, model, 8)
        stream.start()
        say("client", f"{model} streamed: {stream.result()!r} in {len(stream.text)} chunks")

    before = _pids(run)
    # Enough of it that it is under way when the agent dies: real engines on tiny models are fast.
    long = _Stream(api, run.demo.models[0], 150 if run.demo.engine.kind is DemoEngine.FAKE else 900)
    long.start()
    long.begun.wait(30)
    run.kill_agent()
    say("client", f"a stream of {run.demo.models[0]} was running when the agent died")
    run.wait("the node to be unreachable", 60, lambda: run.node_state() in ("unreachable", "lost"))
    text = long.result()
    say("client", f"that stream ended whole: {len(text)} characters, finish_reason {long.finish}")
    run.wait("the node to be lost", 60, lambda: run.node_state() == "lost")
    run.wait("placement to say why", 60, lambda: any(m["unplaced"] for m in _models(run)))
    for row in _models(run):
        for line in explain_lines(row):
            say("placement", line)
    answer = api.chat.completions.create(
        model=run.demo.models[0], messages=[{"role": "user", "content": _PROMPT}], max_tokens=8, timeout=60
    )
    say("client", f"without an agent the engine still serves: {answer.choices[0].message.content!r}")

    run.start_agent()
    run.wait("the node to be back", 60, lambda: run.node_state() == "connected")
    run.wait("the replicas to be back", 60, run.all_ready)
    after = _pids(run)
    _require(after == before, f"the engines should be adopted with their pids {before}", after)
    say("check", f"engines adopted, same pids: {', '.join(f'{name} {pid}' for name, pid in sorted(after.items()))}")
    stream = _Stream(api, run.demo.models[1], 8)
    stream.start()
    say("client", f"{run.demo.models[1]} streamed: {stream.result()!r}")


def _models(run: DemoRun) -> list[dict[str, Any]]:
    answer = run.api("models")
    return [] if answer is None else answer["models"]
