"""The OpenAPI 3.1 document of the admin API, made of the table of operations alone. Pure.

Format: https://spec.openapis.org/oas/v3.1.1.html.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from llmgw import __version__
from llmgw.web.schema import Definitions
from llmgw.web.table import OPERATIONS, Operation, needs_leader

Json = dict[str, Any]

_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_SAID = {
    400: "The request cannot be carried out; the reason and what to do.",
    401: "Nobody that is known: a token or a certificate is missing or not valid.",
    403: "The role is not enough.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "Not as things are now.",
    413: "The body is too large.",
    421: "Another control plane leads, and can be asked this.",
    503: "The store cannot be used now, or does not take writes.",
}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "remedy": {"type": "string"}},
            "required": ["reason", "remedy"],
        }
    },
    "required": ["error"],
}
_NOT_LEADER: Json = {
    "allOf": [{"$ref": "#/components/schemas/Error"}],
    "properties": {"leader": {"type": "string", "description": "HOST:PORT of its admin API; empty: nobody leads."}},
    "required": ["leader"],
}


@cache
def document() -> Json:
    """The whole document."""
    classes = Definitions(may_be_left_out=True, closed=True, place="#/components/schemas/")
    answers = Definitions(place="#/components/schemas/")
    paths: Json = {}
    for operation in OPERATIONS:
        path = "/api/v1/" + _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, classes, answers)
    made = dict(sorted((answers.made | classes.made).items()))
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmgw admin API", "version": __version__},
        "security": [{"token": []}, {"certificate": []}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "NotLeader": _NOT_LEADER, **made},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "certificate": {"type": "mutualTLS", "description": "A person's certificate from the client CA."},
            },
        },
    }


def _operation(operation: Operation, classes: Definitions, answers: Definitions) -> Json:
    path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(operation.path)
    ]
    query = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": said}
        for name, (schema, said) in operation.query.items()
    ]
    statuses = {400, 401, 403, 404, 503, *operation.refusals}  # 404: a part that is not in use here
    made: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"For the role {operation.role.value}.",
        "x-role": operation.role.value,
        "parameters": [*path, *query],
    }
    if operation.body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": classes.add(operation.body)}},
        }
        statuses |= {408, 413}
    if needs_leader(operation.method, operation.path):
        statuses.add(421)
    refusals = {
        str(status): {
            "description": _SAID[status],
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{_shape(status)}"}}},
        }
        for status in sorted(statuses)
    }
    return made | {"responses": {"200": _answer(operation, answers), **refusals}}


def _shape(status: int) -> str:
    return "NotLeader" if status == 421 else "Error"


def _answer(operation: Operation, classes: Definitions) -> Json:
    if not operation.answer:
        return {"description": operation.summary, "content": {operation.media: {}}}
    fields = {name: _type(kind, classes) for name, kind in operation.answer.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {"description": operation.summary, "content": {"application/json": {"schema": schema}}}


def _type(kind: str | type, classes: Definitions) -> Json:
    if not isinstance(kind, str):
        return {"type": "array", "items": classes.add(kind)}
    kinds = kind.split()
    return {"type": kinds[0] if len(kinds) == 1 else kinds}
