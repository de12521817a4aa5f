"""The one table of the admin API's operations: who may, what goes in, what comes out. Pure.

A route that is not in it is not served, and the OpenAPI document is made of it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from llmgw.scheduler.drains import Fate
from llmgw.store.audit import AuditRow
from llmgw.store.identity import DenyRow, Event, HeldRow
from llmgw.store.keys import KeyEvent
from llmgw.web.access import Role
from llmgw.web.audit import SEQ_MOST
from llmgw.web.doctor import DoctorRequest
from llmgw.web.identity import CaView, Lifted, NewDenial, NewToken
from llmgw.web.jobs import JobRequest
from llmgw.web.keys import KeyRequest, RotateRequest
from llmgw.web.operations import DrainRequest, Why
from llmgw.web.people import NewAdminToken
from llmgw.web.planning import Question
from llmgw.web.settings import ChangeRequest, CheckRequest, RollbackRequest
from llmgw.web.shapes import Confirmation

Json = dict[str, Any]


def _number(least: int, most: int, usual: int | None, what: str) -> tuple[Json, str]:
    schema: Json = {"type": "integer", "minimum": least, "maximum": most}
    return (schema if usual is None else schema | {"default": usual}), what


_LIMIT_50 = _number(1, 1000, 50, "How many, the newest first.")
_LIMIT_20 = _number(1, 1000, 20, "How many decisions, the newest first.")
_DAY: tuple[Json, str] = ({"type": "string", "format": "date"}, "A day in UTC, included.")
_NAME: tuple[Json, str] = ({"type": "string"}, "Only of this one.")

_NUMBER, _TEXT, _LIST, _OBJECT, _FLAG = "number", "string", "array", "object", "boolean"
_MAYBE = "object null"
_TOKEN = {"id": _TEXT, "created": _NUMBER, "expires": _NUMBER, "by": _TEXT, "state": _TEXT}


@frozen
class Operation:
    """One operation. ``answer`` has the fields of the answer with their JSON types, or the class that a list is of;
    none for what is no JSON but of the type ``media``.

    ``missing`` says that it answers 404 where there is no such thing; ``refusals`` are further statuses of its own.
    """

    method: str
    path: str
    role: Role
    summary: str
    answer: Mapping[str, str | type] = field(factory=dict)
    body: type | None = None
    query: Mapping[str, tuple[Json, str]] = field(factory=dict)
    missing: bool = False
    refusals: tuple[int, ...] = ()
    media: str = "application/json"

    @property
    def name(self) -> str:
        """The operation's id in the document."""
        words = self.path.replace(":path", "").replace("{", "").replace("}", "").replace(".", "-").split("/")
        return "-".join((self.method.lower(), *words))


_READS = ("/plan", "/settings/check", "/watch/ticket")
"""What is asked with a body, and changes nothing: any control plane answers it."""

_NODES = ("/logs",)
"""What is read from a node: only the one that leads has them."""


def needs_leader(method: str, path: str) -> bool:
    """Whether only the one of several control planes that leads answers this."""
    path = f"/{path}"
    return path.endswith(_NODES) or (method in ("POST", "PUT") and not path.endswith(_READS))


_V, _O, _A = Role.VIEWER, Role.OPERATOR, Role.ADMIN
_KEY = {"key": _OBJECT, "in_force": _FLAG}
_CHANGED = {"settings": _OBJECT, "changed": _FLAG, "differences": _LIST}
_EFFECT: Mapping[str, str | type] = {"replicas": Fate, "unplaced": _LIST}

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "openapi.json", _V, "This document.", {"openapi": _TEXT, "paths": _OBJECT}),
    Operation("GET", "whoami", _V, "Who asks, and what they may.", {"name": _TEXT, "role": _TEXT}),
    Operation("GET", "names", _V, "The names of everything, for completion.",
              {"models": _LIST, "nodes": _LIST, "replicas": _LIST}),
    Operation("POST", "watch/ticket", _V, "A ticket that opens one watch from a browser.",
              {"ticket": _TEXT, "expires": _NUMBER}),
    Operation("GET", "status", _V, "The cluster at a glance.",
              {"version": _TEXT, "now": _NUMBER, "healthy": _FLAG, "problems": _LIST, "router": _OBJECT,
               "nodes": _OBJECT, "models": _LIST, "brake": _MAYBE}),
    Operation("GET", "nodes", _V, "Every node.", {"now": _NUMBER, "nodes": _LIST, "brake": _MAYBE}),
    Operation("GET", "models", _V, "Every model.", {"now": _NUMBER, "models": _LIST, "brake": _MAYBE}),
    Operation("GET", "replicas", _V, "Every replica.", {"now": _NUMBER, "replicas": _LIST, "brake": _MAYBE}),
    Operation("GET", "decisions", _V, "What was decided.", {"decisions": _LIST}, query={"limit": _LIMIT_50}),
    Operation("GET", "why/{name:path}", _V, "Why a model, adapter, replica or node is as it is.",
              {"name": _TEXT, "now": _NUMBER, "kinds": _LIST, "decisions": _LIST}, query={"limit": _LIMIT_20},
              missing=True),
    Operation("POST", "plan", _V, "What would follow; nothing changes.",
              {"now": _NUMBER, "asked": _OBJECT, "fits": _FLAG, "steps": _LIST, "unplaced": _LIST, "models": _LIST},
              body=Question, refusals=(409,)),
    Operation("GET", "brake", _V, "The brake.", {"brake": _MAYBE, "now": _NUMBER}),
    Operation("POST", "brake/release", _O, "Release the brake: the nodes that are silent are gone.",
              {"released": _NUMBER, "nodes": _LIST}, body=Confirmation, refusals=(409,)),
    Operation("GET", "jobs", _V, "Every job.", {"now": _NUMBER, "jobs": _LIST}),
    Operation("POST", "jobs", _O, "Begin a job.", {"now": _NUMBER, "jobs": _LIST}, body=JobRequest),
    Operation("GET", "jobs/{job}", _V, "One job.", {"now": _NUMBER, "jobs": _LIST}, missing=True),
    Operation("POST", "jobs/{job}/cancel", _O, "Cancel a job.", {"now": _NUMBER, "jobs": _LIST}, missing=True),
    Operation("GET", "tokens", _V, "Join tokens.", {"tokens": _LIST, "now": _NUMBER}),
    Operation("POST", "tokens", _A, "Make a token with which a node joins.", _TOKEN | {"token": _TEXT, "node": _TEXT},
              body=NewToken, refusals=(409,)),
    Operation("POST", "tokens/{id}/revoke", _A, "Revoke a join token.", {"revoked": _TEXT}),
    Operation("GET", "deny", _V, "The deny list.", {"denied": DenyRow}),
    Operation("POST", "deny", _A, "Keep somebody out.", {"denied": DenyRow}, body=NewDenial),
    Operation("POST", "deny/lift", _A, "Let somebody in again.", {"lifted": _OBJECT}, body=Lifted),
    Operation("GET", "identities", _V, "CAs and certificates.", {"cas": CaView, "nodes": HeldRow, "now": _NUMBER}),
    Operation("GET", "identities/events", _V, "What happened with identities.", {"events": Event, "now": _NUMBER},
              query={"limit": _LIMIT_50}),
    Operation("POST", "nodes/{node}/forget", _A, "Forget a node that is gone.", {"forgotten": _TEXT},
              refusals=(409,)),
    Operation("POST", "nodes/{node}/drain", _O, "Empty a node.",
              dict(_EFFECT) | {"node": _TEXT, "now": _NUMBER, "drained": _MAYBE}, body=DrainRequest),
    Operation("POST", "nodes/{node}/undrain", _O, "Give a node work again.", {"node": _TEXT}, body=Why),
    Operation("POST", "replicas/{replica}/restart", _O, "Start a replica anew.",
              dict(_EFFECT) | {"replica": _TEXT, "now": _NUMBER}, body=Why, refusals=(409,)),
    Operation("POST", "replicas/{replica}/stop", _O, "Stop a replica.",
              dict(_EFFECT) | {"replica": _TEXT, "now": _NUMBER}, body=Why, refusals=(409,)),
    Operation("GET", "replicas/{replica}/logs", _V, "The log of a replica's engine, a JSON object a line.",
              query={"rank": _number(0, 999, 0, "Of which rank."),
                     "lines": _number(0, 10_000, 200, "How many lines, the last ones."),
                     "follow": _number(0, 1, 0, "1: what comes after them, too."),
                     "previous": _number(0, 1, 0, "1: the log of the start before.")}, missing=True, refusals=(409,),
              media="application/x-ndjson"),
    Operation("GET", "keys", _V, "API keys.", {"keys": _LIST}),
    Operation("POST", "keys", _O, "Make an API key.", _KEY | {"token": _TEXT}, body=KeyRequest,
              refusals=(409,)),
    Operation("GET", "keys/{key}", _V, "One API key, with its events.", {"key": _OBJECT, "events": KeyEvent},
              missing=True),
    Operation("POST", "keys/{key}", _O, "Change an API key.", _KEY, body=KeyRequest, missing=True,
              refusals=(409,)),
    Operation("POST", "keys/{key}/rotate", _O, "Give an API key a new secret.", _KEY | {"token": _TEXT},
              body=RotateRequest, missing=True, refusals=(409,)),
    Operation("POST", "keys/{key}/revoke", _O, "Revoke an API key.", _KEY, missing=True, refusals=(409,)),
    Operation("GET", "usage", _V, "What was used.", {"since": _TEXT, "until": _TEXT, "by": _LIST, "usage": _LIST},
              query={"since": _DAY, "until": _DAY, "key": _NAME, "model": _NAME, "owner": _NAME,
                     "by": ({"type": "string", "pattern": "^(key|owner|model|day)(,(key|owner|model|day))*$"},
                            "What to sum by.")}),
    Operation("GET", "audit", _V, "Who did what.", {"rows": AuditRow, "now": _NUMBER},
              query={"limit": _LIMIT_50, "before": _number(1, SEQ_MOST, None, "Only rows before this one.")}),
    Operation("GET", "audit/verify", _V, "Whether the audit is whole.", {"intact": _FLAG},
              query={"noted": ({"type": "string", "pattern": "^[1-9][0-9]{0,15}:[0-9a-f]{64}$"},
                               "A row, SEQ:DIGEST, that was the newest once and has to be there still.")}),
    Operation("GET", "backup", _A, "A copy of the store, as a file.",
              media="application/vnd.sqlite3"),
    Operation("POST", "doctor", _V, "Check nodes, and hold siblings against each other.",
              {"nodes": _OBJECT, "failed": _OBJECT, "unequal": _LIST}, body=DoctorRequest),
    # Not for viewers: the environments of profiles may hold tokens.
    Operation("GET", "settings", _O, "The settings that hold, or an older revision.",
              {"revision": _NUMBER, "text": _TEXT, "author": _TEXT, "newest": _NUMBER, "now": _NUMBER},
              query={"revision": _number(1, 2**31, None, "Which one.")}),
    Operation("POST", "settings", _O, "Change the settings.", _CHANGED, body=ChangeRequest, refusals=(409,)),
    Operation("PUT", "settings", _O, "Change the settings.", _CHANGED, body=ChangeRequest, refusals=(409,)),
    Operation("GET", "settings/history", _V, "Revisions of the settings.",
              {"revisions": _LIST, "newest": _NUMBER, "now": _NUMBER},
              query={"limit": _LIMIT_50, "before": _number(1, 2**31, None, "Only those before this one.")}),
    Operation("GET", "settings/diff", _O, "What one revision has otherwise than another.",
              {"from": _OBJECT, "to": _OBJECT, "differences": _LIST, "text": _LIST},
              query={"from": _number(1, 2**31, None, "By default the one before."),
                     "to": _number(1, 2**31, None, "By default the newest.")}),
    Operation("POST", "settings/check", _O, "What a text would do as the settings; nothing changes.",
              {"ok": _FLAG, "faults": _LIST, "revision": _NUMBER}, body=CheckRequest),
    Operation("POST", "settings/rollback", _O, "Make an older revision hold again.", _CHANGED,
              body=RollbackRequest, refusals=(409,)),
    Operation("GET", "admin-tokens", _V, "Tokens of the admin API.", {"tokens": _LIST, "now": _NUMBER}),
    Operation("POST", "admin-tokens", _A, "Make a token of the admin API; it is shown once.",
              _TOKEN | {"token": _TEXT, "name": _TEXT, "role": _TEXT}, body=NewAdminToken),
    Operation("POST", "admin-tokens/{id}/revoke", _A, "Revoke a token of the admin API.",
              {"revoked": _TEXT, "name": _TEXT}, missing=True),
)  # fmt: skip

BY_ROUTE: Mapping[tuple[str, str], Operation] = {(o.method, f"/api/v1/{o.path}"): o for o in OPERATIONS}
