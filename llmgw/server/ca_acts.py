"""What the audit says of the CAs: which are trusted and which issues, as the control plane finds it in its files.

``llmgw ca`` works on files, and so does whoever has a CA of their own; neither tells the control plane who they are. So
it writes down what is different from what the audit said last, by digest, when it starts and when it reads them again.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llmgw.store.identity import Event

TRUST, RETIRE, ISSUE, STOP = "ca.trust", "ca.retire", "ca.issue", "ca.stop"
"""A root is trusted from now on, or no more; certificates are issued below a root from now on, or no more."""


def said(acts: Iterable[Event]) -> tuple[frozenset[str], tuple[str, str]]:
    """What these acts, oldest first, come to: the roots that are trusted; the one that issues and its issuing CA."""
    trusted: set[str] = set()
    issuing = "", ""
    for act in acts:
        if act.kind == TRUST:
            trusted.add(act.node)
        elif act.kind == RETIRE:
            trusted.discard(act.node)
        elif act.kind in (ISSUE, STOP):
            issuing = (act.node, act.detail) if act.kind == ISSUE else ("", "")
    return frozenset(trusted), issuing


def changes(
    acts: Sequence[Event], trusted: Mapping[str, str], issuing: tuple[str, str], at: float, by: str
) -> tuple[Event, ...]:
    """What has to be added to ``acts`` so that they say this.

    ``trusted`` is by SHA-256 of the root what it says of itself, ``issuing`` SHA-256 of the root and which issuing CA
    below it, both empty where nothing is issued.
    """
    before, issued = said(acts)
    made = [Event(at, TRUST, sha256, by, text) for sha256, text in trusted.items() if sha256 not in before]
    if issuing != issued:
        kind, (root, text) = (ISSUE, issuing) if issuing[0] else (STOP, issued)
        made.append(Event(at, kind, root, by, text))
    made += [Event(at, RETIRE, sha256, by, "") for sha256 in sorted(before - trusted.keys())]
    return tuple(made)
