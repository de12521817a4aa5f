from __future__ import annotations

import socket
import ssl

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.link.hello import offered_protocols, protocols


def hello(*alpn: str, server_hostname: str = "localhost") -> bytes:
    """The first record of a real client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=server_hostname).do_handshake()
    return outgoing.read()


HELLO = hello("llmgw-join/1", "h2")


def test_what_a_real_client_offers() -> None:
    assert protocols(HELLO) == (b"llmgw-join/1", b"h2")
    assert protocols(hello()) == ()
    assert protocols(hello("h2", server_hostname="x" * 60)) == (b"h2",)


@given(st.integers(0, len(HELLO) - 1))
def test_a_hello_that_is_cut_offers_nothing(size: int) -> None:
    assert protocols(HELLO[:size]) == ()


@given(st.integers(0, len(HELLO) - 1), st.integers(0, 255))
def test_a_hello_with_a_wrong_byte_never_raises(at: int, byte: int) -> None:
    protocols(HELLO[:at] + bytes([byte]) + HELLO[at + 1 :])


@given(st.binary(max_size=400))
def test_bytes_that_are_no_hello_never_raise(data: bytes) -> None:
    assert protocols(b"\x16\x03\x01" + len(data).to_bytes(2, "big") + data) == () or data[:1] == b"\x01"


async def offered(pieces: list[bytes], *, hang_up: bool = False) -> tuple[bytes, ...]:
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    there = await trio.open_tcp_stream("127.0.0.1", listener[0].socket.getsockname()[1])
    here = await listener[0].accept()
    found: list[tuple[bytes, ...]] = []

    async def look() -> None:
        found.append(await offered_protocols(here.socket))

    async with there, here, listener[0], trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for piece in pieces:
            await there.send_all(piece)
            await trio.sleep(0.01)
        if hang_up:
            await there.send_eof()
        with trio.fail_after(2):
            while not found:
                await trio.sleep(0.001)
        assert here.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        whole = b"".join(pieces)
        left = b""
        while len(left) < len(whole):
            left += await here.receive_some()
        assert left == whole, "nothing was taken off"
    return found[0]


async def test_it_waits_for_the_whole_record() -> None:
    expected = (b"llmgw-join/1", b"h2")
    assert await offered([HELLO]) == expected
    assert await offered([HELLO[:3], HELLO[3:100], HELLO[100:-1], HELLO[-1:]]) == expected
    assert await offered([HELLO[:5], HELLO[5:]]) == expected


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 50, b"\x16\x03\x01\x00\x01x"]
)
async def test_others_are_not_waited_for(data: bytes) -> None:
    assert await offered([data]) == ()


async def test_who_hangs_up_is_not_waited_for() -> None:
    assert await offered([HELLO[:100]], hang_up=True) == ()
    assert await offered([HELLO[:2]], hang_up=True) == ()


async def test_waiting_for_the_rest_costs_no_work() -> None:
    """A client that sends half a record and falls silent wakes nobody."""
    steps = 0

    class Count(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            nonlocal steps
            steps += "offered_protocols" in task.name

    left, right = socket.socketpair()
    with left, right, right.dup() as watched:
        watched.setblocking(False)
        for one in (left, right):
            one.setblocking(False)
        left.send(HELLO[:-10])
        count = Count()
        trio.lowlevel.add_instrument(count)
        with trio.move_on_after(0.3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(offered_protocols, trio.socket.from_stdlib_socket(watched))
        trio.lowlevel.remove_instrument(count)
    assert 0 < steps < 10
