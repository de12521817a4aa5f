"""A request's JSON body, bounded in size and time."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import attrs
import cattrs
import orjson
import trio
from starlette.requests import ClientDisconnect, Request

from llmgw.errors import LlmgwError
from llmgw.settings.convert import WrongValue, strict_converter
from llmgw.settings.faults import nearest

MAX_BYTES = 2 * 1024 * 1024
_WITHIN_S = 10.0


def _whole(value: Any, kind: Any) -> int:
    """JSON has one kind of number (RFC 8259, section 6): 3.0 is 3."""
    exact = isinstance(value, float) and value.is_integer()
    return _STRICT.structure(int(value) if exact else value, kind)  # type: ignore[no-any-return]


_STRICT, _CONVERTER = strict_converter(), strict_converter(forbid_unknown=True)
_CONVERTER.register_structure_hook(int, _whole)


class RefusedBody(LlmgwError):
    """A body that is not read, or is none. ``status`` is the answer's."""

    def __init__(self, status: int, reason: str, remedy: str = "") -> None:
        super().__init__("the request's body", reason, remedy)
        self.status = status


async def json_of(request: Request) -> Any:
    """The body; raises :class:`RefusedBody` when it is too large, too slow or not JSON."""
    parts: list[bytes] = []
    size = 0
    with trio.move_on_after(_WITHIN_S) as waited:
        try:
            async with aclosing(request.stream()) as stream:
                async for part in stream:
                    size += len(part)
                    if size > MAX_BYTES:
                        raise RefusedBody(413, f"is larger than {MAX_BYTES} bytes")
                    parts.append(part)
        except ClientDisconnect as gone:
            raise RefusedBody(400, "ended early") from gone
    if waited.cancelled_caught:
        raise RefusedBody(408, f"was not there within {_WITHIN_S:.0f} s")
    try:
        return orjson.loads(b"".join(parts))
    except ValueError as wrong:
        raise RefusedBody(400, f"is not valid JSON: {wrong}") from wrong


def shaped(value: Any, kind: type[Any]) -> Any:
    """A body's value as an object of this class; raises :class:`RefusedBody` with everything that is wrong with it."""
    try:
        return _CONVERTER.structure(value, kind)
    except cattrs.BaseValidationError as wrong:
        raise RefusedBody(
            400, "; ".join(cattrs.transform_error(wrong, format_exception=_words))[:500], "see docs/ctl.md"
        ) from wrong
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        # What is no object at all fails before anything of it is looked at.
        raise RefusedBody(400, f"is not what is wanted here: {str(wrong)[:500]}", "see docs/ctl.md") from wrong


def _words(wrong: BaseException, kind: type | None) -> str:
    """What is wrong with one value; what a whole object's fields may not be is said by their own check."""
    if isinstance(wrong, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(wrong.cl)]
        return "; ".join(f"unknown key {name[:50]}, {nearest(name, known)}" for name in sorted(wrong.extra_fields))
    ours = isinstance(wrong, WrongValue) or (kind is None and isinstance(wrong, ValueError))
    return str(wrong) if ours else cattrs.v.format_exception(wrong, kind)


async def structured(request: Request, kind: type[Any]) -> Any:
    """The body as an object of this class. Raises as :func:`json_of` and :func:`shaped` do."""
    return shaped(await json_of(request), kind)


def actor(request: Request) -> str:
    """Who asks, in the words of the audit."""
    name: str = request.state.actor
    return name


def named(body: Any) -> frozenset[str] | None:
    """The nodes that a body names; ``None`` when it leaves them out. Raises :class:`RefusedBody`."""
    if not isinstance(body, dict) or not set(body) <= {"nodes"}:
        raise RefusedBody(400, "should be an object with nothing but nodes in it")
    nodes = body.get("nodes")
    if nodes is None:
        return None
    if not isinstance(nodes, list) or not all(isinstance(name, str) for name in nodes):
        raise RefusedBody(400, "should have a list of names as nodes")
    return frozenset(nodes)
