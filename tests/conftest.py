"""``pytest --hypothesis-profile=long`` looks harder: twenty times as many examples of everything."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import structlog
import trio.testing
from hypothesis import HealthCheck, settings

from tests.patient_clock import patient_clock

# How fast inputs are made says how busy the machine is, not whether the code is right.
_PATIENT = [HealthCheck.too_slow]

settings.register_profile("usual", deadline=None, suppress_health_check=_PATIENT)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_PATIENT)
settings.load_profile("usual")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, and every process that a test starts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _usual_logging() -> Iterator[None]:
    """A test that starts a whole daemon sets up logging for the process; the next one has it as it was."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def mock_clock() -> trio.testing.MockClock:
    """Time that stands still unless a test moves it, in place of pytest-trio's."""
    return patient_clock()


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """Time that goes on to the next deadline whenever nothing goes on, threads included, in place of pytest-trio's."""
    return patient_clock(0)
