"""The tables, as numbered steps that only go forward, written for SQLite."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from llmgw.store.audit import Act
from llmgw.store.audit_table import record
from llmgw.store.database import Connection
from llmgw.store.identity import OUTSIDE

STEPS: tuple[str, ...] = (
    """
    CREATE TABLE cluster (
        "only" INTEGER PRIMARY KEY CHECK ("only" = 1),
        id TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        next_serial INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE settings (
        revision INTEGER PRIMARY KEY,
        text TEXT NOT NULL,
        digest TEXT NOT NULL,
        author TEXT NOT NULL,
        reason TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
    CREATE TABLE node (id TEXT PRIMARY KEY, row TEXT NOT NULL, last_heard REAL NOT NULL) STRICT;
    CREATE TABLE replica (id TEXT PRIMARY KEY, row TEXT NOT NULL) STRICT;
    CREATE TABLE pass (id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, at REAL NOT NULL) STRICT;
    CREATE TABLE decision (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        pass INTEGER NOT NULL REFERENCES pass (id) ON DELETE CASCADE,
        kind TEXT NOT NULL,
        model TEXT NOT NULL,
        replica TEXT NOT NULL,
        node TEXT NOT NULL,
        reason TEXT NOT NULL
    ) STRICT;
    CREATE INDEX decision_of_pass ON decision (pass);
    CREATE TABLE unplaced (
        pass INTEGER NOT NULL REFERENCES pass (id) ON DELETE CASCADE,
        model TEXT NOT NULL,
        wanted INTEGER NOT NULL,
        running INTEGER NOT NULL,
        reason TEXT NOT NULL,
        since REAL NOT NULL,
        PRIMARY KEY (pass, model)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE refusal (
        pass INTEGER NOT NULL,
        model TEXT NOT NULL,
        candidate INTEGER NOT NULL,
        position INTEGER NOT NULL,
        node TEXT NOT NULL,
        profile TEXT NOT NULL,
        filter TEXT NOT NULL,
        reason TEXT NOT NULL,
        remedy TEXT NOT NULL,
        PRIMARY KEY (pass, model, candidate, position),
        FOREIGN KEY (pass, model) REFERENCES unplaced (pass, model) ON DELETE CASCADE
    ) STRICT, WITHOUT ROWID;
    """,
    """
    CREATE TABLE scale (model TEXT PRIMARY KEY, row TEXT NOT NULL) STRICT, WITHOUT ROWID;
    ALTER TABLE cluster ADD COLUMN brake_released REAL NOT NULL DEFAULT 0;
    CREATE INDEX decision_of_replica ON decision (replica);
    CREATE INDEX decision_of_model ON decision (model);
    CREATE INDEX decision_of_node ON decision (node);
    """,
    """
    CREATE TABLE learned (
        digest TEXT NOT NULL,
        device_class TEXT NOT NULL,
        held_mib INTEGER NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (digest, device_class)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    CREATE TABLE job (
        id TEXT PRIMARY KEY, row TEXT NOT NULL, started REAL NOT NULL, ended INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX job_by_age ON job (ended, started);
    """,
    """
    CREATE TABLE decision_other (
        decision INTEGER NOT NULL REFERENCES decision (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        node TEXT NOT NULL,
        PRIMARY KEY (decision, position)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX decision_of_other ON decision_other (node, decision);
    """,
    """
    CREATE TABLE join_token (
        id TEXT PRIMARY KEY,
        node TEXT NOT NULL,
        digest TEXT NOT NULL,
        created REAL NOT NULL,
        expires REAL NOT NULL,
        by TEXT NOT NULL,
        used REAL NOT NULL,
        used_key TEXT NOT NULL,
        used_from TEXT NOT NULL,
        revoked REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE issued (
        serial TEXT PRIMARY KEY,
        node TEXT NOT NULL,
        key TEXT NOT NULL,
        root TEXT NOT NULL,
        not_after REAL NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX issued_by_end ON issued (not_after);
    CREATE TABLE held (
        node TEXT PRIMARY KEY,
        serial TEXT NOT NULL,
        key TEXT NOT NULL,
        root TEXT NOT NULL,
        not_after REAL NOT NULL,
        cas TEXT,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE denied (
        kind TEXT NOT NULL,
        value TEXT NOT NULL,
        reason TEXT NOT NULL,
        by TEXT NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (kind, value)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE identity_event (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        node TEXT NOT NULL,
        by TEXT NOT NULL,
        detail TEXT NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE api_key (
        slot INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, row TEXT NOT NULL
    ) STRICT;
    CREATE TABLE api_key_version ("only" INTEGER PRIMARY KEY CHECK ("only" = 1), version INTEGER NOT NULL) STRICT;
    INSERT INTO api_key_version VALUES (1, 0);
    CREATE TABLE key_event (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        key TEXT NOT NULL,
        action TEXT NOT NULL,
        by TEXT NOT NULL,
        detail TEXT NOT NULL
    ) STRICT;
    CREATE INDEX key_event_of_key ON key_event (key);
    CREATE TABLE usage (
        key TEXT NOT NULL,
        day INTEGER NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        estimated INTEGER NOT NULL,
        prompt INTEGER NOT NULL,
        completion INTEGER NOT NULL,
        cost INTEGER NOT NULL,
        PRIMARY KEY (key, day, model)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX usage_of_day ON usage (day);
    CREATE TABLE usage_ledger (id TEXT PRIMARY KEY, seq INTEGER NOT NULL, at REAL NOT NULL) STRICT, WITHOUT ROWID;
    """,
    """
    CREATE TABLE audit (
        seq INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        by TEXT NOT NULL,
        action TEXT NOT NULL,
        object TEXT NOT NULL,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        before TEXT NOT NULL,
        digest TEXT NOT NULL,
        topic TEXT NOT NULL
    ) STRICT;
    CREATE INDEX audit_by_topic ON audit (topic, object, seq);
    CREATE INDEX audit_of_topic ON audit (topic, seq);
    """,
    """
    ALTER TABLE cluster ADD COLUMN changes INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE lease (
        "only" INTEGER PRIMARY KEY CHECK ("only" = 1),
        holder TEXT NOT NULL,
        link TEXT NOT NULL,
        admin TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        expires REAL NOT NULL
    ) STRICT;
    CREATE TABLE router_load (instance TEXT PRIMARY KEY, row TEXT NOT NULL, at REAL NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE node_drain (node TEXT PRIMARY KEY, row TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE replica_order (replica TEXT PRIMARY KEY, at REAL NOT NULL, row TEXT NOT NULL) STRICT, WITHOUT ROWID;
    """,
    """
    CREATE TABLE admin_token (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        role TEXT NOT NULL,
        digest TEXT NOT NULL,
        created REAL NOT NULL,
        expires REAL NOT NULL,
        by TEXT NOT NULL,
        used REAL NOT NULL,
        revoked REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
)
"""Step n takes the schema from version n to n + 1. A step that was ever released is never changed."""

VERSION = len(STEPS)

APPLICATION_ID = 0x6C6D6777
"""``lmgw``: marks the file as ours (https://www.sqlite.org/pragma.html#pragma_application_id)."""

_ONE_AUDIT = 8

_ACTIONS = {
    "token-created": "token.create", "token-revoked": "token.revoke", "token-used": "token.use",
    "joined": "node.join", "denied": "node.deny", "deny-lifted": "node.lift", "evicted": "node.forget",
    "renewed-expired": "node.renew-expired", "created": "key.create", "changed": "key.change",
    "rotated": "key.rotate", "revoked": "key.revoke",
}  # fmt: skip


def step_to(version: int, connection: Connection, statements: Callable[[str], Iterable[str]]) -> None:
    """Take the step that leads to ``version``, with the rows that it moves, in one transaction that is open.

    ``statements`` takes the step apart for the database that it is.
    """
    for statement in statements(STEPS[version - 1]):
        connection.execute(statement)
    if version == _ONE_AUDIT:
        _into_one_audit(connection)


def _into_one_audit(connection: Connection) -> None:
    old = connection.execute(
        "SELECT at, by, kind, node, detail, 'identity', id FROM identity_event UNION ALL"
        " SELECT at, by, action, key, detail, 'key', id FROM key_event ORDER BY 1, 7"
    ).fetchall()
    for at, by, action, thing, detail, topic, _ in old:
        if action not in OUTSIDE:
            record(connection, Act(at, by, _ACTIONS.get(action, f"node.{action}"), thing, "", detail), topic)
    kinds = {kind for (kind,) in connection.execute("SELECT DISTINCT kind FROM identity_event").fetchall()}
    connection.executemany("DELETE FROM identity_event WHERE kind = ?", [(kind,) for kind in sorted(kinds - OUTSIDE)])
    connection.execute("DROP TABLE key_event")


_WORDS = (
    (r"INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    # As SQLite compares text: by its bytes.
    (r"\bTEXT\b", 'TEXT COLLATE "C"'),
    (r"\) STRICT(, WITHOUT ROWID)?", ")"),
)


def for_postgres(step: str) -> tuple[str, ...]:
    """A step's statements as PostgreSQL understands them."""
    for found, wanted in _WORDS:
        step = re.sub(found, wanted, step)
    return for_sqlite(step)


def for_sqlite(step: str) -> tuple[str, ...]:
    """A step's statements."""
    return tuple(statement.strip() for statement in step.split(";") if statement.strip())
