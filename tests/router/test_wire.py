from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import PeerError
from llmgw.router.sight import EngineSight, Refusals, Sight
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.wire import (
    Drain,
    Failed,
    Full,
    Hello,
    Keys,
    KeysHeld,
    Load,
    Serving,
    Spent,
    Usage,
    UsageKept,
    UseTable,
    decode,
    encode,
)
from llmgw.settings.document import Auth, Price, RouterSettings
from llmgw.settings.keys import ApiKey, Limits, Period
from llmgw.settings.keys import Spent as SpentRow
from llmgw.settings.usage import UsageRow


def test_round_trip() -> None:
    routes = (Route("m", (Endpoint("m-1.0", "::1", 20000, "sk-x", True), Endpoint("u", "h", 1)), "why", 5),)
    table = Table(3, routes, RouterSettings(auth=Auth.KEYS, prices={"m": Price(0.5, 1.5)}))
    limits = Limits(1, None, 0, 5, 6, Period.WEEK)
    key = ApiKey("a", 3, 9, "d", 1.5, "n", "o", ("t",), ("m*",), limits, 2.5, None, "e", 3.5)
    for message in (
        UseTable(table),
        Full(("m-1.0", "m-2.0")),
        Drain(1.5),
        Keys(3, 9, (key,), True),
        Spent((SpentRow(3, 86400, 5, 6, Period.DAY),)),
        UsageKept("l", 4),
        KeysHeld(9),
        Usage("l", 4, (UsageRow("a", "m", 20000, 1, 2, 3, 4, 5, 6),)),
        Hello(1, "v", "a:1", 3, 2.0, 9),
        Serving(),
        Load({"m-1.0": 2}, {"n": 1}, {"m": 40, "n": 1}),
        Sight({"m-1.0": EngineSight(5, 1, 9.0, "silent")}, {"m": {"only": 2}}, {"m": {"c": Refusals(1, 2.5, "t")}}),
        Failed("t", "r", "m"),
    ):
        line = encode(message)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert decode(line) == message
    assert "sk-x" not in repr(table)


@given(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from([b"{}", b"[]", b'{"type":"nothing"}', b'{"type":"load"}', b'{"type":["load"]}']),
    )
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(PeerError):
        decode(line)
