"""Join tokens as text: ``llmgw_join_ID.SECRET.CA``. Pure but for the randomness of a new one.

The id may be shown; the secret has 256 random bits and is stored nowhere but in the token; the CA is SHA-256 of the
certificate that the control plane's own must lead to, so that a node knows whom it talks to before it trusts anybody.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from attrs import field, frozen

from llmgw.errors import OperatorError

_TEXT = re.compile(r"llmgw_join_([0-9a-f]{12})\.([A-Za-z0-9_-]{43})\.([0-9a-f]{64})", re.ASCII)
SHORTEST_S, LONGEST_S = 10.0, 7 * 86400.0
"""How long a token may be good."""


@frozen
class JoinToken:
    """A token, taken apart. ``str()`` gives the text; its ``repr`` hides the secret."""

    id: str
    secret: str = field(repr=False)
    ca: str

    def __str__(self) -> str:
        return f"llmgw_join_{self.id}.{self.secret}.{self.ca}"

    @property
    def digest(self) -> str:
        """What is stored of the secret: its SHA-256. 256 random bits need no slow hash."""
        return hashlib.sha256(self.secret.encode()).hexdigest()


def new(ca: str) -> JoinToken:
    """A new token for a control plane below this CA."""
    return JoinToken(secrets.token_hex(6), secrets.token_urlsafe(32), ca)


def parse(text: str) -> JoinToken:
    """The token in a text. Raises :class:`OperatorError`, without repeating the text."""
    if (match := _TEXT.fullmatch(text.strip())) is None:
        raise OperatorError(
            "the join token", "is not whole or no token", "copy all of what llmgw ctl token create printed"
        )
    return JoinToken(match[1], match[2], match[3])
