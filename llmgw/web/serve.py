"""The admin listener: Hypercorn's Trio worker, with a guard against clients that stop reading."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from starlette.types import ASGIApp

from llmgw.errors import OperatorError
from llmgw.link.identity import Certificate
from llmgw.settings.daemon import Address
from llmgw.web.admin_tls import AdminTlsContext, shaken

_STALLED_MS = 5000
"""Hypercorn 0.18 shields its sends without a bound, so the kernel has to end a connection whose peer takes nothing."""


def listen(address: Address) -> socket.socket:
    """Open the admin listener. Raises :class:`OperatorError` naming the address when it cannot be had."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
        opened.bind((address.host, address.port))
        opened.listen(128)
        opened.setblocking(False)
    except OSError as failed:
        opened.close()
        raise OperatorError(
            f"admin.listen {address}",
            f"cannot listen there: {failed.strerror}",
            "stop whatever listens on this address, or choose another one in server.yaml",
        ) from failed
    return opened


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    tls: AdminTlsContext | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; then every connection is cut, whatever its peer does.

    Hypercorn's own loop tells an application nothing of a certificate, so connections are accepted here. The chain of
    the other end is ``request.state.chain``.
    """
    config = Config()
    config.keep_alive_timeout = 30.0
    config.h11_max_incomplete_size = 16 * 1024
    config.websocket_max_message_size = 4096
    config.websocket_ping_interval = 20.0
    config.include_server_header = False
    config.loglevel = "ERROR"
    wrapped, context, open_now = ASGIWrapper(cast(ASGIFramework, app)), WorkerContext(None), set[trio.SocketStream]()

    async def connection(stream: trio.SocketStream) -> None:
        open_now.add(stream)
        try:
            over: Any = stream
            chain: Sequence[Certificate] = ()
            if tls is not None:
                over, chain = await shaken(stream, tls.context)
            state = ConnectionState({"chain": chain})
            await TCPServer(wrapped, config, context, state, over)
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # a handshake that failed
        finally:
            open_now.discard(stream)
            stream.socket.close()

    async def cut() -> None:
        # Hypercorn shields its sends: only closing the sockets ends one to a peer that reads nothing.
        try:
            await trio.sleep_forever()
        finally:
            for stream in tuple(open_now):
                stream.socket.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cut)
        listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        await nursery.start(partial(trio.serve_listeners, connection, [listening], handler_nursery=nursery))
        task_status.started()
