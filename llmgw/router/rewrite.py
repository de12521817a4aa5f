"""Bodies that an engine has to get otherwise than they came: another name for the model, a salt for its cache. Pure.

As a rule a member is put in, or a value exchanged, where it stands, and everything else keeps its bytes. Only a body in
which that place is not beyond doubt is written anew.
"""

from __future__ import annotations

import json
import re

import orjson

from llmgw.router.body import is_odd

_MODEL = re.compile(rb'"model"\s*:\s*"((?:[^"\\]|\\.)*)"')
SALTED = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"})
"""Where vLLM and SGLang take ``cache_salt``: requests with different ones share nothing of the KV cache."""


def rewritten(body: bytes, model: str | None = None, salt: str | None = None) -> bytes:
    """The JSON body with this ``model``, and with this ``cache_salt`` in place of any other.

    A body that was accepted by :func:`llmgw.router.body.asked_in_json`.
    """
    if is_odd(body) or b'"cache_salt"' in body or (model is not None and body.count(b'"model"') != 1):
        members = json.loads(body)
        members.pop("cache_salt", None)
        if model is not None:
            members["model"] = model
        if salt is not None:
            members["cache_salt"] = salt
        return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    if model is not None:
        found = _MODEL.search(body)
        assert found is not None
        body = body[: found.start(1) - 1] + orjson.dumps(model) + body[found.end(1) + 1 :]
    if salt is not None:
        at = body.index(b"{") + 1
        body = body[:at] + b'"cache_salt":' + orjson.dumps(salt) + b"," + body[at:]
    return body
