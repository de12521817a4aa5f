"""Keys as an operator and a client see them, over kills of the control plane and of the router."""

from __future__ import annotations

import json
import os
import signal
import time

import openai
import pytest

from tests.e2e.conftest import System
from tests.e2e.test_operators import llmgw

pytestmark = pytest.mark.e2e


class Operator:
    def __init__(self, system: System) -> None:
        self.system = system

    def ctl(self, *words: str) -> str:
        done = llmgw("ctl", "--config", str(self.system.demo.server_yaml), *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def asked(self, *words: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.ctl(*words, "--json"))
        return found


def served_to(system: System, token: str) -> list[str]:
    with system.client(token) as api:
        return [m.id for m in api.models.list()]


def closed(system: System) -> bool:
    try:
        served_to(system, "sk-any")
    except openai.AuthenticationError:
        return True
    return False


def complete(system: System, token: str, times: int = 1) -> None:
    with system.client(token) as api:
        for _ in range(times):
            api.completions.create(model=system.demo.models[0], prompt="x", max_tokens=2)


@pytest.mark.long
def test_from_an_open_router_to_one_with_keys_and_through_kills(system: System) -> None:
    me, model = Operator(system), system.demo.models[0]
    assert "THE ROUTER IS OPEN" in me.ctl("status")
    assert "the router is open" in (system.demo.folder / "server.log").read_text()
    said = me.ctl("keys", "create", "--owner", "ada", "--model", model, "--rpm", "600", "--budget-tokens", "5_000_000",
                  "--expires", "90d", "--tag", "demo")  # fmt: skip
    assert "it holds on the router now" in said
    (token,) = [line.strip() for line in said.splitlines() if line.startswith("  llmgw_")]
    ident = token.split("_")[1]
    settings = system.demo.folder / "settings.yaml"
    settings.write_text(settings.read_text() + "router: {auth: keys}\n")
    assert system.run.server is not None
    system.run.server.send_signal(signal.SIGHUP)

    system.until("the router to want keys", lambda: closed(system))
    assert "clients need an API key; 1 are active" in me.ctl("status")
    assert served_to(system, token) == [model]
    complete(system, token, 5)
    with system.client(token) as api:
        chunks = api.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], max_tokens=5, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks)

    # The control plane is killed; keys hold without it, and what is used then is counted once.
    system.run.server.kill()
    system.run.server.wait()
    complete(system, token, 4)
    system.run.start_server()

    def used(requests: int) -> bool:
        rows = me.asked("usage", "--by", "key")["usage"]
        found = sum(r["requests"] for r in rows if r["key"] == ident)  # type: ignore[attr-defined]
        assert found <= requests
        return bool(found == requests)

    system.until("usage of both", lambda: used(10))

    # The router is killed; its successor has the keys.
    time.sleep(0.8)
    router = me.asked("status")["router"]
    os.kill(router["pid"], signal.SIGKILL)  # type: ignore[index]

    def again() -> bool:
        try:
            complete(system, token)
        except (openai.APIConnectionError, openai.InternalServerError):
            return False
        return True

    system.until("another router", again)
    system.until("usage of all", lambda: used(11))
    (row,) = me.asked("usage", "--owner", "ada", "--by", "owner,model")["usage"]  # type: ignore[misc]
    assert (row["owner"], row["estimated"], row["completion"]) == ("ada", 0, 10 * 2 + 5)
    shown = me.ctl("keys", "list")
    assert "ada" in shown
    assert f"{row['prompt'] + row['completion']} of 5000000 tokens a month" in shown

    rotated = me.asked("keys", "rotate", ident)
    with pytest.raises(openai.AuthenticationError):
        complete(system, token)
    complete(system, rotated["token"])  # type: ignore[arg-type]
    me.ctl("keys", "set", ident, "--rpm", "none", "--model", "other")
    with pytest.raises(openai.PermissionDeniedError):
        complete(system, rotated["token"])  # type: ignore[arg-type]
    assert "it holds on the router now" in me.ctl("keys", "revoke", token, "--yes")
    with pytest.raises(openai.AuthenticationError, match="was revoked"):
        complete(system, rotated["token"])  # type: ignore[arg-type]
    history = me.ctl("keys", "show", ident)
    for action in ("key.revoke by", "key.change by", "key.rotate by", "key.create by"):
        assert action in history
    assert ident not in me.ctl("keys", "list")
    assert ident in me.ctl("keys", "list", "--all")
    logs = (system.demo.folder / "server.log").read_text()
    assert token not in logs
    assert rotated["token"] not in logs
    wrong = llmgw("ctl", "--config", str(system.demo.server_yaml), "keys", "set", "nope", "--rpm", "x")
    assert (wrong.returncode, "is not a whole number" in wrong.stderr) == (2, True)


def test_a_router_alone_is_closed_by_a_reload(prepared: System) -> None:
    settings, server = prepared.demo.folder / "settings.yaml", prepared.demo.server_yaml
    text = server.read_text()
    server.write_text(text[: text.index("link:")] + text[text.index("log:") :])
    served = "models: {elsewhere: {endpoints: ['http://127.0.0.1:9']}}\n"
    settings.write_text(served)
    prepared.run.start_server()
    prepared.until("the table", lambda: served_to(prepared, "sk-any") == ["elsewhere"])
    settings.write_text(served + "router: {auth: keys}\n")
    assert prepared.run.server is not None
    prepared.run.server.send_signal(signal.SIGHUP)

    prepared.until("the router to want keys", lambda: closed(prepared))
