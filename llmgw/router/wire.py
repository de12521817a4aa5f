"""What the control plane and a router worker say to each other over their unix socket: a JSON object a line. Pure.

Both ends are of the same version as a rule. A worker of another one is replaced: of what it says only :class:`Hello`
is needed, and it is told nothing but :class:`Drain`, so these two are what versions have to agree on.
"""

from __future__ import annotations

from functools import cache

import cattrs
import orjson
from attrs import field, frozen

from llmgw.errors import PeerError
from llmgw.router.sight import Sight
from llmgw.router.table import Table
from llmgw.settings.convert import strict_converter
from llmgw.settings.keys import ApiKey
from llmgw.settings.keys import Spent as SpentRow
from llmgw.settings.usage import UsageRow

MAX_LINE_BYTES = 64 * 1024 * 1024


@frozen
class Hello:
    """Worker, first: who it is and where it listens, and the versions of the table and of the keys that it has.

    Its listening socket comes with it (SCM_RIGHTS, unix(7)). ``setup`` is what it was started with, see
    :func:`llmgw.router.launch.fingerprint`.
    """

    pid: int
    version: str
    listen: str
    table: int
    started: float
    keys: int = 0
    setup: str = ""
    draining: bool = False


@frozen
class Accept:
    """Control plane: what there is was said; take connections from now on."""


@frozen
class Serving:
    """Worker: it takes connections."""


@frozen
class Load:
    """Worker: open requests by endpoint id, when they changed and every second: one that says nothing is stuck.

    ``waiting`` counts those that are held until their model has an engine, and ``asked`` all that ever came, by model.
    """

    outstanding: dict[str, int]
    waiting: dict[str, int] = field(factory=dict)
    asked: dict[str, int] = field(factory=dict)


@frozen
class Failed:
    """Worker: it cannot serve, and why; it ends after this."""

    thing: str
    reason: str
    remedy: str


@frozen
class KeysHeld:
    """Worker: the keys hold as of this version."""

    version: int


@frozen
class Usage:
    """Worker: what was used, batch ``seq`` of its ledger and all before it that were not kept yet. Said again until
    :class:`UsageKept` answers it."""

    ledger: str
    seq: int
    rows: tuple[UsageRow, ...]


@frozen
class UseTable:
    """Control plane: the routing table from now on."""

    table: Table


@frozen
class Full:
    """Control plane: the engines, by endpoint id, that say that they have no room."""

    engines: tuple[str, ...]


@frozen
class Keys:
    """Control plane: the keys that changed after version ``base`` up to ``upto``, ``last`` when there are no more."""

    base: int
    upto: int
    keys: tuple[ApiKey, ...]
    last: bool


@frozen
class Spent:
    """Control plane: what is written down of keys with a budget."""

    rows: tuple[SpentRow, ...]


@frozen
class UsageKept:
    """Control plane: this batch of the worker's ledger, and all before it, are in the store."""

    ledger: str
    seq: int


@frozen
class Drain:
    """Control plane: take nothing new, finish what is under way within so many seconds, and end.

    With ``replaced`` others take the connections: idle ones stay until their next request, whose answer ends them.
    """

    seconds: float
    replaced: bool = False


FromWorker = Hello | Serving | Load | Sight | Failed | KeysHeld | Usage
ToWorker = Accept | UseTable | Full | Keys | Spent | UsageKept | Drain

_KINDS: dict[str, type] = {
    "hello": Hello,
    "accept": Accept,
    "serving": Serving,
    "load": Load,
    "sight": Sight,
    "failed": Failed,
    "table": UseTable,
    "full": Full,
    "drain": Drain,
    "keys": Keys,
    "keys_held": KeysHeld,
    "spent": Spent,
    "usage": Usage,
    "usage_kept": UsageKept,
}
_TAGS = {kind: tag for tag, kind in _KINDS.items()}


@cache
def _converter() -> cattrs.Converter:
    return strict_converter(forbid_unknown=False)


def encode(message: FromWorker | ToWorker) -> bytes:
    """One line, its end included."""
    return orjson.dumps({"type": _TAGS[type(message)], **_converter().unstructure(message)}) + b"\n"


def decode(line: bytes) -> FromWorker | ToWorker:
    """One message. Raises :class:`PeerError` when the line is none."""
    try:
        fields = orjson.loads(line)
        message: FromWorker | ToWorker = _converter().structure(fields, _KINDS[fields.pop("type")])
    except (ValueError, KeyError, TypeError, AttributeError, cattrs.BaseValidationError) as wrong:
        raise PeerError("router control", f"a line is no message ({type(wrong).__name__})") from wrong
    return message
