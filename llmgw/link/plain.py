"""Lines of engines' logs made harmless: without secrets, and without what a terminal would obey. Pure."""

from __future__ import annotations

import re

HIDDEN = "[hidden]"

_SECRETS = (
    re.compile(r"(?i)\b(bearer\s+)[^\s\"',;)]+"),
    re.compile(r"(?i)([\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d)[\"']?\s*[=:]\s*[\"']?)(?!\d+\b)[^\s\"',;)]+"),
    re.compile(r"(?i)(--[\w-]*(?:api-key|token|secret|password)[\w-]*\s+)[^\s\"',;)]+"),
    re.compile(r"()\b(?:sk-[\w-]{8,}|hf_\w{8,}|llmgw_(?:admin|join)_[\w.-]+)"),
)
_ESCAPES = re.compile(
    "\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[@-Z\\\\-_])"  # ECMA-48: CSI, OSC, and short ones
    "|\x9b[0-?]*[ -/]*[@-~]"
)


def plain(text: str, secrets: tuple[str, ...] = ()) -> str:
    """One line for people: escape sequences are gone, other control characters are shown as U+FFFD, secrets hidden.

    ``secrets`` are those that are known; what looks like a key, token or password is hidden as well.
    """
    text = _ESCAPES.sub("", text)
    text = "".join(c if c == "\t" or c.isprintable() else "\ufffd" for c in text)
    for secret in secrets:
        if secret:
            text = text.replace(secret, HIDDEN)
    for pattern in _SECRETS:
        text = pattern.sub(lambda found: f"{found[1]}{HIDDEN}", text)
    return text
