from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.cli.terminal import echo, plain, table


def test_what_others_wrote_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table(["node", "reason"], [["n1", "\x1b[2J\x1b]0;owned\x07 fine\r\nn2  ready \u202e\x9b31m"]], empty="")
    out = capsys.readouterr().out
    assert all(c.isprintable() for c in out.replace("\n", ""))
    assert out.count("\n") == 2
    assert "\\x1b[2J" in out
    assert plain("Größe 4 GiB – 東京") == "Größe 4 GiB – 東京"


def test_lines_keep_their_ends_and_nothing_else_that_steers(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command writes through it: ruff bans ``click.echo`` (TID251)."""
    echo("CA CN=\x1b[31mred\x9b\n  still needed by n1: \r\u202eno", fg="red", bold=True)
    assert capsys.readouterr().out == "CA CN=\\x1b[31mred\\x9b\n  still needed by n1: \\r\\u202eno\n"


@pytest.mark.parametrize(
    ("name", "value", "coloured"), [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("NO_COLOR", "", True)]
)
def test_colours_are_left_out_where_nobody_wants_them(
    name: str, value: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    echo("a", fg="red")
    assert ("\x1b" in shown.getvalue()) is coloured


@pytest.mark.parametrize("words", [["--help"], ["config", "openapi"]], ids=" ".join)
def test_output_that_cannot_be_written_is_no_finding_and_no_traceback(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "llmgw", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "words",
    [["ctl", "keys", "revoke", "k"], ["ctl", "node", "forget", "n1"], ["server", "restore", "backup"]],
    ids=" ".join,
)
def test_nobody_is_asked_where_nobody_is(words: list[str], tmp_path: Path) -> None:
    """A program that forgot --yes gets an exit code and a reason, and its standard output stays its own."""
    (tmp_path / "server.yaml").write_text(
        f"settings: s.yaml\nstate_dir: {tmp_path}\nrouter: {{listen: '127.0.0.1:1'}}\n"
    )
    (tmp_path / "backup").touch()
    group, *rest = words
    done = subprocess.run(
        [sys.executable, "-m", "llmgw", group, "--config", str(tmp_path / "server.yaml"), *rest],
        stdin=subprocess.DEVNULL, capture_output=True, cwd=tmp_path, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "nobody can be asked here" in done.stderr
    assert "add --yes" in done.stderr


@pytest.mark.parametrize(("typed", "said"), [("y", "True\n"), ("n", "False\n"), ("", "False\n")])
def test_a_question_is_asked_beside_the_answer_that_goes_on_to_a_program(typed: str, said: str) -> None:
    ours, theirs = os.openpty()
    try:
        os.write(ours, f"{typed}\n".encode())
        program = "from llmgw.cli.terminal import agreed; print(agreed('llmgw x', 'really?'))"
        ran = subprocess.run(
            [sys.executable, "-c", program], stdin=theirs, capture_output=True, text=True, timeout=30, check=True
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.stdout == said
    assert ran.stderr.startswith("really? [y/N]:")
