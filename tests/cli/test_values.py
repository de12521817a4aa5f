"""What people write as the value of an option."""

from __future__ import annotations

import time

import click
import pytest
from click.testing import CliRunner

from llmgw.cli.terminal import echo
from llmgw.cli.values import limit, moment, seconds


@click.command()
@click.option("--ttl", callback=seconds, default="1m")
@click.option("--rpm", callback=limit(int))
@click.option("--cost", callback=limit(float))
@click.option("--expires", callback=moment(1))
@click.option("--since", callback=moment(-1))
def command(**given: object) -> None:
    echo(repr(given))


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, words)
    return result.exit_code, result.output


def test_values_are_what_they_say() -> None:
    assert said() == (0, "{'ttl': 60.0, 'rpm': None, 'cost': None, 'expires': None, 'since': None}\n")
    text = said("--ttl", "2w", "--rpm", "1_000", "--cost", "2.5", "--expires", "2027-01-31", "--since", "1970-01-02")[1]
    assert text == "{'ttl': 1209600.0, 'rpm': 1000, 'cost': 2.5, 'expires': 1801353600.0, 'since': 86400.0}\n"
    assert "'rpm': 'none'" in said("--rpm", "none")[1]
    assert "'expires': 'none'" in said("--expires", "none")[1]


def test_times_from_now_and_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    assert "'expires': 1086400.0, 'since': 996400.0" in said("--expires", "1d", "--since", "1h")[1]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--ttl", "soon", "'soon' is no length of time; write a number and s, m, h, d or w, such as 90d"),
        ("--ttl", "99999w", "'99999w' is longer than a hundred years"),
        ("--since", "99999w", "'99999w' is longer than a hundred years"),
        ("--since", "none", "'none' is no length of time"),
        ("--rpm", "x", "'x' is not a whole number; write one, or none"),
        ("--rpm", "1.5", "'1.5' is not a whole number"),
        ("--cost", "nan", "'nan' is not a number; write one, or none"),
        ("--cost", "1e999", "'1e999' is not a number"),
        ("--expires", "2027-02-31", "'2027-02-31' is no length of time"),
    ],
)
def test_what_does_not_fit_is_said_with_its_option(option: str, value: str, reason: str) -> None:
    code, text = said(option, value)
    assert code == 2
    assert f"Invalid value for '{option}': {reason}" in text
