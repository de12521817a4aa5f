"""The tables of passes: what was decided, and what had no place with the reasons that turned it down."""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.scheduler.explain import Candidate, Decision, DecisionKind, Refusal, Unplaced
from llmgw.store.api import StoredDecision
from llmgw.store.database import Connection

_DECISIONS = """
    SELECT decision.id, decision.pass, at, kind, model, replica, node, reason
    FROM decision JOIN pass ON pass.id = decision.pass
    ORDER BY decision.id DESC LIMIT :limit
"""

# Each part is read backwards from its own index, so that it costs what is asked for and not what is stored.
_ABOUT = """
    SELECT decision.id, decision.pass, at, kind, model, replica, node, reason
    FROM decision JOIN pass ON pass.id = decision.pass
    WHERE decision.id IN (
        SELECT * FROM (SELECT id FROM decision WHERE replica = :about ORDER BY id DESC LIMIT :limit) AS a UNION
        SELECT * FROM (SELECT id FROM decision WHERE model = :about ORDER BY id DESC LIMIT :limit) AS b UNION
        SELECT * FROM (SELECT id FROM decision WHERE node = :about ORDER BY id DESC LIMIT :limit) AS c UNION
        SELECT * FROM (
            SELECT decision FROM decision_other WHERE node = :about ORDER BY decision DESC LIMIT :limit
        ) AS d
    )
    ORDER BY decision.id DESC LIMIT :limit
"""


def newest_decisions(connection: Connection, limit: int, about: str | None) -> tuple[StoredDecision, ...]:
    """The newest decisions, newest first; of those only what names ``about``."""
    found = connection.execute(_DECISIONS if about is None else _ABOUT, {"limit": limit, "about": about})
    return tuple(
        StoredDecision(
            number, at, Decision(DecisionKind(kind), model, replica, node, reason, _others(connection, which))
        )
        for which, number, at, kind, model, replica, node, reason in found.fetchall()
    )


def insert_decisions(connection: Connection, number: int, decisions: Iterable[Decision]) -> None:
    """Write what a pass decided."""
    for d in decisions:
        (which,) = connection.execute(
            "INSERT INTO decision (pass, kind, model, replica, node, reason) VALUES (?, ?, ?, ?, ?, ?) RETURNING id",
            (number, d.kind.value, d.model, d.replica, d.node, d.reason),
        ).fetchone()
        connection.executemany(
            "INSERT INTO decision_other VALUES (?, ?, ?)", [(which, at, node) for at, node in enumerate(d.others)]
        )


def _others(connection: Connection, decision: int) -> tuple[str, ...]:
    """The further nodes of a decision."""
    found = connection.execute("SELECT node FROM decision_other WHERE decision = ? ORDER BY position", (decision,))
    return tuple(node for (node,) in found)


def insert_unplaced(connection: Connection, number: int, item: Unplaced) -> None:
    """Write what had no place in a pass, with every candidate and why it was turned down."""
    connection.execute(
        "INSERT INTO unplaced VALUES (?, ?, ?, ?, ?, ?)",
        (number, item.model, item.wanted, item.running, item.reason, item.since),
    )
    connection.executemany(
        "INSERT INTO refusal VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (number, item.model, at, position, c.node, c.profile, r.filter, r.reason, r.remedy)
            for at, c in enumerate(item.candidates)
            for position, r in enumerate(c.refusals)
        ],
    )


def unplaced(connection: Connection) -> tuple[Unplaced, ...]:
    """What had no place in the newest pass."""
    made = []
    for number, model, wanted, running, reason, since in connection.execute(
        "SELECT * FROM unplaced ORDER BY model"
    ).fetchall():
        candidates: dict[int, Candidate] = {}
        rows = connection.execute(
            "SELECT candidate, node, profile, filter, reason, remedy FROM refusal WHERE pass = ? AND model = ?"
            " ORDER BY candidate, position",
            (number, model),
        )
        for at, node, profile, *refusal in rows:
            known = candidates.get(at, Candidate(node, profile))
            candidates[at] = Candidate(node, profile, (*known.refusals, Refusal(*refusal)))
        made.append(Unplaced(model, wanted, running, reason, tuple(candidates.values()), since))
    return tuple(made)
