"""Which route a request is for: a table of every path that there is. Pure.

Paths are compared as they stand: one that is encoded, doubled or absolute is not one of ours, so no way of writing
another path leads to an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from urllib.parse import unquote_to_bytes

from attrs import evolve, frozen

from llmgw.router.errors import ApiError, Dialect
from llmgw.router.http1 import RequestHead


class Kind(Enum):
    """Who answers."""

    ENGINE = "engine"
    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"
    METRICS = "metrics"
    OPTIONS = "options"


@frozen
class Target:
    """A route: its ``path``, and for ``/v1/models/<name>`` the model's ``name``; for OPTIONS what methods it would
    ``allow``. ``form`` bodies are ``multipart/form-data``, ``media`` ones may be as large as recordings are, and
    ``keyed`` routes are for clients with a key where keys are asked for."""

    kind: Kind
    path: bytes = b""
    dialect: Dialect = Dialect.OPENAI
    form: bool = False
    media: bool = False
    keyed: bool = False
    name: str = ""
    allow: str = ""


def _routes(target: Target, paths: Iterable[bytes]) -> dict[bytes, Target]:
    return {path: evolve(target, path=path) for path in paths}


_POST: Mapping[bytes, Target] = {
    **_routes(
        Target(Kind.ENGINE, keyed=True),
        (
            b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings", b"/v1/rerank",
            b"/v1/score", b"/tokenize", b"/detokenize",
        ),
    ),
    **_routes(
        Target(Kind.ENGINE, dialect=Dialect.ANTHROPIC, keyed=True),
        (b"/v1/messages", b"/v1/messages/count_tokens"),
    ),
    **_routes(
        Target(Kind.ENGINE, media=True, keyed=True),
        (b"/v1/audio/speech", b"/v1/images/generations"),
    ),
    **_routes(
        Target(Kind.ENGINE, form=True, media=True, keyed=True),
        (b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/images/edits", b"/v1/images/variations"),
    ),
}  # fmt: skip
_GET: Mapping[bytes, Target] = {
    b"/v1/models": Target(Kind.MODELS, keyed=True),
    b"/healthz": Target(Kind.HEALTH),
    b"/readyz": Target(Kind.READY),
    b"/metrics": Target(Kind.METRICS),
}
_MODEL_PREFIX = b"/v1/models/"
_MODEL = Target(Kind.MODEL, keyed=True)


def target_of(head: RequestHead) -> Target:
    """Where a request goes. Raises :class:`ApiError` with 404 or 405."""
    path = head.target.split(b"?", 1)[0]
    if (target := _POST.get(path)) is not None:
        if head.method == b"POST":
            return target
        allow = "POST"
    else:
        target = _GET.get(path)
        if target is None and path.startswith(_MODEL_PREFIX):
            # Client libraries encode the slashes in a model's name.
            name = unquote_to_bytes(path[len(_MODEL_PREFIX) :]).decode("utf-8", "replace")
            target = evolve(_MODEL, name=name)
        if target is None and path == b"*" and head.method == b"OPTIONS":
            return Target(Kind.OPTIONS, path, allow="GET, HEAD, POST, OPTIONS")
        if target is None:
            raise ApiError(404, f"There is nothing at {path[:200].decode('latin-1')}.", "not_found")
        if head.method in (b"GET", b"HEAD"):
            return target
        allow = "GET, HEAD"
    if head.method == b"OPTIONS":
        return Target(Kind.OPTIONS, path, allow=f"{allow}, OPTIONS")
    raise ApiError(405, f"{head.method.decode()} is not possible here, {allow} is.", "method_not_allowed", allow=allow)
