"""A fake inference engine: takes vLLM's command line and behaves like vLLM, with made-up words for answers.

    python fakes/engine.py serve MODEL --served-model-name NAME --host HOST --port PORT [vLLM's other flags]

As vLLM does, it refuses connections while it starts, then answers ``/health`` while ``/v1/models`` is still empty, then
serves; it logs the progress of loading, guards ``/v1`` with ``VLLM_API_KEY``, streams server-sent events and has vLLM's
metrics. The same request always gets the same bytes. Faults come by the variable ``FAKE_ENGINE`` (JSON, see
:class:`Behaviour`) and, while it runs, by ``POST /fake/ctl`` with the same keys.

With ``--nnodes N --node-rank R --master-addr A --master-port P`` (and ``--headless`` above rank 0) several of them are
one engine. As vLLM's do, each outlives the others: when another dies, rank 0 answers ``/health`` and hangs, and a rank
above 0 logs an error and stays.

Standard library and trio only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import attrs
import trio

_WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper", "kestrel",
          "lantern", "meadow", "north", "orchard", "prairie", "quartz", "river", "summit", "timber", "umber", "valley",
          "willow", "yonder", "zephyr")  # fmt: skip
_SLEEP = "time.sleep(86400)"
_MAX_HEAD = 64 * 1024
_MAX_BODY = 64 * 1024 * 1024


@attrs.define
class Behaviour:
    """What the engine does, in seconds and words.

    ``hang`` is while it answers requests; ``hang_loading`` in the middle of loading, where it hears nothing any more,
    SIGTERM neither. ``never_ready`` answers ``/health`` and never lists its model.

    ``crash`` is a moment: ``start``, ``load``, ``headers`` (after the response's head), ``stream`` (mid-stream, with
    vLLM's error event and its ``[DONE]``), or ``now`` by ctl. ``exit_code`` goes with it; 0 is as vLLM dies.

    ``workers`` are children, ``escaped_worker`` one in a session of its own; ``daemon`` is nobody's child and ignores
    SIGTERM. ``listen`` is where the API listens whatever it was told, and ``listen_too`` are further addresses, each
    with a port of its own. ``log_mib`` is so much output, in numbered lines of 1 KiB, before the weights are there.
    """

    start_s: float = 0.0
    load_s: float = 0.0
    token_s: float = 0.0
    first_token_s: float = 0.0
    never_ready: bool = False
    hang: bool = False
    hang_loading: bool = False
    ignore_sigterm: bool = False
    workers: int = 0
    escaped_worker: bool = False
    daemon: bool = False
    listen: str = ""
    listen_too: str = ""
    crash: str = ""
    exit_code: int = 1
    log_mib: int = 0

    def update(self, changes: dict[str, Any]) -> None:
        """Take over what is named; an unknown name is an error of the caller."""
        for name, value in changes.items():
            if name not in {a.name for a in attrs.fields(Behaviour)}:
                raise KeyError(name)
            setattr(self, name, value)


@attrs.define
class Counters:
    """What `/metrics` counts."""

    running: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    aborted: int = 0


class HttpError(Exception):
    """An answer that is an error, in vLLM's shape."""

    def __init__(self, status: int, message: str, kind: str) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind

    def body(self) -> bytes:
        """The JSON body."""
        return json.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.status}}
        ).encode()


def log(text: str) -> None:
    """One line as vLLM writes it."""
    print(f"(APIServer pid={os.getpid()}) INFO {time.strftime('%m-%d %H:%M:%S')} [fake_engine.py] {text}", flush=True)


def words(prompt: str, count: int) -> Iterator[str]:
    """The answer to a prompt: always the same words."""
    seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")
    for n in range(count):
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        yield ("" if n == 0 else " ") + _WORDS[(seed >> 16) % len(_WORDS)]


class Request:
    """One parsed request."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path.split("?", 1)[0], headers, body

    def json(self) -> dict[str, Any]:
        """The body as an object."""
        try:
            value = json.loads(self.body)
        except ValueError as wrong:
            raise HttpError(400, f"Invalid JSON: {wrong}", "BadRequestError") from wrong
        if not isinstance(value, dict):
            raise HttpError(400, "body must be an object", "BadRequestError")
        return value


class Connection:
    """An HTTP/1.1 connection: keep-alive, Content-Length bodies in, chunked or whole bodies out."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.buffer = b""

    async def request(self) -> Request | None:
        """The next request, or ``None`` when the peer is done."""
        while b"\r\n\r\n" not in self.buffer:
            if len(self.buffer) > _MAX_HEAD or not (more := await self.stream.receive_some(65536)):
                return None
            self.buffer += more
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _version = first.split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if length > _MAX_BODY:
            return None
        if "100-continue" in headers.get("expect", "").lower():
            await self.stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self.buffer) < length:
            if not (more := await self.stream.receive_some(65536)):
                return None
            self.buffer += more
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return Request(method, path, headers, body)

    async def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A complete answer."""
        reason = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}.get(status, "Error")
        head = f"HTTP/1.1 {status} {reason}\r\nserver: fake-engine\r\ncontent-type: {kind}\r\n"
        await self.stream.send_all(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def begin_events(self) -> None:
        """The head of an event stream."""
        await self.stream.send_all(
            b"HTTP/1.1 200 OK\r\nserver: fake-engine\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def event(self, data: str) -> None:
        """One event as one chunk."""
        payload = f"data: {data}\n\n".encode()
        await self.stream.send_all(b"%x\r\n%b\r\n" % (len(payload), payload))

    async def end_events(self) -> None:
        """The end of the event stream."""
        await self.stream.send_all(b"0\r\n\r\n")


@attrs.frozen
class Ranks:
    """Which part of an engine over several nodes this process is, and where rank 0 is met."""

    count: int
    rank: int
    host: str
    port: int


class Engine:
    """The server behind the command line."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        behaviour: Behaviour,
        ranks: Ranks | None = None,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.name, self.host, self.port = name, host, port
        self.ranks, self.adapters = ranks, adapters
        self.behaviour = behaviour
        self.counters = Counters()
        self.key = os.environ.get("VLLM_API_KEY") or os.environ.get("LLAMA_API_KEY")
        self.loaded = False
        self.children: list[subprocess.Popen[bytes]] = []

    async def run(self) -> None:
        """Start, load, serve until SIGTERM."""
        self._fork_workers()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._signals, nursery)
            await trio.sleep(self.behaviour.start_s)
            self._maybe_crash("start")
            if self.ranks is not None:
                await nursery.start(self._meet, self.ranks)
            if self.ranks is None or self.ranks.rank == 0:
                await nursery.start(self._serve)
            await self._load()

    async def _meet(self, ranks: Ranks, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until every rank is there, then notice when one of them goes."""
        others: list[trio.SocketStream] = []
        if ranks.rank == 0:
            (listener, *_) = await trio.open_tcp_listeners(ranks.port)
            async with listener:
                while len(others) < ranks.count - 1:
                    others.append(await listener.accept())
            for other in others:
                await other.send_all(b"met\n")
        else:
            log(f"Launching vLLM (v0) headless multiproc executor, with head node address {ranks.host}:{ranks.port}")
            while not others:
                try:
                    others.append(await trio.open_tcp_stream(ranks.host, ranks.port))
                except OSError:
                    await trio.sleep(0.05)
            await others[0].receive_some(4)
        log(f"rank {ranks.rank} in world size {ranks.count} is assigned as PP rank 0")
        task_status.started()
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(self._notice_end, other)

    async def _notice_end(self, other: trio.SocketStream) -> None:
        try:
            while await other.receive_some(64):
                pass
        except trio.BrokenResourceError:
            pass
        print("ERROR RuntimeError: Connection closed by peer, a remote worker hangs or is gone", flush=True)
        self.behaviour.hang = True

    def _fork_workers(self) -> None:
        """Workers that outlive their parent unless the whole group is killed, as vLLM's do."""
        sleeper = [sys.executable, "-c", f"import time; {_SLEEP}", "fake-engine-worker", self.name]
        for _ in range(self.behaviour.workers):
            self.children.append(subprocess.Popen(sleeper))
        if self.behaviour.escaped_worker:
            self.children.append(subprocess.Popen(sleeper, start_new_session=True))
        if self.behaviour.daemon:
            stubborn = f"import signal, time; signal.signal(15, signal.SIG_IGN); {_SLEEP}"
            parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}, {self.name!r}])"
            subprocess.run([sys.executable, "-c", parent], start_new_session=True, check=True)

    async def _signals(
        self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            task_status.started()
            async for number in received:
                if not self.behaviour.ignore_sigterm:
                    log(f"got {signal.Signals(number).name}, shutting down")
                    for child in self.children:
                        child.terminate()
                    nursery.cancel_scope.cancel(reason="signal")
                    return

    async def _load(self) -> None:
        log(f"Starting to load model {self.name}...")
        steps = 4
        for step in range(steps + 1):
            percent = 100 * step // steps
            print(f"Loading safetensors checkpoint shards: {percent:>3}% Completed | {step}/{steps}", flush=True)
            if step == steps // 2:
                self._maybe_crash("load")
                if self.behaviour.hang_loading:
                    time.sleep(86400)  # noqa: ASYNC251 - no task may run any more
            if step < steps:
                await trio.sleep(self.behaviour.load_s / steps)
        for line in range(self.behaviour.log_mib * 1024):
            print(f"{line:>1023}", flush=False)
        log("Loading weights took 0.01 seconds")
        if not self.behaviour.never_ready:
            self.loaded = True
            if self.ranks is None or self.ranks.rank == 0:
                log("Application startup complete.")

    def _maybe_crash(self, moment: str) -> None:
        if self.behaviour.crash == moment:
            print(f"ERROR fake engine: told to crash at {moment}", flush=True)
            os._exit(self.behaviour.exit_code)

    async def _serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(self.port, host=self.behaviour.listen or self.host)
        for host in self.behaviour.listen_too.split():
            listeners += await trio.open_tcp_listeners(0, host=host)
        log(f"fake engine on http://{self.host}:{self.port}")
        task_status.started()
        await trio.serve_listeners(self._client, listeners)

    async def _client(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream)
        try:
            while (request := await connection.request()) is not None:
                try:
                    await self._answer(connection, request)
                except HttpError as wrong:
                    await connection.whole(wrong.status, wrong.body())
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (trio.BrokenResourceError, trio.ClosedResourceError, ValueError):
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _answer(self, connection: Connection, request: Request) -> None:
        if (
            request.path.startswith("/v1/")
            and self.key
            and request.headers.get("authorization") != f"Bearer {self.key}"
        ):
            raise HttpError(401, "Unauthorized", "AuthenticationError")
        match request.path:
            case "/health":
                await connection.whole(200, b"", "text/plain")
            case "/version":
                await connection.whole(200, json.dumps({"version": "fake engine"}).encode())
            case "/metrics":
                await connection.whole(200, self._metrics().encode(), "text/plain; version=0.0.4")
            case "/v1/models":
                names = [self.name, *self.adapters] if self.loaded else []
                data = [
                    {"id": n, "object": "model", "created": 0, "owned_by": "fake", "max_model_len": 4096} for n in names
                ]
                await connection.whole(200, json.dumps({"object": "list", "data": data}).encode())
            case "/v1/chat/completions" | "/v1/completions":
                await self._generate(connection, request, chat=request.path.startswith("/v1/chat"))
            case "/v1/embeddings":
                await self._embed(connection, request)
            case "/v1/rerank":
                await self._rerank(connection, request)
            case "/fake/ctl" if request.method == "POST":
                self.behaviour.update(request.json())
                await connection.whole(200, b"{}")
                self._maybe_crash("now")
            case "/fake/counters":
                await connection.whole(200, json.dumps(attrs.asdict(self.counters)).encode())
            case _:
                raise HttpError(404, "Not Found", "NotFoundError")

    def _checked(self, request: Request) -> dict[str, Any]:
        body = request.json()
        if body.get("model") not in (self.name, *self.adapters):
            raise HttpError(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        if not self.loaded:
            raise HttpError(503, "The model is still loading.", "ServiceUnavailable")
        return body

    async def _generate(self, connection: Connection, request: Request, *, chat: bool) -> None:
        body = self._checked(request)
        prompt = json.dumps(body.get("messages" if chat else "prompt"), sort_keys=True)
        if (body.get("messages") if chat else body.get("prompt")) is None:
            raise HttpError(400, f"{'messages' if chat else 'prompt'} is required", "BadRequestError")
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if not isinstance(count, int) or count < 1:
            raise HttpError(400, "max_tokens must be at least 1", "BadRequestError")
        prompt_tokens = max(1, len(prompt) // 4)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
        }
        self.counters.running += 1
        self.counters.prompt_tokens += prompt_tokens
        finished = False
        try:
            await trio.sleep(self.behaviour.first_token_s)
            while self.behaviour.hang:  # noqa: ASYNC110 - a plain flag, set by whoever tests
                await trio.sleep(0.05)
            ident = hashlib.sha256(request.body).hexdigest()[:16]
            if body.get("stream"):
                options = body.get("stream_options") or {}
                await self._stream(
                    connection, prompt, count, ident, chat, usage if options.get("include_usage") else None
                )
            else:
                text = []
                for word in words(prompt, count):
                    await trio.sleep(self.behaviour.token_s)
                    text.append(word)
                    self.counters.generation_tokens += 1
                await connection.whole(200, json.dumps(self._whole(ident, "".join(text), chat, usage)).encode())
            finished = True
        finally:
            self.counters.running -= 1
            if finished:
                self.counters.finished += 1
            else:
                self.counters.aborted += 1

    def _whole(self, ident: str, text: str, chat: bool, usage: dict[str, int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{ident}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": self.name,
            "choices": [choice],
            "usage": usage,
        }

    async def _stream(
        self, connection: Connection, prompt: str, count: int, ident: str, chat: bool, usage: dict[str, int] | None
    ) -> None:
        base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{ident}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 0,
            "model": self.name,
        }

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            await connection.event(json.dumps({**base, "choices": choices, **more}))

        await connection.begin_events()
        self._maybe_crash("headers")
        if chat:
            await event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for n, word in enumerate(words(prompt, count)):
            await trio.sleep(self.behaviour.token_s)
            while self.behaviour.hang:  # noqa: ASYNC110 - a plain flag, set by whoever tests
                await trio.sleep(0.05)
            if self.behaviour.crash == "stream" and n >= count // 2:
                await connection.event(json.dumps({"error": {"message": "EngineCore died", "code": 500}}))
                await connection.event("[DONE]")
                await connection.end_events()
                self._maybe_crash("stream")
            last = "length" if n == count - 1 else None
            content = {"delta": {"content": word}} if chat else {"text": word}
            await event([{"index": 0, **content, "finish_reason": last}])
            self.counters.generation_tokens += 1
        if usage is not None:
            await event([], usage=usage)
        await connection.event("[DONE]")
        await connection.end_events()

    async def _rerank(self, connection: Connection, request: Request) -> None:
        body = self._checked(request)
        documents = body.get("documents")
        if not isinstance(body.get("query"), str) or not isinstance(documents, list):
            raise HttpError(400, "query and documents are required", "BadRequestError")
        results = [
            {"index": index, "document": {"text": text}, "relevance_score": 1 / (2 + index)}
            for index, text in enumerate(documents)
        ]
        await connection.whole(200, json.dumps({"id": "rerank-1", "model": self.name, "results": results}).encode())

    async def _embed(self, connection: Connection, request: Request) -> None:
        body = self._checked(request)
        inputs = body.get("input")
        if not isinstance(inputs, str | list):
            raise HttpError(400, "input is required", "BadRequestError")
        texts = [inputs] if isinstance(inputs, str) else inputs
        data = []
        for index, text in enumerate(texts):
            digest = hashlib.sha256(json.dumps(text).encode()).digest()
            data.append({"object": "embedding", "index": index, "embedding": [b / 255 for b in digest[:16]]})
        tokens = sum(max(1, len(str(t)) // 4) for t in texts)
        answer = {"object": "list", "data": data, "model": self.name,
                  "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}  # fmt: skip
        await connection.whole(200, json.dumps(answer).encode())

    def _metrics(self) -> str:
        labels = f'{{engine="0",model_name="{self.name}"}}'
        return "".join(
            f"# TYPE {name} {kind}\n{name}{labels} {value}\n"
            for name, kind, value in (
                ("vllm:num_requests_running", "gauge", float(self.counters.running)),
                ("vllm:num_requests_waiting", "gauge", 0.0),
                ("vllm:kv_cache_usage_perc", "gauge", min(1.0, self.counters.running / 64)),
                ("vllm:prompt_tokens_total", "counter", float(self.counters.prompt_tokens)),
                ("vllm:generation_tokens_total", "counter", float(self.counters.generation_tokens)),
                ("vllm:request_success_total", "counter", float(self.counters.finished)),
            )
        )


def parse(args: list[str]) -> dict[str, str]:
    """The few flags that matter here; every other one is taken and ignored, as long as it looks like one."""
    found: dict[str, str] = {}
    for at, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if name in (
            "--served-model-name",
            "--alias",
            "--host",
            "--port",
            "--nnodes",
            "--node-rank",
            "--master-addr",
            "--master-port",
        ):
            found[name] = value if equals else args[at + 1]
    return found


def adapters_of(args: list[str]) -> tuple[str, ...]:
    """The names in ``--lora-modules name=path ...``."""
    if "--lora-modules" not in args:
        return ()
    given = args[args.index("--lora-modules") + 1 :]
    return tuple(a.partition("=")[0] for a in itertools.takewhile(lambda a: not a.startswith("-"), given))


def main() -> None:
    """Read the command line and run."""
    flags = parse(sys.argv[1:])
    name = flags.get("--served-model-name") or flags.get("--alias")
    headless = "--headless" in sys.argv
    if name is None or ("--port" not in flags and not headless):
        sys.exit("fake engine: --served-model-name and --port are needed")
    ranks = None
    if (count := int(flags.get("--nnodes", "1"))) > 1:
        ranks = Ranks(count, int(flags["--node-rank"]), flags["--master-addr"], int(flags["--master-port"]))
    behaviour = Behaviour()
    behaviour.update(json.loads(os.environ.get("FAKE_ENGINE", "{}")))
    log("fake engine: behaves like vLLM, has no model, makes its words up")
    host, port = flags.get("--host", "127.0.0.1"), int(flags.get("--port", "0"))
    trio.run(Engine(name, host, port, behaviour, ranks, adapters_of(sys.argv)).run)


if __name__ == "__main__":
    main()
