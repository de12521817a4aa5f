"""Values that the tests of the link share."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import frozen
from hypothesis import strategies as st

from llmgw.hardware.inventory import Host, Inventory
from llmgw.link import ca
from llmgw.link.messages import PROTOCOL, Refused, Register, Welcome
from llmgw.scheduler.state import ShardReport, ShardState
from llmgw.settings.daemon import TlsFiles

TRUST_DOMAIN = "test.llmgw"
DAY_S = 86400.0


def register(node: str = "n1", protocol: int = PROTOCOL) -> Register:
    return Register(
        protocol=protocol,
        node=node,
        version="0",
        boot_id="boot",
        address="127.0.0.1",
        inventory=Inventory(Host("host", "boot"), "test"),
        engines=(),
        shards=(),
        epoch=0,
    )


def report(api_key: str | None = None) -> ShardReport:
    return ShardReport(
        shard="m-1.0",
        replica="m-1",
        generation=1,
        model="m",
        rank=0,
        cluster="c",
        profile_digest="d",
        devices=(0,),
        state=ShardState.LOADING,
        reason="weights are read",
        next="ready",
        since=0.0,
        api_key=api_key,
    )


WELCOME = Welcome(protocol=PROTOCOL, version="0", cluster="c", epoch=1, heartbeat_s=5.0)
REFUSED = Refused(claim="node id", wanted="n1", found="n2", certificate="subject CN=n1", remedy="set id: n1")


@frozen
class Pki:
    """A CA in ``folder / "ca"``, and what it issues."""

    folder: Path

    def node(self, node: str = "n1", *, days: int = 1, now: float | None = None, authority: str = "ca") -> TlsFiles:
        out = self.folder / f"node-{node}-{authority}-{days}-{now}"
        if not out.exists():
            ca.issue_node(self.folder / authority, node, out, days, time.time() if now is None else now)
        return TlsFiles(str(out / "cert.pem"), str(out / "key.pem"), str(self.folder / "server" / "ca.pem"))

    @property
    def server(self) -> TlsFiles:
        out = self.folder / "server"
        return TlsFiles(str(out / "cert.pem"), str(out / "key.pem"), str(out / "ca.pem"))


def make_pki(folder: Path) -> Pki:
    now = time.time()
    ca.init(folder / "ca", TRUST_DOMAIN, now - 10 * DAY_S)
    ca.init(folder / "foreign", TRUST_DOMAIN, now)
    ca.issue_server(folder / "ca", ("localhost", "127.0.0.1", "::1"), folder / "server", 1, now)
    return Pki(folder)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that the link carries."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin in (Union, UnionType):
        return st.one_of(*(values(a) for a in args))
    if origin is not None:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.text(max_size=8)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    hints = get_type_hints(kind)
    return st.builds(kind, **{a.name: st.deferred(lambda h=hints[a.name]: values(h)) for a in attrs.fields(kind)})
