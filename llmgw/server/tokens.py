"""What a join token is worth at a moment. Pure; comparing and setting it in one step is the store's part."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime

from llmgw.errors import OperatorError
from llmgw.link.identity import is_id
from llmgw.link.messages import Refused
from llmgw.link.tokens import LONGEST_S, SHORTEST_S
from llmgw.store.identity import TokenRow

_NOBODY = "0" * 64
_AGAIN = "make a new one: llmgw ctl token create --node {node}"


def check_new(node: str, ttl_s: float) -> None:
    """Raise :class:`OperatorError` when no token may be made for this node and time."""
    if not is_id(node):
        raise OperatorError(f"node id {node!r}", "may have letters, digits, dots, dashes and underscores, at most 64")
    if not SHORTEST_S <= ttl_s <= LONGEST_S:
        reason = f"expected {SHORTEST_S:.0f} s to {LONGEST_S / 86400:.0f} days, found {ttl_s:g} s"
        raise OperatorError("ttl", reason, "whoever gets hold of the token until then can be that node")


def refusal(row: TokenRow | None, digest: str, node: str, key: str, now: float) -> Refused | None:
    """Why a request with this secret's digest gets nothing; ``None`` if the token is good for it.

    ``key`` is SHA-256 of the key that a certificate is asked for, ``node`` the id that the other end means to have,
    empty if that is the token's business. A used token is good again for the key that it was used with, until it
    expires: an answer that was lost on the way must not cost a new token. What it was is only told to who has the
    secret; that is compared in constant time, with nobody's where there is no such token.
    """
    if not hmac.compare_digest(digest, _NOBODY if row is None else row.digest) or row is None:
        return _refused("a token of this control plane", "one that it did not make, or not to its end", "ID")
    if row.revoked:
        return _refused("a token that is not revoked", f"one that was revoked at {_minute(row.revoked)}", row.node)
    if row.used and row.used_key != key:
        found = f"one that was used at {_minute(row.used)} from {row.used_from}"
        again = _refused("a token that nobody has used", found, row.node)
        return Refused(
            again.claim, again.wanted, again.found, again.certificate,
            f"if that was not you, a stranger has a certificate: llmgw ctl deny node {row.node}; else {again.remedy}",
        )  # fmt: skip
    if now >= row.expires:
        return _refused("a token that has not expired", f"one that expired at {_minute(row.expires)}", row.node)
    if node not in ("", row.node):
        found = f"a request to be {node}"
        return Refused("token", f"a token for node {node}", f"one for node {row.node}, and {found}", "none",
                       f"join as {row.node}, or make one: llmgw ctl token create --node {node}")  # fmt: skip
    return None


def state(row: TokenRow, now: float) -> str:
    """One word for people: ``open``, ``used``, ``revoked`` or ``expired``."""
    if row.used:
        return "used"
    if row.revoked:
        return "revoked"
    return "open" if now < row.expires else "expired"


def _refused(wanted: str, found: str, node: str) -> Refused:
    return Refused("token", wanted, found, "none", _AGAIN.format(node=node))


def _minute(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M UTC")
