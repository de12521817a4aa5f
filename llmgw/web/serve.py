"""The admin listener: Hypercorn's Trio worker, with a guard against clients that stop reading."""

from __future__ import annotations

import socket

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config, Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.typing import ASGIFramework

from llmgw.errors import OperatorError
from llmgw.settings.daemon import Address

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
    app: ASGIFramework, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; open requests get a second to end."""
    config = Config()
    config.graceful_timeout = 1.0
    config.keep_alive_timeout = 30.0
    config.h11_max_incomplete_size = 16 * 1024
    config.include_server_header = False
    config.loglevel = "ERROR"
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: worker_serve(
                ASGIWrapper(app),
                config,
                sockets=Sockets([], [listener], []),
                task_status=task_status,
            )
        )
        task_status.started()
