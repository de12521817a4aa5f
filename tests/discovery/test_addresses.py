from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.addresses import parse_addresses, read_addresses
from llmgw.discovery.command import Ran
from llmgw.discovery.faults import DiscoveryError
from tests.discovery.generated import InProcess

SAID = [
    {"ifname": "lo", "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]},
    {
        "ifname": "bond0",
        "addr_info": [
            {"family": "inet", "local": "10.73.175.138", "prefixlen": 29},
            {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
            {"family": "inet", "local": "10.9.0.2", "prefixlen": 24, "secondary": True},
        ],
    },
    {"ifname": "rail0", "addr_info": []},
    {"ifname": 5},
    {},
    None,
]


def test_ipv4_addresses_by_interface() -> None:
    assert parse_addresses(json.dumps(SAID)) == {"lo": ("127.0.0.1/8",), "bond0": ("10.73.175.138/29", "10.9.0.2/24")}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["ifname", "addr_info", "family", "local", "prefixlen", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(plain)
def test_any_json(said: Any) -> None:
    for name, found in parse_addresses(json.dumps(said)).items():
        assert isinstance(name, str)
        assert all("/" in address for address in found)


@given(st.text(max_size=50))
def test_any_text(text: str) -> None:
    parse_addresses(text)


class WithoutIp(InProcess):
    def __init__(self) -> None:
        pass

    async def ask(self, program: str, *args: str) -> Ran:
        raise DiscoveryError("not-found", program, "was not found", "")


async def test_without_iproute_there_are_no_addresses() -> None:
    assert await read_addresses(WithoutIp()) == {}
