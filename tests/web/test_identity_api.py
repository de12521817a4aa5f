"""The identities' part of the admin API, on a real socket, over a control plane with a real link."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llmgw.link import tokens
from llmgw.server.identity_admin import IdentityAdmin
from llmgw.settings.daemon import Address
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from tests.server.identity_rig import Node, Plane, plane, until
from tests.web.admin import TOKEN, Picture
from tests.web.test_jobs_api import Admin


@asynccontextmanager
async def admin(folder: Path) -> AsyncIterator[tuple[Admin, Plane]]:
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with plane(folder) as at, trio.open_nursery() as nursery:
        people = IdentityAdmin(at.identities, at.cluster, at.agents, at.clock)
        await nursery.start(serve, app(Picture(), TOKEN, people=people), listener)
        yield Admin(port), at
        nursery.cancel_scope.cancel()


PATHS = ("tokens", "deny", "identities", "identities/events", "tokens/x/revoke", "deny/lift", "nodes/n1/forget")


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_of_it_without_the_admin_token(tmp_path: Path, path: str) -> None:
    async with admin(tmp_path) as (it, _):
        for value in (None, {}):
            status, _ = await it.ask(path, value, token="llmgw_admin_other")
            assert status in (401, 405)


async def test_a_token_is_shown_once(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, at):
        status, made = await it.ask("tokens", {"node": "n1", "ttl_s": 60})
        assert status == 200
        token = tokens.parse(made["token"])
        assert (made["id"], made["node"], made["state"]) == (token.id, "n1", "open")
        _, answer = await it.ask("tokens")
        (listed,) = answer["tokens"]
        assert listed["id"] == token.id
        assert token.secret not in json.dumps(answer)
        assert token.digest not in json.dumps(answer)
        assert (await it.ask(f"tokens/{token.id}/revoke", {}))[0] == 200
        assert (await it.ask("tokens"))[1]["tokens"][0]["state"] == "revoked"
        status, answer = await it.ask(f"tokens/{token.id}/revoke", {})
        assert status == 404
        assert "used or revoked already" in answer["error"]["reason"]
        assert token.secret not in json.dumps((await it.ask("identities/events"))[1])
        assert [event.kind for event in await at.identities.events(9)] == ["token.revoke", "token.create"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tokens", {}),
        ("tokens", {"node": "a/b"}),
        ("tokens", {"node": "n1", "ttl_s": 1}),
        ("tokens", {"node": "n1", "ttl_s": "60"}),
        ("tokens", {"node": "n1", "days": 3}),
        ("tokens", []),
        ("tokens", b"{"),
        ("deny", {"kind": "node", "value": "n1", "reason": " "}),
        ("deny", {"kind": "host", "value": "n1", "reason": "x"}),
        ("deny", {"kind": "serial", "value": "xyz", "reason": "x"}),
        ("deny", {"kind": "key", "value": "abc", "reason": "x"}),
    ],
)
async def test_what_is_wrong_is_said(tmp_path: Path, path: str, body: object) -> None:
    async with admin(tmp_path) as (it, _):
        status, answer = await it.ask(path, body)
        assert status == 400
        assert answer["error"]["reason"]
        for unknown, what in (("deny/lift", {"kind": "node", "value": "n1"}), ("nodes/n9/forget", {})):
            assert (await it.ask(unknown, what))[0] == 404
        assert (await it.ask("identities/events"))[1]["events"] == []


async def test_denied_lifted_and_evicted(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, at), trio.open_nursery() as nursery:
        node = Node(at, await at.join(), tmp_path / "state")
        nursery.start_soon(node.link.run)
        await until(lambda: node.link.state.connected and at.identities.held())
        status, answer = await it.ask("nodes/n1/forget", {})
        assert status == 409
        assert "is connected" in answer["error"]["reason"]
        assert "llmgw ctl deny node n1" in answer["error"]["remedy"]
        _, answer = await it.ask("identities")
        (held,), (ca,) = answer["nodes"], answer["cas"]
        assert held["serial"] == f"{node.own.certificate().serial:x}"
        assert (ca["issuing"], ca["ours"], ca["needing"][0]["node"]) == (True, True, "n1")
        key = ":".join(held["key"][i : i + 2].upper() for i in range(0, 64, 2))
        status, answer = await it.ask("deny", {"kind": "key", "value": f"SHA256:{key}", "reason": "copied"})
        assert status == 200
        assert answer["denied"][0]["value"] == held["key"]
        assert (await it.ask("deny", {"kind": "node", "value": "n2", "reason": "stolen"}))[0] == 200
        status, answer = await it.ask("tokens", {"node": "n2"})
        assert (status, answer["error"]["reason"]) == (409, "node n2: is denied: stolen")
        await until(lambda: not at.agents.connected("n1"))
        # A token has no certificate yet, and so no serial number that could be denied.
        assert (await it.ask("deny", {"kind": "serial", "value": "0", "reason": "x"}))[0] == 200
        assert (await it.ask("tokens", {"node": "n3"}))[0] == 200
        assert "n1" in at.cluster.nodes()
        assert (await it.ask("nodes/n1/forget", {}))[0] == 200
        assert at.cluster.nodes() == ()
        assert await at.store.nodes() == ()
        assert (await it.ask("identities"))[1]["nodes"] == []
        assert (await it.ask("deny/lift", {"kind": "key", "value": held["key"]}))[0] == 200
        await until(lambda: node.link.state.connected)
        assert at.cluster.nodes() == ("n1",), "an eviction is no ban"
        kinds = [event["kind"] for event in (await it.ask("identities/events?limit=20"))[1]["events"]]
        assert {"node.deny", "node.forget", "node.lift"} <= set(kinds)
        nursery.cancel_scope.cancel()
