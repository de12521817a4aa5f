"""``llmgw ca rotate``: one CA follows another, step by step, and no step leaves a node behind unseen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from llmgw.cli.admin_client import AdminClient, connect
from llmgw.cli.files import server_config
from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError
from llmgw.link import ca, keyfile
from llmgw.link.authority import certificates, fingerprint

_NOTICED_S = 10.0


@frozen
class _Place:
    """Where the CA is, what the control plane trusts and shows, and the control plane itself."""

    folder: Path
    bundle: Path
    certificate: Path
    client: AdminClient

    def trusted(self) -> dict[str, dict[str, Any]]:
        """The CAs that the running control plane trusts, by fingerprint."""
        return {found["sha256"]: found for found in self.client.get("identities")["cas"]}

    def old(self) -> Iterator[ca.Generation]:
        """The CAs of the folder that no longer issue and are still in the bundle."""
        there = {fingerprint(c) for c in certificates(keyfile.read(self.bundle), str(self.bundle))}
        active = ca.active(self.folder)
        return (g for g in ca.generations(self.folder) if g.number < active.number and g.sha256 in there)


def _place(config: Path) -> _Place:
    server = server_config(config)
    if server.link is None or server.link.issuing is None:
        raise OperatorError(
            f"{config}: link.issuing",
            "is not set, so no CA of this control plane can be rotated",
            "with a CA of your own: add its new root to the bundle, and see llmgw ctl identities for who has it",
        )
    link = server.link
    assert link.issuing is not None
    return _Place(Path(link.issuing.ca), Path(link.tls.ca), Path(link.tls.certificate), connect(None, None, config))


@click.group(invoke_without_command=True)
@click.option("--config", type=click.Path(path_type=Path), default=Path("/etc/llmgw/server.yaml"), show_default=True,
              envvar="LLMGW_CONFIG", help="server.yaml")  # fmt: skip
@click.pass_context
def rotate(ctx: click.Context, config: Path) -> None:
    """Let a new CA follow the old one: add, switch, retire. Without a step: how far it is, and who is waited for.

    \b
    add     makes a new root and issuing CA; every node is sent the root
    switch  certificates come from the new CA, once every node has its root
    retire  the old root is trusted no more, once nobody needs it

    No session ends and no stream is lost. Run it where the control plane runs, as its user.
    """
    ctx.obj = config
    if ctx.invoked_subcommand is not None:
        return
    place = _place(config)
    active, trusted = ca.active(place.folder), place.trusted()
    for generation in ca.generations(place.folder):
        known = trusted.get(generation.sha256)
        state = (
            "issues"
            if generation.number == active.number
            else "is next"
            if generation.number > active.number
            else "old"
        )
        echo(f"CA {generation.number} SHA-256 {generation.sha256}: {state}, {'trusted' if known else 'not trusted'}")
        if known and generation.number != active.number:
            _list(known["lacking"] if generation.number > active.number else known["needing"])
    echo(f"next: {_next(place, active)}")


def _next(place: _Place, active: ca.Generation) -> str:
    if ca.generations(place.folder)[-1].number > active.number:
        return "llmgw ca rotate switch, when every node has the new root"
    if any(place.old()):
        return "llmgw ca rotate retire, when nobody needs the old root"
    return "nothing; llmgw ca rotate add begins a rotation"


def _list(needs: list[dict[str, str]]) -> None:
    for need in needs:
        echo(f"  {need['node']}: {need['reason']}")


@rotate.command()
@click.pass_obj
def add(config: Path) -> None:
    """Make a new CA beside the old one and let everybody trust it. It issues nothing yet."""
    place = _place(config)
    made = ca.add_generation(place.folder, time.time())
    ca.add_to_bundle(place.bundle, made.root)
    echo(f"CA {made.number} in {made.folder}, SHA-256 {made.sha256}")
    known = _noticed(place, made.sha256)
    if known["lacking"]:
        echo("not trusted yet by:")
        _list(known["lacking"])
    echo("next: llmgw ca rotate switch")


@rotate.command()
@click.option("--leave", multiple=True, metavar="NODE", help="Do not wait for this node: it will have to join anew.")
@click.pass_obj
def switch(config: Path, leave: tuple[str, ...]) -> None:
    """Issue from the new CA from now on, also the control plane's own certificate. Nodes renew within a minute."""
    place = _place(config)
    active, newest = ca.active(place.folder), ca.generations(place.folder)[-1]
    if newest.number == active.number and not _own_is_old(place, active):
        raise OperatorError("llmgw ca rotate switch", "there is no CA that could follow", "first: llmgw ca rotate add")
    known = _noticed(place, newest.sha256)
    _refuse(
        "has nodes that do not trust it yet", newest.sha256, [n for n in known["lacking"] if n["node"] not in leave]
    )
    ca.activate(place.folder, newest.number)
    if _own_is_old(place, newest):
        ca.reissue_server(place.folder, place.certificate, time.time())
        echo(f"issued anew: {place.certificate}")
    echo(f"CA {newest.number} issues from now on; nodes that are connected renew within a minute")
    echo("next: llmgw ca rotate retire")


@rotate.command()
@click.pass_obj
def retire(config: Path) -> None:
    """Trust the old root no more. Refused, naming the nodes, as long as one of them needs it."""
    place = _place(config)
    old = tuple(place.old())
    if not old:
        raise OperatorError(
            "llmgw ca rotate retire",
            "there is no old root that is still trusted",
            f"next: {_next(place, ca.active(place.folder))}",
        )
    trusted = place.trusted()
    for generation in old:
        known = trusted.get(generation.sha256)
        if known is None:
            continue
        if known["ours"]:
            raise OperatorError(
                f"CA {generation.sha256[:16]}", "is what the control plane's own certificate is from",
                "llmgw ca rotate switch issues it anew; or wait until the server has read it",
            )  # fmt: skip
        _refuse("is still in use", generation.sha256, known["needing"])
    for generation in old:
        ca.remove_from_bundle(place.bundle, generation.sha256)
    _unlearned(place, {generation.sha256 for generation in old})
    for generation in old:
        echo(f"retired: CA {generation.number}; its keys in {generation.folder} are of no more use, remove them")


def _own_is_old(place: _Place, newest: ca.Generation) -> bool:
    """Whether the control plane's certificate is from an older CA of the folder."""
    from llmgw.link.trust import anchor

    chain = certificates(keyfile.read(place.certificate), str(place.certificate))
    found = anchor(chain, [g.root for g in ca.generations(place.folder)])
    return found is not None and found != newest.root


def _noticed(place: _Place, sha256: str) -> dict[str, Any]:
    """What the control plane says of a CA, once it has read the bundle that has it."""
    until = time.monotonic() + _NOTICED_S
    while (known := place.trusted().get(sha256)) is None:
        if time.monotonic() > until:
            raise OperatorError(
                str(place.bundle), "has the new root, and the control plane does not trust it", "look at its log"
            )
        time.sleep(0.2)
    return known


def _unlearned(place: _Place, old: set[str]) -> None:
    """Wait until the control plane trusts none of these any more."""
    until = time.monotonic() + _NOTICED_S
    while old & place.trusted().keys():
        if time.monotonic() > until:
            raise OperatorError(
                str(place.bundle), "lacks the old root, and the control plane still trusts it", "look at its log"
            )
        time.sleep(0.2)


def _refuse(what: str, sha256: str, needs: list[dict[str, str]]) -> None:
    if needs:
        named = "; ".join(f"{need['node']} {need['reason']}" for need in needs)
        raise OperatorError(
            f"CA {sha256[:16]}…", f"{what}: {named}",
            "wait for them, or give them up: llmgw ctl node forget NODE, llmgw ctl deny node NODE",
        )  # fmt: skip
