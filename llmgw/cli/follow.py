"""``--watch``: what a command shows, anew whenever it changes, until Ctrl-C."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from llmgw.cli.admin_client import AdminClient
from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError
from llmgw.web.changes import applied

watching = click.option("--watch", is_flag=True, help="Go on showing it as it changes, until Ctrl-C.")

_FIRST_S, _LONGEST_S, _CONNECT_S, _LEAVE_S = 0.5, 10.0, 10.0, 1.0
_MOST = 16 * 1024 * 1024
_DECISIONS = 50
_CLEAR = "\x1b[H\x1b[2J"


def follow(client: AdminClient, parts: tuple[str, ...], show: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    """Show these parts of the cluster. With ``as_json`` each message is a line: a snapshot, then changes.

    Raises :class:`OperatorError` when the control plane refuses, and :class:`PeerError` when it does not answer at
    first; one that goes away later is tried again.
    """
    import trio

    client.get("whoami")  # a WebSocket that cannot be opened says less of why
    trio.run(_follow, client, parts, show, as_json)


async def _follow(
    client: AdminClient, parts: tuple[str, ...], show: Callable[[dict[str, Any]], None], as_json: bool
) -> None:
    import trio
    from trio_websocket import ConnectionClosed, ConnectionRejected, HandshakeError, open_websocket_url

    scheme = "ws" if client.tls is None else "wss"
    host = f"[{client.host}]" if ":" in client.host else client.host
    url = f"{scheme}://{host}:{client.port}/api/v1/watch?parts={','.join(parts)}"
    headers = [(b"authorization", f"Bearer {client.token}".encode())] if client.token else []
    wait, told_once = _FIRST_S, False
    while True:
        reason = "the connection broke"
        try:
            async with open_websocket_url(
                url, client.tls, extra_headers=headers, connect_timeout=_CONNECT_S, disconnect_timeout=_LEAVE_S,
                max_message_size=_MOST,
            ) as socket:  # fmt: skip
                picture: dict[str, Any] = {}
                while True:
                    told = json.loads(await socket.get_message())
                    wait, told_once = _FIRST_S, True
                    if as_json:
                        echo(json.dumps(told))
                        continue
                    picture = told if told["type"] == "snapshot" else applied(picture, told, _DECISIONS)
                    _draw({**picture, "now": told["now"]}, show)
        except ConnectionRejected as refused:
            reason, remedy = _said(refused.body, f"it answered {refused.status_code}")
            if refused.status_code < 500:
                raise OperatorError(client.name, reason, remedy) from refused
        except ConnectionClosed as closed:
            reason = (closed.reason.reason if closed.reason else None) or reason
        except (HandshakeError, OSError, trio.BrokenResourceError) as failed:
            away = client.away(failed)
            if not told_once:
                raise away from failed
            reason = away.reason
        echo(f"{client.name}: {reason}; trying again in {wait:g} s", err=True)
        await trio.sleep(wait)
        wait = min(_LONGEST_S, 2 * wait)


def _draw(picture: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    if sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)  # noqa: TID251
    else:
        echo(f"--- {time.strftime('%H:%M:%S', time.localtime(picture['now']))}")
    show(picture)


def _said(body: bytes | None, usual: str) -> tuple[str, str]:
    """The reason and the remedy of an answer."""
    try:
        said = json.loads(body or b"")["error"]
        return str(said["reason"]), str(said.get("remedy", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return usual, ""
