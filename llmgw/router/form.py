"""The model in a ``multipart/form-data`` body (RFC 7578), which recordings and images come in. Pure."""

from __future__ import annotations

import re

from llmgw.router.body import Asked
from llmgw.router.errors import ApiError

_BOUNDARY = re.compile(
    rb'multipart/form-data[ \t]*;[ \t]*boundary=(?:"([^"\r\n]{1,70})"|([0-9A-Za-z\'()+_,./:=?-]{1,70}))[ \t]*', re.I
)
_NAME = re.compile(rb'^content-disposition:[ \t]*form-data[ \t]*;.*?[; \t]name="([^"\r\n]{0,100})"', re.I | re.M)
_PARTS_MOST = 200
_PART_HEAD_BYTES = 4096


def asked_in_form(body: bytes, content_type: bytes) -> Asked:
    """What a form asks for. Raises :class:`ApiError` with 400."""
    found = _BOUNDARY.fullmatch(content_type)
    if found is None:
        raise _wrong("Content-Type has to be multipart/form-data with a boundary")
    between = b"--" + (found[1] or found[2])
    parts = (b"\r\n" + body).split(b"\r\n" + between, _PARTS_MOST)
    if len(parts) > _PARTS_MOST:
        raise _wrong(f"it has more than {_PARTS_MOST} parts")
    if len(parts) < 2 or parts[0].strip() or parts[-1].strip() != b"--":
        raise _wrong("it does not begin and end with its boundary")
    fields: dict[bytes, bytes] = {}
    for part in parts[1:-1]:
        head, gap, content = part.partition(b"\r\n\r\n")
        named = _NAME.findall(head) if gap and len(head) <= _PART_HEAD_BYTES and head.startswith(b"\r\n") else []
        if len(named) != 1:
            raise _wrong("one of its parts has no name")
        if named[0] in (b"model", b"stream"):
            if named[0] in fields:
                raise _wrong(f"it has the field {named[0].decode()} twice")
            fields[named[0]] = content
    try:
        model = fields.get(b"model", b"").decode()
    except UnicodeDecodeError as wrong:
        raise _wrong("its field model is not UTF-8") from wrong
    if not model:
        raise _wrong("it has no field model", "model")
    return Asked(model, fields.get(b"stream", b"").lower() in (b"true", b"1"))


def renamed(body: bytes, content_type: bytes, model: str) -> bytes:
    """The form with this ``model``. A form that was accepted by :func:`asked_in_form`."""
    found = _BOUNDARY.fullmatch(content_type)
    assert found is not None
    between = b"\r\n--" + (found[1] or found[2])
    parts = (b"\r\n" + body).split(between)
    for at, part in enumerate(parts):
        head, gap, _ = part.partition(b"\r\n\r\n")
        if gap and _NAME.findall(head) == [b"model"]:
            parts[at] = head + gap + model.encode()
    return between.join(parts)[2:]


def _wrong(reason: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"The request's form is wrong: {reason}.", "invalid_body", param)
