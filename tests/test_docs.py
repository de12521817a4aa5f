"""The documentation points at things that are there, and the commands that it shows exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgw.cli.main import cli

TOP = Path(__file__).resolve().parents[1]
PAGES = sorted([TOP / "README.md", *TOP.glob("docs/**/*.md"), *TOP.glob("packaging/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands() -> list[tuple[str, ...]]:
    found = set()
    for page in PAGES:
        for words in re.findall(r"`llmgw ((?:[a-z][a-z-]* ?)+)", page.read_text()):
            found.add(tuple(words.split()))
    return sorted(found)


def test_commands_that_are_shown_exist() -> None:
    shown = commands()
    assert ("ctl", "status") in shown or ("ctl", "nodes") in shown
    for words in shown:
        done = CliRunner().invoke(cli, [*words, "--help"])
        assert done.exit_code == 0, f"llmgw {' '.join(words)}: {done.output}"
        assert "Usage:" in done.output


def test_every_command_teaches() -> None:
    for words in (
        (),
        ("server",),
        ("agent",),
        ("agent", "inventory"),
        ("ctl",),
        ("doctor",),
        ("ca",),
        ("config",),
        ("demo",),
    ):
        done = CliRunner().invoke(cli, [*words, "--help"])
        assert done.exit_code == 0
        assert len(done.output.splitlines()) > 6


def test_readme_names_both_commands_for_ci() -> None:
    text = (TOP / "README.md").read_text()
    for name, ends in (("demo", ".venv/bin/llmgw demo"), ("tests", ".venv/bin/pytest -q -n 2 --dist worksteal")):
        block = text.split(f"<!-- {name} -->\n```sh\n", 1)[1].split("\n```", 1)[0]
        assert block.startswith("python3 -m venv .venv && ")
        assert block.endswith(ends)
