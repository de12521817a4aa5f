"""A state folder for an agent; whatever it started is gone after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent.stop import stop_engines
from tests.agent.test_shards import processes, soon


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose engines are all gone after the test, however that went."""
    place = tmp_path / "agent"
    place.mkdir(mode=0o700)
    yield place
    stop_engines(place, 0.0)
    # A shim whose launch was given up may need a moment to find that out.
    assert soon(lambda: processes(place) == set())
