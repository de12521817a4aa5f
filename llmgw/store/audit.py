"""The audit: who did what, in order, without gaps, each row sealed with the one before it. Pure.

A row's digest is the SHA-256 of a canonical JSON array of everything in it, the digest of the row before included. Who
changes, removes or inserts a row has to write every later row anew; the newest digest, kept elsewhere, shows even that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

from attrs import astuple, frozen


@frozen
class Act:
    """Something that somebody did. ``at`` is in epoch seconds, ``by`` a person or an address.

    ``action`` is two words with a dot between them: of what kind ``object`` is, and what was done with it.
    """

    at: float
    by: str
    action: str
    object: str
    reason: str = ""
    detail: str = ""


@frozen
class AuditRow:
    """An act in its place: ``seq`` counts from 1, ``before`` is the digest of the row before, empty for the first."""

    seq: int
    at: float
    by: str
    action: str
    object: str
    reason: str
    detail: str
    before: str
    digest: str


def sealed(act: Act, seq: int, before: str) -> AuditRow:
    """The row of an act that comes after the row with the digest ``before``."""
    at, by, action, thing, reason, detail = astuple(act)
    # PostgreSQL's text has no NUL.
    by, action, thing, reason, detail = (word.replace("\0", "\ufffd") for word in (by, action, thing, reason, detail))
    values = (seq, float(at), by, action, thing, reason, detail, before)
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"))
    return AuditRow(*values, digest=hashlib.sha256(text.encode()).hexdigest())


@frozen
class Noted:
    """A row that was noted down elsewhere: with it a history is found out that ends earlier or was written anew."""

    seq: int
    digest: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest}"

    @classmethod
    def of(cls, text: str) -> Noted | None:
        """What :meth:`__str__` made."""
        match = re.fullmatch(r"([1-9][0-9]{0,15}):([0-9a-f]{64})", text, re.ASCII)
        return None if match is None else cls(int(match[1]), match[2])


class Chain:
    """Follows rows in their order and says what first does not fit. ``count`` rows have fitted.

    One of them has to be ``noted``.
    """

    def __init__(self, noted: Noted | None = None) -> None:
        self.count = 0
        self.digest = ""
        self.wrong: str | None = None
        self._noted = noted

    @property
    def newest(self) -> Noted | None:
        """The last row that has fitted."""
        return Noted(self.count, self.digest) if self.count else None

    def end(self) -> str | None:
        """There are no more rows; what is wrong with all of them, or nothing."""
        if self.wrong is None and self._noted is not None and self.count < self._noted.seq:
            last = f"ends with row {self.count}" if self.count else "is empty"
            why = "what came after was removed, or a backup from before was restored"
            self.wrong = f"row {self._noted.seq}, which was noted, is missing: the audit {last}; {why}"
        return self.wrong

    def follow(self, rows: Iterable[AuditRow]) -> str | None:
        """What is wrong with these rows, which come next, or nothing."""
        self.wrong = self._wrong(rows)
        return self.wrong

    def _wrong(self, rows: Iterable[AuditRow]) -> str | None:
        for row in rows:
            if row.seq != self.count + 1:
                return f"row {self.count + 1} is missing: after row {self.count} comes row {row.seq}"
            if row.before != self.digest:
                return f"row {row.seq} does not follow row {self.count}: one of them, or one between, was changed"
            _, at, by, action, thing, reason, detail, before, digest = astuple(row)
            if sealed(Act(at, by, action, thing, reason, detail), row.seq, before).digest != digest:
                return f"row {row.seq} was changed: its content does not fit its digest"
            if self._noted is not None and row.seq == self._noted.seq and digest != self._noted.digest:
                return f"row {row.seq} is another than was noted: it, or one before it, was written anew"
            self.count, self.digest = row.seq, row.digest
        return None


def broken(rows: Iterable[AuditRow]) -> str | None:
    """What is wrong with these rows, which are all that there are, oldest first; nothing when they fit."""
    return Chain().follow(rows)
