"""What a request is about: its route and its model. Pure."""

from __future__ import annotations

from enum import Enum
from urllib.parse import unquote_to_bytes

import msgspec

from llmgw.router.errors import ApiError
from llmgw.router.http1 import RequestHead


class Kind(Enum):
    """What a target leads to."""

    ENGINE = "engine"
    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"
    METRICS = "metrics"


_POST = dict.fromkeys(
    (b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/rerank"),
    Kind.ENGINE,
)
_GET = {b"/v1/models": Kind.MODELS, b"/healthz": Kind.HEALTH, b"/readyz": Kind.READY, b"/metrics": Kind.METRICS}
_MODEL_PREFIX = b"/v1/models/"


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None


_decode = msgspec.json.Decoder(_Body).decode


def kind_of(head: RequestHead) -> tuple[Kind, bytes]:
    """Where a request goes, and its path without the query. Raises :class:`ApiError` with 404 or 405.

    Paths are compared as they stand: one that is encoded, doubled or absolute is not one of ours, so no way of
    writing another path leads to an engine.
    """
    path = head.target.split(b"?", 1)[0]
    if (kind := _POST.get(path)) is not None:
        allow = "POST"
        if head.method == b"POST":
            return kind, path
    elif (kind := _GET.get(path)) is not None or path.startswith(_MODEL_PREFIX):
        allow = "GET, HEAD"
        if head.method in (b"GET", b"HEAD"):
            return kind or Kind.MODEL, path
    else:
        raise ApiError(404, f"There is nothing at {path[:200].decode('latin-1')}.", "not_found")
    raise ApiError(405, f"{head.method.decode()} is not possible here, {allow} is.", "method_not_allowed", allow=allow)


def model_of(path: bytes) -> str:
    """The model's name in ``/v1/models/<name>``; client libraries encode the slashes in it."""
    return unquote_to_bytes(path[len(_MODEL_PREFIX) :]).decode("utf-8", "replace")


def model_asked(body: bytes) -> str:
    """The model that a request's JSON body asks for. Raises :class:`ApiError` with 400."""
    try:
        found = _decode(body)
    except msgspec.ValidationError as wrong:
        param = "model" if "model" in str(wrong) else None
        raise ApiError(400, f"The request's body is wrong: {wrong}.", "invalid_body", param) from wrong
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise ApiError(400, f"The request's body is not valid JSON: {wrong}.", "invalid_json") from wrong
    return found.model
