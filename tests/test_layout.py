"""The tree looks as agreed."""

from __future__ import annotations

from pathlib import Path

TOP = Path(__file__).resolve().parents[1]


def test_top_level_is_what_was_agreed() -> None:
    allowed = {
        ".ci",
        ".gitignore",
        "LICENSE",
        "README.md",
        "docs",
        "fakes",
        "llmgw",
        "packaging",
        "pyproject.toml",
        "tests",
    }
    kept = {p.name for p in TOP.iterdir()} - {
        ".git",
        ".venv",
        ".hypothesis",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
    }
    assert {n for n in kept if not n.startswith((".import", "__"))} <= allowed
