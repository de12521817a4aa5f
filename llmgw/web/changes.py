"""What changed between two pictures of the cluster, and how the rows of a picture are told apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

LISTS = ("nodes", "models", "replicas", "jobs")
PARTS = (*LISTS, "status", "decisions", "brake")


def key(part: str, row: Json) -> str:
    """By what a row is known: models by name, others by id."""
    return str(row["name" if part == "models" else "id"])


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json | None:
    """``set`` with what is new or otherwise, rows whole, and ``gone`` with what is no more; ``None`` if nothing is.

    Of decisions, newest first, only the new ones are in it.
    """
    made: Json = {}
    gone: dict[str, list[str]] = {}
    for part, now in after.items():
        was = before.get(part)
        if part in LISTS:
            old = {key(part, row): row for row in was or ()}
            new = {key(part, row): row for row in now}
            if rows := [row for name, row in new.items() if old.get(name) != row]:
                made[part] = rows
            if left := [name for name in old if name not in new]:
                gone[part] = left
        elif part == "decisions":
            newest = was[0] if was else None
            fresh = now[: now.index(newest)] if newest in now else now
            if fresh:
                made[part] = fresh
        elif now != was:
            made[part] = now
    return {"set": made, "gone": gone} if made or gone else None


def applied(picture: Mapping[str, Any], told: Mapping[str, Any], most: int) -> Json:
    """A picture with a change on top of it; of decisions at most so many are kept."""
    made = dict(picture)
    for part, gone in told["gone"].items():
        made[part] = [row for row in made.get(part, ()) if key(part, row) not in gone]
    for part, new in told["set"].items():
        if part in LISTS:
            rows = {key(part, row): row for row in made.get(part, ())} | {key(part, row): row for row in new}
            made[part] = list(rows.values())
        elif part == "decisions":
            made[part] = [*new, *made.get(part, ())][:most]
        else:
            made[part] = new
    return made
