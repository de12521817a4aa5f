from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import PeerError
from llmgw.router.table import Endpoint, Route, Table
from llmgw.router.wire import Drain, Failed, Full, Hello, Load, Serving, UseTable, decode, encode


def test_round_trip() -> None:
    table = Table(3, (Route("m", (Endpoint("m-1.0", "::1", 20000, "sk-x", True), Endpoint("u", "h", 1)), "why", 5),))
    for message in (
        UseTable(table),
        Full(("m-1.0", "m-2.0")),
        Drain(1.5),
        Hello(1, "v", "a:1", 3, 2.0),
        Serving(),
        Load({"m-1.0": 2}, {"n": 1}, {"m": 40, "n": 1}),
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
