"""One agent from its first message on: checked, refused in words, or handed to its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from llmgw.errors import PeerError
from llmgw.link.attempts import host_of
from llmgw.link.codec import Unknown
from llmgw.link.identity import Certificate
from llmgw.link.messages import CertificateIssued, Message, Refused, Register, RenewCertificate
from llmgw.link.patience import DEFAULT_LIMITS, LinkLimits
from llmgw.link.protocol import Role
from llmgw.link.repeats import Repeats, gist
from llmgw.link.session import Session, Watch, open_session
from llmgw.telemetry.logging import logger

Handler = Callable[[Session, Register], Awaitable[None]]
Check = Callable[[Register], Refused | None]
Renew = Callable[[RenewCertificate], Awaitable[CertificateIssued | Refused]]

_HANG_UP_S = 2.0
_log = logger("link")


async def attend(
    stream: trio.abc.Stream,
    handler: Handler,
    check: Check,
    *,
    peer: str,
    remote: str,
    limits: LinkLimits = DEFAULT_LIMITS,
    chain: tuple[Certificate, ...] = (),
    renew: Renew | None = None,
    watch: Watch | None = None,
    repeats: Repeats | None = None,
) -> None:
    """Serve one agent over a stream whose other end is ``peer``: first message, ``check``, handler.

    ``chain`` is what it showed; the handler finds it in the session. ``renew`` answers one that comes only for a new
    certificate. ``repeats`` knows what the log was told before.
    Raises :class:`~llmgw.link.session.PeerGone` when the agent never got as far as its handler.
    """
    repeats = repeats or Repeats()
    async with open_session(stream, Role.SERVER, peer=peer, remote=remote, limits=limits, watch=watch) as session:
        session.chain = chain
        first = await session.receive()
        if isinstance(first, RenewCertificate) and renew is not None:
            await _renewed(session, await renew(first), repeats)
            return
        refused = check(first) if isinstance(first, Register) else _not_register(first)
        if refused is not None:
            await _refuse(session, refused, repeats)
            return
        assert isinstance(first, Register)
        repeats.over(f"{peer}@{host_of(remote)}")
        try:
            await handler(session, first)
        except PeerError as ended:
            _log.info("session ended", node=first.node, remote=remote, reason=ended.reason)
        except Exception:  # noqa: BLE001
            # Caught here so that the agent learns of it too.
            _log.exception("session failed", node=first.node, remote=remote)
            session.close("the control plane failed to handle this session; its log says how")


async def _refuse(session: Session, refused: Refused, repeats: Repeats) -> None:
    who = f"{session.peer}@{host_of(session.remote)}"
    if times := repeats.times(who, gist(refused), trio.current_time()):
        _log.warning(
            "agent refused",
            node=session.peer,
            remote=session.remote,
            claim=refused.claim,
            wanted=refused.wanted,
            found=refused.found,
            certificate=refused.certificate,
            times=times,
        )
    await session.refuse(refused)


async def _renewed(session: Session, answered: CertificateIssued | Refused, repeats: Repeats) -> None:
    if isinstance(answered, Refused):
        await _refuse(session, answered, repeats)
        return
    await session.send(answered)
    with trio.move_on_after(_HANG_UP_S):
        await session.receive()  # the agent hangs up when it has it


def _not_register(first: Message | Unknown) -> Refused:
    found = first.tag if isinstance(first, Unknown) else type(first).__name__
    return Refused("first message", "register", found, "", "this is no llmgw agent, or one that is too new")
