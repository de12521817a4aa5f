from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.listeners import Listener, judge, listening, parse

LINE = "   0: {0}:{1:04X} 00000000:0000 {2} 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0 100 0 0 10 0"


@pytest.mark.parametrize(
    ("raw", "host"),
    [
        ("0100007F", "127.0.0.1"),
        ("00000000", "0.0.0.0"),
        ("0500A8C0", "192.168.0.5"),
        ("00000000000000000000000001000000", "::1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
        ("B80D0120000000000000000001000000", "2001:db8::1"),
    ],
)
def test_the_kernels_addresses(raw: str, host: str) -> None:
    assert parse(LINE.format(raw, 8000, "0A")) == ("4711", Listener(host, 8000))
    assert parse(LINE.format(raw, 8000, "01")) is None, "connected, it does not listen"


@given(
    st.text(max_size=200)
    | st.builds(LINE.format, st.text("0123456789ABCDEFG:", max_size=40), st.integers(0, 99), st.just("0A"))
)
def test_any_line_is_read_or_left_out(line: str) -> None:
    assert parse(line) is None or line


def test_our_own_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::", 0), family=socket.AF_INET6) as two:
        found = listening([os.getpid(), 2**22 + 1])
        assert Listener("127.0.0.1", one.getsockname()[1]) in found
        assert Listener("::", two.getsockname()[1]) in found
        with socket.create_connection(one.getsockname()[:2]) as client:
            assert Listener("127.0.0.1", client.getsockname()[1]) not in listening([os.getpid()])
        gone = Listener("127.0.0.1", one.getsockname()[1])
    assert gone not in listening([os.getpid()])
    assert listening([1], Path("/nowhere")) == ()


L: Callable[[str, int], Listener] = Listener
TOLD = ("10.0.0.5", 20001)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.7.7", "8.8.8.8"])
def test_an_api_that_others_can_reach_must_not_go_on(host: str) -> None:
    verdict = judge([L(*TOLD), L(host, 20001)], *TOLD)
    assert verdict.exposed.startswith(f"its API listens on {L(host, 20001)}, and was told 10.0.0.5:20001: ")
    assert ("anybody" in verdict.exposed) == (host in ("0.0.0.0", "::"))
    assert judge([L(host, 20001)], *TOLD, serves=False).exposed == ""


def test_an_api_where_it_should_be_is_fine() -> None:
    for found in ([L(*TOLD)], [L(*TOLD), L("127.0.0.1", 20001), L("::1", 9)], [L(*TOLD), L("10.0.0.5", 45123)]):
        assert judge(found, *TOLD) == judge([L(*TOLD)], *TOLD)
    fine = judge([L(*TOLD)], *TOLD)
    assert (fine.exposed, fine.warnings) == ("", ())
    assert judge([L("::1", 1), L("127.0.0.1", 1)], "localhost", 1).exposed == ""
    assert judge([L("::", 1)], "localhost", 1).exposed != ""
    assert judge([L("0.0.0.0", 1)], "0.0.0.0", 1) == fine, "it does as it was told"
    assert judge([], *TOLD) == fine, "nothing could be read"


def test_other_ports_are_warned_of_once() -> None:
    verdict = judge([L(*TOLD), *(L("0.0.0.0", 40000 + n) for n in range(8)), L("192.168.7.7", 5)], *TOLD)
    (warning,) = verdict.warnings
    assert warning.startswith("listens for its own processes on 0.0.0.0:40000, ")
    assert "0.0.0.0:40005 and 3 more" in warning
    (public,) = judge([L("8.8.8.8", 1), L("8.8.8.8", 2)], "8.8.8.8", 1).warnings
    assert "8.8.8.8:2, the address that it was told, and that one is public" in public
    (nobody,) = judge([L("10.0.0.5", 7)], *TOLD).warnings
    assert nobody == "none of its processes listens on port 20001: another program may answer there"
    assert judge([L("10.0.0.5", 7)], *TOLD, serves=False).warnings == ()


hosts = st.sampled_from(["0.0.0.0", "::", "127.0.0.1", "::1", "10.0.0.5", "8.8.8.8", "fe80::1"])
listeners = st.builds(Listener, hosts, st.integers(1, 3))


@given(st.lists(listeners), hosts, st.booleans())
def test_few_words_whatever_it_opens(found: list[Listener], host: str, serves: bool) -> None:
    verdict = judge(found, host, 1, serves=serves)
    assert len(verdict.warnings) <= 3
    wild = any(one.host in ("0.0.0.0", "::") and one.port == 1 for one in found)
    if serves and wild and host not in ("0.0.0.0", "::"):
        assert verdict.exposed
