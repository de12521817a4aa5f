"""A real control plane, a real agent and fake engines, as the demo runs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from attrs import define, field

from llmgw.cli.demo_files import Demo, DemoEngine, Engine, prepare
from llmgw.cli.demo_run import DemoRun, survivors


@define
class Stream:
    """One streamed chat completion, read in a thread while the test does something to the daemons.

    The client is the stream's own, and closed with it: what a failure's traceback held would else be found, unclosed,
    by whichever test runs when it is collected.
    """

    api: openai.OpenAI
    model: str
    tokens: int
    text: str = ""
    finish: str | None = None
    failure: BaseException | None = None
    begun: threading.Event = field(factory=threading.Event)
    thread: threading.Thread | None = None
    unwanted: bool = False

    def start(self) -> Stream:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        assert self.begun.wait(40)
        return self

    def _read(self) -> None:
        try:
            with self.api:
                self._take()
        except Exception as failed:
            self.failure = failed
            self.begun.set()

    def _take(self) -> None:
        for chunk in self.api.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": "Count to a hundred."}],
            max_tokens=self.tokens,
            stream=True,
            temperature=0,
            timeout=60,
        ):
            if self.unwanted:
                return
            if chunk.choices:
                self.text += chunk.choices[0].delta.content or ""
                self.finish = chunk.choices[0].finish_reason or self.finish
                if self.text:
                    self.begun.set()

    def hang_up(self) -> None:
        """Close the connection at the next chunk, as a client that has read enough does."""
        assert self.thread is not None
        self.unwanted = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "no chunk came"
        assert self.failure is None, repr(self.failure)
        assert self.finish is None, "it ended before it was hung up on"

    def result(self) -> str:
        assert self.thread is not None
        self.thread.join(90)
        assert not self.thread.is_alive(), "the stream never ended"
        assert self.failure is None, repr(self.failure)
        assert self.finish is not None, f"cut after {self.text!r}"
        return self.text


@define
class System:
    """A running system and the tools to look at it."""

    demo: Demo
    run: DemoRun
    lines: list[str]

    def client(self, key: str = "none") -> openai.OpenAI:
        """A client of the router; the caller closes it."""
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.demo.router_port}/v1", api_key=key, max_retries=0)

    def stream(self, tokens: int, model: str | None = None) -> Stream:
        return Stream(self.client(), model or self.demo.models[0], tokens).start()

    def whole(self, tokens: int) -> str:
        """What a stream of so many tokens says when nobody disturbs it."""
        return self.stream(tokens).result()

    def pids(self) -> dict[str, int]:
        return {r["id"]: r["pid"] for r in self.run.replicas()}

    def until(self, what: str, done: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            logs = f"{self.run.log_tail('server', 30)}\n---\n{self.run.log_tail('agent', 30)}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{logs}"
            time.sleep(0.05)


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[System]:
    """Everything written, nothing started; whatever the test starts is stopped, and nothing may be left."""
    lines: list[str] = []
    demo = prepare(tmp_path / "d", Engine(DemoEngine.FAKE), None)
    settings = demo.folder / "settings.yaml"
    settings.write_text(settings.read_text().replace('"load_s": 4.0', '"load_s": 0.4').replace("1.5,", "0.4,"))
    run = DemoRun(demo, lambda subject, text: lines.append(f"{subject} {text}"))
    try:
        yield System(demo, run, lines)
    finally:
        run.stop()
        assert not list(survivors(demo.folder))


@pytest.fixture
def system(prepared: System) -> System:
    """A server, an agent and two ready replicas."""
    prepared.run.start_server()
    prepared.run.start_agent()
    prepared.run.wait("every replica to be ready", 40, prepared.run.all_ready)
    return prepared
