"""``llmgw doctor --peer-wait``: let another node try this one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError

if TYPE_CHECKING:
    from llmgw.discovery.machine import Machine
    from llmgw.doctor.peer_facts import Peer, PeerPath
    from llmgw.settings.daemon import AgentConfig


def host_and_port(said: str) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT``, ``[V6]:PORT``. Raises :class:`OperatorError` for what is neither."""
    from llmgw.doctor.peer import PORT

    host, port = said, str(PORT)
    if said.startswith("["):
        host, _, after = said[1:].partition("]")
        port = after.removeprefix(":") or port
    elif said.count(":") == 1:
        host, _, port = said.partition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise OperatorError(f"--peer {said}", "is no HOST nor HOST:PORT", "for example: --peer node-2")
    return host, int(port)


def trying(
    said: str, machine: Machine, config: AgentConfig | None
) -> Callable[[], Awaitable[tuple[Peer, PeerPath | None]]]:
    """How the doctor tries this node."""
    from llmgw.doctor.peer import ask_peer
    from llmgw.doctor.peer_here import here, ports_to_try

    host, port = host_and_port(said)
    agent = None if config is None else (config.port_first, config.port_last)
    return partial(ask_peer, here(machine, machine.host().hostname), host, port, ports_to_try(machine, agent))


def wait(config: AgentConfig | None, minutes: float, port: int) -> None:
    """Let other nodes try this one for so long."""
    from llmgw.discovery.machine import LiveMachine
    from llmgw.doctor.peer import wait_for_peers
    from llmgw.doctor.peer_here import here
    from llmgw.settings.daemon import Discovery

    machine = LiveMachine(Discovery())
    end = here(machine, machine.host().hostname)
    address = "" if config is None or config.address.startswith("127.") else config.address

    async def work() -> None:
        with trio.move_on_after(minutes * 60):
            async with trio.open_nursery() as nursery:
                listeners = await nursery.start(wait_for_peers, end, [address or None], port, echo)
                at = listeners[0].socket.getsockname()[1]
                name = address or end.name
                echo(f"waiting for {minutes:g} minutes on {address or 'all addresses'}, port {at}; on the other node:")
                echo(f"  llmgw doctor --peer {name}{'' if at == _usual() else f':{at}'}")

    try:
        trio.run(work)
    except* OSError as failed:
        why = failed.exceptions[0]
        raise OperatorError(f"port {port}", f"cannot be listened on ({why})", "name another one: --peer-port") from None


def _usual() -> int:
    from llmgw.doctor.peer import PORT

    return PORT
