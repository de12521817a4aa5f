"""The admin API's routes for the audit, and for a backup of the store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import attrs
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmgw.errors import OperatorError
from llmgw.store.audit import AuditRow, Chain, Noted
from llmgw.web.jobs import Guard

_CHUNK = 256 * 1024
_CLOSE_S = 5.0
SEQ_MOST = 2**53


class History(Protocol):
    """Who has the audit and the store; see :class:`llmgw.store.sql.SqlStore`. Refusals are :class:`OperatorError`."""

    async def audit(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]: ...

    async def verify_audit(self, noted: Noted | None = None) -> Chain: ...

    async def backup(self, path: Path) -> None: ...


class _File(Response):
    """An answer with the content of an open file, which is closed with it."""

    def __init__(self, file: BufferedReader) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, "application/vnd.sqlite3")
        del self.headers["content-length"]
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with trio.wrap_file(self._file) as file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while chunk := await file.read(_CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def number(request: Request, name: str, usual: int | None, most: int) -> int | None:
    """A whole number of the query, from 1 to ``most``. Raises :class:`OperatorError`."""
    text = request.query_params.get(name)
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and 1 <= int(text) <= most):
        raise OperatorError(name, f"must be a whole number from 1 to {most}, found {text[:20]!r}")
    return int(text)


def audit_routes(history: History, folder: Path, now: Callable[[], float], guarded: Guard) -> list[Route]:
    """``audit``, ``audit/verify`` and ``backup`` under ``/api/v1/``. ``folder`` is for what is on its way out."""
    one = trio.CapacityLimiter(1)  # each reads all that there is

    async def audit(request: Request) -> Any:
        limit = number(request, "limit", 50, 1000)
        assert limit is not None
        rows = await history.audit(limit, number(request, "before", None, SEQ_MOST))
        return {"rows": [attrs.asdict(row) for row in rows], "now": now()}

    async def verify(request: Request) -> Any:
        text = request.query_params.get("noted")
        noted = None if text is None else Noted.of(text)
        if text is not None and noted is None:
            raise OperatorError("noted", f"is not SEQ:DIGEST: {text[:100]!r}", "give what audit/verify answered")
        async with one:
            chain = await history.verify_audit(noted)
        last = chain.newest
        return {
            "intact": chain.wrong is None, "wrong": chain.wrong, "rows": last and last.seq,
            "digest": last and last.digest, "newest": last and str(last),
        }  # fmt: skip

    async def backup(_request: Request) -> Any:
        async with one:
            made = await trio.to_thread.run_sync(lambda: Path(tempfile.mkdtemp(prefix=".backup-", dir=folder)))
            path = made / "llmgw.backup"
            try:
                await history.backup(path)
                file = await trio.to_thread.run_sync(lambda: path.open("rb"))
            finally:
                # It is open: its name is not needed any more, however this ends.
                with trio.move_on_after(_CLOSE_S, shield=True):
                    await trio.to_thread.run_sync(_remove, path, made)
        return _File(file)

    return [
        Route("/api/v1/audit", guarded(audit)),
        Route("/api/v1/audit/verify", guarded(verify)),
        Route("/api/v1/backup", guarded(backup)),
    ]


def _remove(path: Path, folder: Path) -> None:
    path.unlink(missing_ok=True)
    folder.rmdir()
