"""What is written down of what people do. Pure."""

from __future__ import annotations

from attrs import frozen


@frozen
class Act:
    """What somebody did: ``action`` in dotted lower-case words such as ``node.drain``, ``object`` what it was done to.

    ``at`` in epoch seconds.
    """

    at: float
    by: str
    action: str
    object: str
    reason: str = ""
    detail: str = ""
