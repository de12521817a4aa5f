"""``llmgw agent status``: how this node stands with its control plane, whether its agent runs or not."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from llmgw.cli.files import agent_config
from llmgw.cli.terminal import ago, echo, echo_json
from llmgw.errors import OperatorError
from llmgw.settings.faults import ConfigError
from llmgw.settings.paths import resolve

if TYPE_CHECKING:
    from llmgw.agent.kept import Kept


def _runs(state_dir: Path) -> bool:
    """Whether an agent holds the state folder."""
    try:
        handle = os.open(state_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _settings(kept: Kept) -> dict[str, Any]:
    """What the agent keeps of settings, as JSON."""
    refused = kept.refused
    return {
        "used": None if kept.used is None else kept.used.revision,
        "trial": None if kept.trial is None else kept.trial.revision,
        "refused": None if refused is None else {"revision": refused.settings.revision, "reason": refused.reason},
        "file_not_used": kept.file or None,
    }


def settings_lines(kept: Kept) -> list[str]:
    """The same for people."""
    used, trial = kept.used, kept.trial
    lines = [f"settings: revision {used.revision}" if used is not None else "settings: none but agent.yaml"]
    if trial is not None:
        lines.append(f"settings: revision {trial.revision}, on trial until the agent has been up on it for a while")
    if (refused := kept.refused) is not None:
        lines.append(f"settings: revision {refused.settings.revision} REFUSED: {refused.reason}")
        if refused.tried:
            lines.append("  correct the settings, or have them tried again: SIGHUP to the agent")
    if kept.file:
        lines.append(f"agent.yaml as it is now is NOT USED: {kept.file}")
    return lines


def _of_what_runs(path: Path, wrong: ConfigError) -> None:
    """Show how the agent stands whose file cannot be used any more, as far as that still says where it is."""
    from llmgw.agent import link_file
    from llmgw.agent.kept import KeptFile
    from llmgw.agent.own_file import OwnFile

    try:
        written = OwnFile(path).read()
    except OperatorError:
        raise wrong from None
    value = written.document.value
    place = value.get("state_dir") if isinstance(value, dict) else None
    if not isinstance(place, str):
        raise wrong
    state_dir = Path(resolve(place, written.folder))
    echo(f"its agent {'runs' if _runs(state_dir) else 'does not run'}")
    if (link := link_file.read(state_dir)) is not None:
        echo(f"link: {'connected' if link.connected else 'not connected'}, {link.control_plane}")
    for line in settings_lines(KeptFile(state_dir).read()):
        echo(line)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show how this node stands with its control plane: connected, or why not and what to do.

    Reads what the agent wrote down; it need not run. Exit code 1 when it is not connected.
    """
    from llmgw.agent import link_file
    from llmgw.agent.kept import KeptFile
    from llmgw.link.authority import fingerprint
    from llmgw.link.identity import day
    from llmgw.link.own import OwnFiles

    try:
        config = agent_config(ctx.obj)
    except ConfigError as wrong:
        _of_what_runs(ctx.obj, wrong)
        raise
    state_dir = Path(config.state_dir)
    running, link, kept = _runs(state_dir), link_file.read(state_dir), KeptFile(state_dir).read()
    own = OwnFiles(config.tls, state_dir)
    certificate, cas = own.certificate(), own.cas()
    connected = running and link is not None and link.connected
    if as_json:
        shown: dict[str, Any] = {
            "node": config.id,
            "running": running,
            "connected": connected,
            "link": None if link is None else attrs.asdict(link),
            "settings": _settings(kept),
            "certificate": {**attrs.asdict(certificate), "serial": f"{certificate.serial:x}"},
            "cas": [{"subject": c.subject.rfc4514_string(), "sha256": fingerprint(c)} for c in cas],
        }
        echo_json(shown)
    else:
        now = time.time()
        echo(f"node {config.id}: its agent {'runs' if running else 'does not run'}")
        if link is None:
            echo(f"link: {'no connection was tried yet' if running else 'no agent has ever run here'}")
        elif link.connected:
            word = "connected" if running else "was connected when the agent ended"
            echo(f"link: {word}, {link.control_plane}, since {ago(link.since, now)}")
        else:
            what = "REFUSED" if link.refused is not None else "not connected"
            echo(f"link: {what}, {link.control_plane}, since {ago(link.since, now)}: {link.reason}")
            if link.refused is not None:
                for name in ("claim", "wanted", "found", "certificate", "remedy"):
                    echo(f"  {name + ':':<13}{getattr(link.refused, name)}")
            elif link.remedy:
                echo(f"  {link.remedy}")
        for line in settings_lines(kept):
            echo(line)
        left = certificate.not_after - now
        ends = f"ends in {ago(now, now + left)}" if left > 0 else f"EXPIRED {ago(certificate.not_after, now)} ago"
        if (early := certificate.not_before - now) > 0:
            ends = f"NOT VALID YET, for {ago(now, now + early)}"
        echo(f"certificate: {certificate}; {ends}; key SHA-256 {certificate.key}")
        for ca in cas:
            echo(f"trusts: {ca.subject.rfc4514_string()}, SHA-256 {fingerprint(ca)}, until "
                       f"{day(ca.not_valid_after_utc.timestamp())}")  # fmt: skip
    if not connected:
        ctx.exit(1)
