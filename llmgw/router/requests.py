"""Which route a request is for: a table of every path that there is. Pure.

Paths are compared as they stand: one that is encoded, doubled or absolute is not one of ours, so no way of writing
another path leads to an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
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


@frozen
class Target:
    """A route. ``form`` bodies are ``multipart/form-data``, ``media`` ones may be as large as recordings and images
    are; ``name`` is the model's of ``/v1/models/<name>``."""

    kind: Kind
    dialect: Dialect = Dialect.OPENAI
    form: bool = False
    media: bool = False
    name: str = ""


_ENGINE = Target(Kind.ENGINE)
_MEDIA = Target(Kind.ENGINE, media=True)
_FORM = Target(Kind.ENGINE, form=True, media=True)
_ANTHROPIC = Target(Kind.ENGINE, Dialect.ANTHROPIC)
_POST: Mapping[bytes, Target] = {
    b"/v1/chat/completions": _ENGINE,
    b"/v1/completions": _ENGINE,
    b"/v1/responses": _ENGINE,
    b"/v1/embeddings": _ENGINE,
    b"/v1/rerank": _ENGINE,
    b"/v1/score": _ENGINE,
    b"/tokenize": _ENGINE,
    b"/detokenize": _ENGINE,
    b"/v1/messages": _ANTHROPIC,
    b"/v1/messages/count_tokens": _ANTHROPIC,
    b"/v1/audio/speech": _MEDIA,
    b"/v1/audio/transcriptions": _FORM,
    b"/v1/audio/translations": _FORM,
    b"/v1/images/generations": _MEDIA,
    b"/v1/images/edits": _FORM,
    b"/v1/images/variations": _FORM,
}
_GET: Mapping[bytes, Target] = {
    b"/v1/models": Target(Kind.MODELS),
    b"/healthz": Target(Kind.HEALTH),
    b"/readyz": Target(Kind.READY),
    b"/metrics": Target(Kind.METRICS),
}
_MODEL_PREFIX = b"/v1/models/"
_MODEL = Target(Kind.MODEL)


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
        if target is None:
            raise ApiError(404, f"There is nothing at {path[:200].decode('latin-1')}.", "not_found")
        if head.method in (b"GET", b"HEAD"):
            return target
        allow = "GET, HEAD"
    raise ApiError(405, f"{head.method.decode()} is not possible here, {allow} is.", "method_not_allowed", allow=allow)
