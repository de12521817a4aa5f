"""The OpenAPI document: what the table says, and what every operation answers to valid and invalid requests."""

from __future__ import annotations

import json
import re
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
from tests.server import test_key_book as keys
from tests.server.test_jobs import Plane
from tests.server.test_settings_book import plane as settings_plane
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
    if rules := {key: schema[key] for key in ("anyOf", "allOf") if key in schema and "properties" in schema}:
        return _object(schema).filter(Draft202012Validator(rules).is_valid)
    if "anyOf" in schema:
        return st.one_of([values(part) for part in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _object(schema)
        case "object":
            return st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(values(schema["items"]), min_size=least, max_size=min(schema.get("maxItems", 9), least + 3))
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            bounds = schema.get("minimum"), schema.get("maximum")
            return st.floats(*bounds, allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return _text(schema)


def _object(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    must = set(schema.get("required", ()))
    parts = {name: values(part) for name, part in schema["properties"].items()}
    return st.fixed_dictionaries(
        {n: s for n, s in parts.items() if n in must},
        optional={n: s for n, s in parts.items() if n not in must},
    )


def _text(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1000)
    if schema.get("format") == "date":
        return st.dates().map(str)
    if pattern := schema.get("pattern"):
        # In Python alone a line feed may follow what $ ends.
        made = st.from_regex(re.compile(pattern.replace("$", r"\Z")))
        return made.filter(lambda text: least <= len(text) <= most and text.isprintable())
    return st.text(min_size=least, max_size=min(most, least + 12))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, Any], bytes | None, bool]:
    """A method, a path, its operation, a body, and whether all of it is as the document wants it."""
    method, path, operation = draw(st.sampled_from(OPERATIONS))
    valid = draw(st.booleans())
    query = []
    for parameter in operation["parameters"]:
        made = values(parameter["schema"])
        text = str(draw(made if valid else made | st.text(max_size=6)))
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(text, safe="") or "x")
        elif draw(st.booleans()):
            query.append(f"{parameter['name']}={quote(text, safe='')}")
    body = None
    if "requestBody" in operation:
        made = values(operation["requestBody"]["content"]["application/json"]["schema"])
        body = json.dumps(draw(made if valid else made | JUNK)).encode()
        if not valid:
            body = draw(st.just(body) | st.binary(max_size=8))
    return method.upper(), path + ("?" + "&".join(query) if query else ""), operation, body, valid


TEXTS = {"post-settings", "put-settings", "post-plan"}
"""What holds a text of settings: what may be in one is another schema's."""


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(requests(), min_size=10, max_size=10))
def test_every_answer_is_declared_and_what_the_document_allows_is_not_refused(
    tmp_path_factory: Any, asked: list[Any]
) -> None:
    async def main() -> None:
        folder = tmp_path_factory.mktemp("fuzz")
        for name in ("keys", "settings"):
            (folder / name).mkdir()
        listener = listen(Address("127.0.0.1", 0))
        async with (
            sqlite_store(folder / "db") as store, keys.plane(folder / "keys") as keys_at,
            settings_plane(folder / "settings") as book_at, trio.open_nursery() as nursery,
        ):  # fmt: skip
            access = Access(TOKEN, store.people)
            made = app(
                Picture(), access, Plane(store).jobs, history=(store, folder), admins=store.people,
                keys=keys_at.book, book=book_at.book,
            )  # fmt: skip
            await nursery.start(serve, made, listener)
            it = Admin(listener.getsockname()[1], Picture())
            for method, path, operation, body, valid in asked:
                status, _, content = await it.ask(path, method, body=body)
                declared = operation["responses"].get(str(status))
                assert declared is not None, (method, path, body, status, content)
                assert status < 500, (method, path, body, content)
                refused = status == 400 and valid and operation["operationId"] not in TEXTS
                assert not refused, (method, path, body, content)
                schema = declared["content"]["application/json"]["schema"] | {"components": document()["components"]}
                Draft202012Validator(schema).validate(json.loads(content))
            nursery.cancel_scope.cancel()

    trio.run(main)
