"""The proxy does to connections what its words say, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from fakes.proxy import Proxy, in_thread
from llmgw.settings.daemon import Address


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    async def echo(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                async for data in stream:
                    await stream.send_all(data)
                await stream.send_all(b"bye")

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, echo, listeners)
        target = Address("127.0.0.1", listeners[0].socket.getsockname()[1])
        yield await nursery.start(Proxy(target).run)
        nursery.cancel_scope.cancel()


async def dial(proxy: Proxy) -> trio.SocketStream:
    return await trio.open_tcp_stream(proxy.address.host, proxy.address.port)


async def says(stream: trio.SocketStream, text: bytes, within_s: float = 1.0) -> bytes | None:
    await stream.send_all(text)
    with trio.move_on_after(within_s):
        return bytes(await stream.receive_some())
    return None


async def test_what_is_held_arrives_after_the_healing() -> None:
    async with echoing() as proxy, await dial(proxy) as stream:
        assert await says(stream, b"a") == b"a"
        proxy.partition()
        assert await says(stream, b"b", 0.1) is None
        with pytest.raises(OSError, match=r"refused|attempts"):
            await dial(proxy)
        proxy.heal()
        assert await stream.receive_some() == b"b"
        async with await dial(proxy) as another:
            assert await says(another, b"c") == b"c"


async def test_what_is_dropped_is_gone() -> None:
    async with echoing() as proxy, await dial(proxy) as stream:
        assert await says(stream, b"a") == b"a"
        proxy.drop(down=True)
        assert await says(stream, b"b", 0.1) is None
        async with await dial(proxy) as another:
            assert await says(another, b"c") == b"c"


async def test_half_closed_the_other_half_goes_on() -> None:
    async with echoing() as proxy, await dial(proxy) as stream:
        assert await says(stream, b"a") == b"a"
        proxy.half_close(up=True)
        with trio.fail_after(1):
            assert await stream.receive_some() == b"bye"


async def test_cut_is_a_reset() -> None:
    async with echoing() as proxy, await dial(proxy) as stream:
        assert await says(stream, b"a") == b"a"
        proxy.cut()
        with trio.fail_after(1), pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        await trio.sleep(0.01)
        assert proxy.connections == 0


async def test_delayed() -> None:
    async with echoing() as proxy, await dial(proxy) as stream:
        proxy.delay_s = 0.1
        began = trio.current_time()
        assert await says(stream, b"a") == b"a"
        assert trio.current_time() - began >= 0.2


def test_beside_a_test_without_trio() -> None:
    with in_thread(Address("127.0.0.1", 1)) as proxy:
        assert proxy.address.port
        proxy.do(Proxy.partition)
