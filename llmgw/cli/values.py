"""What people write as the value of an option, and what it is: callbacks, so that click names the option at fault."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import click

from llmgw.store.audit import Noted

NO_LIMIT = "none"

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST_S = 36_500 * 86400.0
_Kept = TypeVar("_Kept")
Callback = Callable[[click.Context, click.Parameter, str | None], _Kept]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw]?)", text)
    if match is None:
        remedy = "write a number and s, m, h, d or w, such as 90d"
        raise click.BadParameter(f"{text[:40]!r} is no length of time; {remedy}")
    if (found := float(match[1]) * _UNITS[match[2]]) > _LONGEST_S:
        raise click.BadParameter(f"{text[:40]!r} is longer than a hundred years")
    return found


def seconds(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    """A length of time: ``90s``, ``15m``, ``2h``, ``90d``, ``4w``."""
    return _seconds(value)


def noted_row(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Noted | None:
    """A row of the audit as ``llmgw ctl audit verify`` prints it."""
    if value is not None and Noted.of(value) is None:
        raise click.BadParameter(f"{value[:100]!r} is not SEQ:DIGEST; give what llmgw ctl audit verify printed")
    return None if value is None else Noted.of(value)


def moment(way: int) -> Callback[float | str | None]:
    """So long from now (``way`` 1) or ago (-1), or the beginning of a day (UTC), in epoch seconds; or none."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | str | None:
        if value is None or (way > 0 and value == NO_LIMIT):
            return value
        try:
            return datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return time.time() + way * _seconds(value)

    return callback


def limit(kind: type[int] | type[float]) -> Callback[float | str | None]:
    """A number, or none."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | str | None:
        if value is None or value == NO_LIMIT:
            return value
        try:
            number = kind(value.replace("_", ""))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            whole = "whole " if kind is int else ""
            raise click.BadParameter(f"{value[:40]!r} is not a {whole}number; write one, or {NO_LIMIT}")
        return number

    return callback
