"""The OpenAPI document: what the table says, and what every operation answers to valid and invalid requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from llmgw.settings.daemon import Address
from llmgw.store.opening import sqlite_store
from llmgw.web.access import Access
from llmgw.web.api import app
from llmgw.web.openapi import document
from llmgw.web.serve import listen, serve
from tests.server.test_jobs import Plane
from tests.web.admin import TOKEN, Admin, Picture

DOCS = Path(__file__).parents[2] / "docs"
OPERATIONS = [(m, p, o) for p, ms in document()["paths"].items() for m, o in ms.items() if not p.endswith("/backup")]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def test_the_document_in_docs_is_the_table() -> None:
    assert json.loads((DOCS / "openapi.json").read_text()) == document(), "llmgw config openapi > docs/openapi.json"


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Valid values of a schema of ours."""
    if "$ref" in schema:
        return values(document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([values(part) for part in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            must = set(schema.get("required", ()))
            parts = {name: values(part) for name, part in schema["properties"].items()}
            return st.fixed_dictionaries(
                {n: s for n, s in parts.items() if n in must},
                optional={n: s for n, s in parts.items() if n not in must},
            )
        case "object":
            return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
        case "array":
            return st.lists(values(schema["items"]), max_size=3)
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return st.text(max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any], bytes | None]:
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    query = []
    for parameter in operation["parameters"]:
        text = str(draw(values(parameter["schema"]) | st.text(max_size=6)))
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(text, safe="") or "x")
        elif draw(st.booleans()):
            query.append(f"{parameter['name']}={quote(text, safe='')}")
    body = None
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        made = draw(values(schema) | JUNK)
        body = draw(st.just(json.dumps(made).encode()) | st.binary(max_size=8))
    return method.upper(), path + ("?" + "&".join(query) if query else ""), operation, body


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(requests(), min_size=10, max_size=10))
def test_every_answer_is_declared(tmp_path_factory: Any, asked: list[Any]) -> None:
    async def main() -> None:
        folder = tmp_path_factory.mktemp("fuzz")
        listener = listen(Address("127.0.0.1", 0))
        async with sqlite_store(folder / "db") as store, trio.open_nursery() as nursery:
            access = Access(TOKEN, store.people)
            made = app(Picture(), access, Plane(store).jobs, history=(store, folder), admins=store.people)
            await nursery.start(serve, made, listener)
            it = Admin(listener.getsockname()[1], Picture())
            for method, path, operation, body in asked:
                status, _, content = await it.ask(path, method, body=body)
                declared = operation["responses"].get(str(status))
                assert declared is not None, (method, path, body, status, content)
                assert status < 500, (method, path, body, content)
                schema = declared["content"]["application/json"]["schema"] | {"components": document()["components"]}
                Draft202012Validator(schema).validate(json.loads(content))
            nursery.cancel_scope.cancel()

    trio.run(main)
