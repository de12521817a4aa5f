"""``llmgw doctor``: what is wrong with this machine and how to put it right."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio
from attrs import evolve

from llmgw import __version__
from llmgw.cli.files import agent_in_force
from llmgw.cli.terminal import echo
from llmgw.errors import OperatorError
from llmgw.settings.daemon import Discovery

if TYPE_CHECKING:
    from llmgw.discovery.machine import Machine
    from llmgw.doctor.document import Document
    from llmgw.doctor.facts import Facts
    from llmgw.doctor.verdict import Check
    from llmgw.settings.daemon import AgentConfig

_PATIENCE_S = 2.0
_COLOURS = {"fail": "red", "warn": "yellow", "info": "cyan", "unknown": "magenta"}


@click.command(name="doctor")
@click.option("--config", "path", type=click.Path(path_type=Path), default=Path("/etc/llmgw/agent.yaml"),
              show_default=True, envvar="LLMGW_AGENT_CONFIG", help="agent.yaml, where there is one.")  # fmt: skip
@click.option(
    "--only", multiple=True, metavar="ID", help="Only these checks: an id, or how ids begin (gpu, port.down)."
)
@click.option("--skip", multiple=True, metavar="ID", help="Not these checks.")
@click.option("--explain", metavar="ID", help="Say what a check is about, and check nothing.")
@click.option("--strict", is_flag=True, help="Exit code 3 when there are warnings.")
@click.option("--unknown", is_flag=True, help="Also list what could not be told, and what follows from something else.")
@click.option("--json", "as_json", is_flag=True, help="All facts and findings, for support; see --from.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of what --json prints, and nothing else.")
@click.option("--no-redact", is_flag=True, help="With --json: keep host names, addresses and UUIDs.")
@click.option("--from", "source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="Judge what --json wrote, instead of this machine.")  # fmt: skip
@click.option("--diff", nargs=2, type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="A B",
              help="Say what is different between two files that --json wrote.")  # fmt: skip
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Read this folder: a capture, or one that stands in for a machine's root.")  # fmt: skip
@click.option("--run-programs", is_flag=True,
              help="With --root: run that folder's programs. Only for a folder of your own.")  # fmt: skip
@click.option("--peer", metavar="HOST",
              help="Also try the path to another node, both ways; llmgw doctor --peer-wait runs there.")  # fmt: skip
@click.option("--peer-wait", type=click.FloatRange(0, 1440), is_flag=False, flag_value=10.0, metavar="[MINUTES]",
              help="Check nothing here: let other nodes try this one, for 10 minutes or so many.")  # fmt: skip
@click.option("--peer-port", type=click.IntRange(1024, 65535), help="With --peer-wait: listen on this port.")
@click.pass_context
def command(
    ctx: click.Context, path: Path, only: tuple[str, ...], skip: tuple[str, ...], explain: str | None, strict: bool,
    unknown: bool, as_json: bool, schema: bool, no_redact: bool, source: Path | None, diff: tuple[Path, Path] | None,
    root: Path | None, run_programs: bool, peer: str | None, peer_wait: float | None, peer_port: int | None,
) -> None:  # fmt: skip
    """Check this machine: GPUs, NVLink, fabrics, limits, names, engines. Changes nothing.

    Exit codes: 0 nothing failed, 1 something failed, 2 the doctor itself could not run, 3 warnings with --strict.
    """
    from llmgw.doctor.checks import CHECKS
    from llmgw.doctor.document import difference
    from llmgw.doctor.report import exit_code, explained, lines
    from llmgw.doctor.verdict import chosen, judge

    if schema:
        echo(json.dumps(document_schema(), indent=2))
        return
    if sum(given is not None for given in (source, diff, root)) > 1:
        raise OperatorError("--from, --diff and --root", "each say what is looked at", "give one of them")
    if peer is not None and (source is not None or root is not None):
        raise OperatorError("--peer", "needs the machine itself", "leave out --from and --root")
    if peer_wait is not None:
        from llmgw.cli.doctor_peer import wait
        from llmgw.doctor.peer import PORT

        wait(_config(path, None), peer_wait, peer_port or PORT)
        return
    for name in (*only, *skip, *((explain,) if explain else ())):
        if not chosen(CHECKS, (name,), ()):
            raise OperatorError(name, "is no check, and none begins so", "all of them are in docs/doctor.md")
    checks = chosen(CHECKS, only, skip)
    if explain is not None:
        for check in chosen(CHECKS, (explain,), ()):
            echo("\n".join(explained(check)))
        return
    if diff is not None:
        echo("\n".join(difference(_load(diff[0]), _load(diff[1]), checks)) or "no difference")
        return
    if source is None and not only and (config := _config(path, root)) is not None:
        # What somebody asks for by name is checked, whatever the settings leave out.
        checks = chosen(checks, (), config.doctor.skip)
        if config.doctor.skip and not as_json:
            echo(f"left out, as agent.yaml or the settings say: {', '.join(config.doctor.skip)}")
        for name in config.doctor.skip:
            if not chosen(CHECKS, (name,), ()):
                echo(f"doctor.skip: {name} is no check, and none begins so; see docs/doctor.md", err=True)
    if source is not None:
        document = _load(source)
    else:
        document = _read(path, root, run_programs=run_programs or root is None, peer=peer)
    verdicts = judge(document.facts, checks)
    try:
        if as_json:
            _print(document, checks, keep=no_redact, live=source is None and root is None)
        else:
            for line in lines(document.facts, verdicts, unknown=unknown):
                echo(line.text, fg=_COLOURS.get(line.severity.value) if line.severity else None)
    except BrokenPipeError:
        # Who reads the first lines only is told no less by the exit code. Nothing is left to be written at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    ctx.exit(exit_code(verdicts, strict=strict))


def document_schema() -> dict[str, Any]:
    """The JSON schema of what ``--json`` prints."""
    from llmgw.doctor.document import FORMAT
    from llmgw.doctor.facts import Facts
    from llmgw.doctor.network import Plan
    from llmgw.doctor.verdict import Verdict
    from llmgw.web.schema import json_schema

    facts, verdict, plan = (json_schema(kind) for kind in (Facts, Verdict, Plan))
    defs: dict[str, Any] = {}
    for kind, made in (("Facts", facts), ("Verdict", verdict), ("Plan", plan)):
        defs |= made.pop("$defs")
        defs[kind] = {k: v for k, v in made.items() if k not in ("$schema", "title")}
    return {
        "$schema": facts["$schema"],
        "title": "llmgw doctor --json",
        "type": "object",
        "properties": {
            "format": {"type": "integer", "maximum": FORMAT},
            "llmgw": {"type": "string", "description": "The version that read the facts."},
            "redacted": {"type": "boolean"},
            "findings": {"type": "array", "items": {"$ref": "#/$defs/Verdict"}},
            "network": {"type": "array", "items": {"$ref": "#/$defs/Plan"}},
            "facts": {"$ref": "#/$defs/Facts"},
        },
        "required": ["format", "llmgw", "redacted", "findings", "network", "facts"],
        "$defs": dict(sorted(defs.items())),
    }


def _load(path: Path) -> Document:
    from llmgw.doctor.document import read_text

    try:
        return read_text(path.read_bytes(), str(path))
    except OSError as wrong:
        raise OperatorError(str(path), f"cannot be read ({wrong.strerror})", "") from wrong


def _print(document: Document, checks: Sequence[Check], *, keep: bool, live: bool) -> None:
    from llmgw.doctor.document import as_json
    from llmgw.doctor.redact import redacted

    if not keep and not document.redacted:
        key = _key(document.facts, live=live)
        document = evolve(document, redacted=True, facts=redacted(document.facts, key))
    echo(json.dumps(as_json(document, checks), indent=2))


def _key(facts: Facts, *, live: bool) -> bytes:
    """What names are hidden with: this machine's own secret, so that two days of one machine can be compared."""
    from llmgw.doctor.redact import key_of

    try:
        secret = Path("/etc/machine-id").read_bytes() if live else b""
    except OSError:
        secret = b""
    return hashlib.sha256(secret + facts.host.hostname.encode()).digest() if secret else key_of(facts)


def _config(path: Path, root: Path | None) -> AgentConfig | None:
    """What this node was told; that says nothing of a folder from elsewhere."""
    return agent_in_force(path) if path.exists() and (root is None or str(path) != "/etc/llmgw/agent.yaml") else None


def _read(path: Path, root: Path | None, *, run_programs: bool, peer: str | None) -> Document:
    from llmgw.cli.doctor_peer import trying
    from llmgw.discovery.capture import CapturedMachine, is_capture
    from llmgw.discovery.machine import FilesOnly, LiveMachine, programs_of
    from llmgw.doctor.document import Document
    from llmgw.doctor.gather import Asker
    from llmgw.doctor.live import dial, hurried

    config = _config(path, root)
    discovery = Discovery() if config is None else config.discovery
    if root is not None:
        discovery = Discovery(root=str(root.resolve()))
    discovery = hurried(discovery)
    rules = () if config is None else config.fabrics
    folder = Path(discovery.root)
    machine: Machine
    if is_capture(folder):
        machine = captured = CapturedMachine(folder)
        rules = captured.rules
    elif run_programs:
        machine = LiveMachine(discovery)
    elif there := programs_of(folder):
        raise OperatorError(
            f"--root {root}",
            f"holds programs ({', '.join(str(p.relative_to(folder)) for p in there)}), and is no capture",
            "a folder that somebody sent could hold anything; for one that you made yourself add --run-programs",
        )
    else:
        machine = FilesOnly(discovery)
    live = root is None and discovery.root == "/"
    asker = Asker(machine, discovery, config, rules, os.environ if live else {}, dial if live else None)
    if root is None:
        asker = evolve(asker, agent_root=Path("/"))
    if peer is not None:
        asker = evolve(asker, peer=trying(peer, machine, config))
    return Document(__version__, False, trio.run(_patiently, asker))


async def _patiently(asker: Any) -> Facts:
    from llmgw.doctor.collect import collect

    async def say() -> None:
        await trio.sleep(_PATIENCE_S)
        echo(f"still reading; what hangs is left behind after {asker.config.timeout_s:g} s", err=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say)
        found = await collect(asker)
        nursery.cancel_scope.cancel(reason="read")
    return found
