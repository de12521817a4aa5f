"""Contexts: kept 0600, found by name, and which one is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.cli import contexts
from llmgw.cli.admin_client import connect
from llmgw.cli.contexts import Context, Contexts
from llmgw.errors import OperatorError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMGW_CONTEXT", raising=False)
    contexts.save(Contexts("a", {"a": Context("http://a:1", token="t1"), "b": Context("http://b:2", token="t2")}))
    return tmp_path


def test_kept_and_read_again(home: Path) -> None:
    file = home / "llmgw" / "contexts.yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert contexts.load().named("b") == Context("http://b:2", token="t2")
    assert "t1" not in repr(contexts.load())
    with pytest.raises(OperatorError, match="there are: a, b"):
        contexts.load().named("c")
    file.write_text("contexts: {a: {adress: x}}")
    with pytest.raises(OperatorError, match="adress"):
        contexts.load()
    file.chmod(0o644)
    with pytest.raises(OperatorError, match="chmod 600"):
        contexts.load()


def test_which_one_is_asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = home / "token"
    token.touch(0o600)
    token.write_text("t3")
    assert connect(None, None, None).host == "a"
    monkeypatch.setenv("LLMGW_CONTEXT", "b")
    assert connect(None, None, None).host == "b"
    assert connect(None, None, None, "a").host == "a"
    assert connect("http://c:3", token, None).token == "t3"
    with pytest.raises(OperatorError, match="leave one out"):
        connect("http://c:3", token, None, "a")
