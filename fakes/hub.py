"""A fake hub of weights: answers over real HTTP what huggingface_hub asks, with made-up files, faults included.

    with Hub({"org/tiny": {"config.json": b"{}", "model.safetensors": bytes(1000)}}) as hub: … hub.url …

What huggingface_hub 2.4 asks: ``GET /api/models/ORG/NAME/revision/REV?blobs=true`` (commit, files with size, git's
blob id, and for large files the sha256), ``HEAD`` and ``GET /ORG/NAME/resolve/COMMIT/FILE`` (``X-Repo-Commit``,
``ETag``; for large files ``X-Linked-Etag``, ``X-Linked-Size`` and a redirect to where they lie), with ``Range``.
A refusal says which in ``X-Error-Code``. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import attrs

_LFS = (".safetensors", ".gguf", ".bin")
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_FILE = re.compile(r"/(cdn/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CHUNK = 16 * 1024


@attrs.define
class Faults:
    """What goes wrong. The numbers count down as they happen.

    ``busy`` requests are answered 429, ``broken`` with 503; ``cut`` transfers of a large file end in the middle.
    ``wrong`` are the names of files whose bytes are altered on the way. With ``gated`` only the right token gets in.
    A transfer of a large file stops after ``hold_after`` bytes until :attr:`Hub.go` is set.
    """

    busy: int = 0
    broken: int = 0
    cut: int = 0
    wrong: tuple[str, ...] = ()
    gated: bool = False
    hold_after: int | None = None


class Hub:
    """The hub; ``repositories`` have their files' bytes by name. Use it as a context manager."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], *, token: str = "hub-token") -> None:
        self.repositories = repositories
        self.token = token
        self.faults = Faults()
        self.asked: list[str] = []
        self.bytes_sent: Counter[str] = Counter()
        self.authorizations: set[str] = set()
        self.held = threading.Event()
        self.go = threading.Event()
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.hub = hub
                super().setup()

        # Large files lie at another address, as they do in truth: huggingface_hub follows a redirect within the hub.
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        self._threads = [
            threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True) for s in self._servers
        ]

    @property
    def url(self) -> str:
        """Its address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def cdn(self) -> str:
        """Where large files lie."""
        return f"http://127.0.0.1:{self._servers[1].server_address[1]}"

    def commit(self, repository: str) -> str:
        """The commit that ``main`` is: another one as soon as a file changes."""
        made = hashlib.sha1(usedforsecurity=False)
        for name, content in sorted(self.repositories[repository].items()):
            made.update(f"{name}\0{git_sha1(content)}\n".encode())
        return made.hexdigest()

    def taken(self, fault: str) -> bool:
        """Whether this fault is due now; counted down."""
        with self.lock:
            left = int(getattr(self.faults, fault))
            setattr(self.faults, fault, max(0, left - 1))
            return left > 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(5)


def git_sha1(content: bytes) -> str:
    """What git calls a blob of this content."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            return  # a client that was killed

    def log_message(self, *_args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if header := self.headers.get("authorization"):
            hub.authorizations.add(header)
        if hub.taken("busy"):
            self._say(429, {"Retry-After": "0"})
        elif hub.taken("broken"):
            self._say(503, {})
        elif (api := _API.fullmatch(path)) is not None:
            self._model(api[1], api[2] or "main")
        elif (file := _FILE.fullmatch(path)) is not None:
            self._file(file[2], file[3], file[4], at_cdn=file[1] is not None, body=body)
        else:
            self._say(404, {"X-Error-Code": "EntryNotFound"})

    def _known(self, repository: str, revision: str) -> bool:
        hub = self.hub
        if repository not in hub.repositories:
            self._say(401 if hub.token not in (self.headers.get("authorization") or "") else 404,
                      {"X-Error-Code": "RepoNotFound"})  # fmt: skip
            return False
        if revision not in ("main", hub.commit(repository)):
            self._say(404, {"X-Error-Code": "RevisionNotFound"})
            return False
        return True

    def _gated(self) -> bool:
        hub = self.hub
        if hub.faults.gated and self.headers.get("authorization") != f"Bearer {hub.token}":
            self._say(403 if self.headers.get("authorization") else 401, {"X-Error-Code": "GatedRepo"})
            return True
        return False

    def _model(self, repository: str, revision: str) -> None:
        if not self._known(repository, revision):
            return
        siblings = []
        for name, content in self.hub.repositories[repository].items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
            if name.endswith(_LFS):
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        said = {"id": repository, "modelId": repository, "sha": self.hub.commit(repository), "siblings": siblings}
        self._say(200, {"Content-Type": "application/json"}, json.dumps(said).encode())

    def _file(self, repository: str, revision: str, name: str, *, at_cdn: bool, body: bool) -> None:
        if not self._known(repository, revision) or (not at_cdn and self._gated()):
            return
        content = self.hub.repositories[repository].get(name)
        if content is None:
            self._say(404, {"X-Error-Code": "EntryNotFound"})
            return
        large = name.endswith(_LFS)
        headers = {"X-Repo-Commit": self.hub.commit(repository), "Accept-Ranges": "bytes"}
        if large and not at_cdn:
            headers |= {
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.cdn}/cdn{urlsplit(self.path).path}",
            }
            self._say(302, headers)
            return
        headers["ETag"] = f'"{git_sha1(content)}"'
        first = 0
        if (ranged := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")) is not None:
            first = int(ranged[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if name in self.hub.faults.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self._say(206 if first else 200, headers, content[first:], name=name if large else "", body=body)

    def _say(
        self, status: int, headers: dict[str, str], content: bytes = b"", *, name: str = "", body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not body or self.command == "HEAD":
            return
        hub = self.hub
        cut = len(content) // 2 if name and hub.taken("cut") else None
        try:
            for at in range(0, len(content), _CHUNK):
                if cut is not None and at >= cut:
                    self.close_connection = True
                    return
                self._hold(name, at)
                piece = content[at : at + _CHUNK]
                self.wfile.write(piece)
                if name:
                    hub.bytes_sent[name] += len(piece)
        except OSError:
            self.close_connection = True

    def _hold(self, name: str, at: int) -> None:
        after = self.hub.faults.hold_after
        if name and after is not None and at >= after and not self.hub.go.is_set():
            self.wfile.flush()
            self.hub.held.set()
            self.hub.go.wait(30)
