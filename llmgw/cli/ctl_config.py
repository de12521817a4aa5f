"""``llmgw ctl config``: the cluster's settings shown, changed, compared and taken back."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from llmgw.cli.admin_client import AdminClient, Refused, client_of
from llmgw.cli.ctl import command
from llmgw.cli.settings_words import say_check, say_diff, say_faults, say_file, say_stale
from llmgw.cli.terminal import ago, echo, echo_json, say, table
from llmgw.errors import OperatorError, PeerError
from llmgw.link.keyfile import replace
from llmgw.settings.edit import Set, Unset, edited, get
from llmgw.settings.faults import ConfigError, dotted
from llmgw.settings.text_diff import text_diff
from llmgw.settings.yaml_text import block
from llmgw.store.files import read_text

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PATIENCE_S = 30.0
EXIT_DIFFERS = 1
EXIT_REFUSED = 2
EXIT_STALE = 4

_as_json = click.option("--json", "as_json", is_flag=True, help="The admin API's answer as it is.")
_CHANGING = (
    click.option("--reason", default="", metavar="TEXT", help="Why; it is kept with the revision and in the audit."),
    click.option("--yes", is_flag=True, help="Do not ask."),
    click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing."),
    click.option("--base", type=click.IntRange(0), metavar="REV",
                 help="Change it only if this is still the newest revision. [default: the one that is shown]"),
    _as_json,
)  # fmt: skip


def _changing(made: _Command) -> _Command:
    for option in reversed(_CHANGING):
        made = option(made)
    return made


@command.group(name="config")
def config() -> None:
    """The cluster's settings: one YAML document, every change of it a revision.

    \b
    llmgw ctl config show                          the document that holds, comments and all
    llmgw ctl config get models.llama-3.1-8b       a part of it, or the default that holds
    llmgw ctl config set models.llama-3.1-8b.replicas=4 router.auth=keys --reason 'more load'
    llmgw ctl config unset router.auth             back to the default
    llmgw ctl config edit                          the whole document in $EDITOR
    llmgw ctl config diff 3 5                      what changed between two revisions
    llmgw ctl config rollback 3                    an older revision's text again

    A path is keys with dots: lists of things with names by name (models.m.profiles.one-l40s.tp) or by number
    (profiles[0]); a new name that has dots itself in quotes (models."llama-3.3-70b".replicas=1). Values are YAML.

    What would change, and what that means for models and nodes, is shown before it is made; on a terminal you are
    asked, elsewhere --yes is needed. Every key is in docs/reference/settings.md.

    Exit codes: 0 done, 1 not confirmed (diff, check: there are differences), 2 wrong usage or refused with the faults,
    3 the control plane does not answer, 4 somebody else changed the settings meanwhile.
    """


@config.command()
@click.option("--revision", type=click.IntRange(1), metavar="REV", help="An older one.")
@_as_json
@click.pass_context
def show(ctx: click.Context, revision: int | None, as_json: bool) -> None:
    """The document that holds, or held, as it was written."""
    answer = _settings(client_of(ctx), revision)
    if as_json:
        echo_json(answer)
        return
    # As it is, since people redirect it into a file; YAML has no control characters, so no settings have any.
    click.echo(answer["text"], nl=not answer["text"].endswith("\n"))  # noqa: TID251
    say_file(answer)


@config.command(name="get")
@click.argument("path")
@_as_json
@click.pass_context
def get_(ctx: click.Context, path: str, as_json: bool) -> None:
    """The value at PATH: as it is written, else the default that holds."""
    answer = _settings(client_of(ctx), None)
    found = get(answer["text"], path)
    if as_json:
        echo_json({"path": dotted(found.path), "value": found.value, "written": found.written,
                   "revision": answer["revision"]})  # fmt: skip
        return
    if isinstance(found.value, dict | list) and found.value:
        echo("\n".join(block(found.value, 0)))
    else:
        echo(found.value if isinstance(found.value, str) else json.dumps(found.value))
    if not found.written:
        echo(f"{dotted(found.path)} is not set: this is its default", err=True)


@config.command(name="set")
@click.argument("changes", nargs=-1, required=True, metavar="PATH=VALUE…")
@_changing
@click.pass_context
def set_(ctx: click.Context, /, changes: tuple[str, ...], **how: Any) -> None:
    """Set values; the rest of the document, comments and order stay as they are.

    VALUE is YAML: 4, keys, [a, b], {min: 1, max: 4}. Several are made together or not at all.
    """
    edits = []
    for change in changes:
        path, found, value = change.partition("=")
        if not found:
            raise click.UsageError(f"{change}: write PATH=VALUE")
        edits.append(Set(path.strip(), value))
    _edited(ctx, tuple(edits), how)


@config.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH…")
@_changing
@click.pass_context
def unset(ctx: click.Context, /, paths: tuple[str, ...], **how: Any) -> None:
    """Take values away, so that their defaults hold; or a model, a profile, a node with all that is said of it."""
    _edited(ctx, tuple(Unset(path) for path in paths), how)


@config.command()
@_changing
@click.pass_context
def edit(ctx: click.Context, /, **how: Any) -> None:
    """Open the document in $EDITOR. What is wrong with it is shown, and it is opened again."""
    client = client_of(ctx)
    answer = _settings(client, None)
    text: str = answer["text"]
    while True:
        if not (sys.stdin.isatty() or os.environ.get("VISUAL") or os.environ.get("EDITOR")):
            raise OperatorError("llmgw ctl config edit", "no editor can be opened here: this is no terminal",
                                "set EDITOR to a program, or use llmgw ctl config set or import")  # fmt: skip
        try:
            changed = click.edit(text, extension=".yaml", require_save=True)
        except click.ClickException as failed:
            if text != answer["text"]:
                _keep(text)
            raise OperatorError(
                "llmgw ctl config edit", failed.format_message(), "set EDITOR to a program that runs here"
            ) from failed
        if changed is None or changed == answer["text"]:
            say(_check(client, answer["text"]), "nothing was changed", as_json=how["as_json"])
            return
        text = changed
        found = _check(client, text)
        if found["ok"]:
            break
        say_faults(found["faults"], "settings")
        if not sys.stdin.isatty() or not click.confirm("open it again?", default=True, err=True):
            if how["as_json"]:
                echo_json(found)
            _keep(text)
            ctx.exit(EXIT_REFUSED)
    try:
        _apply(ctx, client, answer, text, how, found)
    except (click.exceptions.Exit, OperatorError, PeerError):
        _keep(text)
        raise


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@_as_json
@click.pass_context
def check(ctx: click.Context, file: Path, as_json: bool) -> None:
    """What FILE would change, and on which models and nodes. Nothing is changed.

    Exit code 0 when it changes nothing, 1 when it does, 2 when it cannot be used.
    """
    found = _check(client_of(ctx), read_text(file))
    if as_json:
        echo_json(found)
    elif found["ok"]:
        say_check(found)
    else:
        say_faults(found["faults"], str(file))
    ctx.exit(EXIT_REFUSED if not found["ok"] else EXIT_DIFFERS if found["text"] else 0)


@config.command()
@click.argument("before", required=False, metavar="[A]")
@click.argument("after", required=False, metavar="[B]")
@_as_json
@click.pass_context
def diff(ctx: click.Context, before: str | None, after: str | None, as_json: bool) -> None:
    """What differs between two revisions, or between the settings and a file.

    \b
    llmgw ctl config diff                    the newest against the one before
    llmgw ctl config diff 3                  revision 3 against the newest
    llmgw ctl config diff 3 5
    llmgw ctl config diff settings.yaml      what holds against the file

    Exit code 0 when nothing differs, 1 when something does.
    """
    client = client_of(ctx)
    if before is not None and not before.isdigit():
        if after is not None:
            raise click.UsageError("a file is compared with what holds; leave B out")
        answer = _settings(client, None)
        lines = text_diff(answer["text"], read_text(Path(before)), f"revision {answer['revision']}", before)
        found: dict[str, Any] = {"from": answer["revision"], "to": before, "text": lines}
    else:
        query = "&".join(f"{name}={value}" for name, value in (("from", before), ("to", after)) if value is not None)
        found = client.get(f"settings/diff?{query}", _PATIENCE_S)
    if as_json:
        echo_json(found)
    else:
        say_diff(found["text"])
    ctx.exit(EXIT_DIFFERS if found["text"] else 0)


@config.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many.")
@click.option("--before", type=click.IntRange(1), metavar="REV", help="Only older ones than this.")
@_as_json
@click.pass_context
def history(ctx: click.Context, limit: int, before: int | None, as_json: bool) -> None:
    """Who changed the settings, when and why, newest first."""
    answer = client_of(ctx).get(f"settings/history?limit={limit}" + (f"&before={before}" if before else ""))
    if as_json:
        echo_json(answer)
        return
    rows = [
        [
            f"{r['revision']}{' (holds)' if r['revision'] == answer['newest'] else ''}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(r["at"])), ago(r["at"], answer["now"]), r["author"],
            r["reason"],
        ]
        for r in answer["revisions"]
    ]  # fmt: skip
    table(
        ["REVISION", "AT", "AGE", "BY", "WHY"],
        rows,
        empty="none is stored" if before is None else f"none before {before}",
    )


@config.command()
@click.argument("revision", type=click.IntRange(1), metavar="REV")
@_changing
@click.pass_context
def rollback(ctx: click.Context, /, revision: int, **how: Any) -> None:
    """Have an older revision's text hold again; that is a new revision, and the ones in between stay in the history."""
    client = client_of(ctx)
    text = _settings(client, revision)["text"]
    _apply(ctx, client, _settings(client, None), text, how, back_to=revision)


@config.command()
@click.option("--revision", type=click.IntRange(1), metavar="REV", help="An older one.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write it into this file.")
@_as_json
@click.pass_context
def export(ctx: click.Context, revision: int | None, out: Path | None, as_json: bool) -> None:
    """The document and nothing else, byte for byte, for a file of your own.

    With --out the file is there whole or as it was; a new one is 0600, as environments may hold tokens.
    """
    answer = _settings(client_of(ctx), revision)
    if out is not None:
        _write(out, answer["text"].encode())
    if as_json:
        echo_json(answer if out is None else {"revision": answer["revision"], "file": str(out)})
    elif out is None:
        click.echo(answer["text"], nl=False)  # noqa: TID251 - byte for byte


def _write(out: Path, data: bytes) -> None:
    try:
        there = out.stat()
    except OSError:
        there = None
    if there is None or stat.S_ISREG(there.st_mode):
        replace(out.resolve(), data, 0o600 if there is None else stat.S_IMODE(there.st_mode))
        return
    try:
        out.write_bytes(data)  # a pipe, or a terminal
    except OSError as failed:
        raise OperatorError(str(out), f"cannot be written: {failed.strerror}") from failed


@config.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@_changing
@click.pass_context
def import_(ctx: click.Context, /, file: Path, **how: Any) -> None:
    """Make FILE the settings, as it is."""
    client = client_of(ctx)
    _apply(ctx, client, _settings(client, None), read_text(file), how, name=str(file))


def _keep(text: str) -> None:
    """Somebody wrote this: it is not thrown away."""
    with tempfile.NamedTemporaryFile("w", prefix="llmgw-settings-", suffix=".yaml", delete=False) as file:
        file.write(text)
    echo(f"your text is in {file.name}", err=True)


def _settings(client: AdminClient, revision: int | None) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("settings" + (f"?revision={revision}" if revision else ""))
    return answer


def _check(client: AdminClient, text: str) -> dict[str, Any]:
    answer: dict[str, Any] = client.post("settings/check", {"text": text}, _PATIENCE_S)
    return answer


def _edited(ctx: click.Context, edits: tuple[Set | Unset, ...], how: dict[str, Any]) -> None:
    client = client_of(ctx)
    answer = _settings(client, how["base"])
    try:
        text, _ = edited(answer["text"], edits)
    except ConfigError as wrong:
        if how["as_json"]:
            echo_json({"ok": False, "faults": [fault.as_dict() for fault in wrong.faults]})
        else:
            say_faults([fault.as_dict() for fault in wrong.faults], "settings")
        ctx.exit(EXIT_REFUSED)
    _apply(ctx, client, answer, text, how)


def _apply(
    ctx: click.Context, client: AdminClient, answer: dict[str, Any], text: str, how: dict[str, Any],
    found: dict[str, Any] | None = None, *, name: str = "settings", back_to: int | None = None,
) -> None:  # fmt: skip
    """Show what a text would change, ask, and make it the settings."""
    base, quiet = how["base"] if how["base"] is not None else answer["revision"], how["as_json"]
    found = found or _check(client, text)
    if not found["ok"]:
        echo_json(found) if quiet else say_faults(found["faults"], name)
        ctx.exit(EXIT_REFUSED)
    if not found["text"] or how["dry_run"]:
        echo_json(found) if quiet else say_check(found)
        return
    if not quiet:
        say_check(found)
    if not how["yes"]:
        if not sys.stdin.isatty():
            raise OperatorError("llmgw ctl config", "nobody can be asked here", "look with --dry-run, then add --yes")
        if not click.confirm(f"change revision {base} to this?", err=True):
            echo("nothing was changed", err=True)
            ctx.exit(1)
    try:
        body = {"base": base, "reason": how["reason"]}
        if back_to is not None:
            made = client.post("settings/rollback", body | {"revision": back_to}, _PATIENCE_S)
        else:
            made = client.post("settings", body | {"text": text}, _PATIENCE_S)
    except Refused as refused:
        if refused.status != 409:
            raise
        echo_json(refused.answer) if quiet else say_stale(refused)
        merge, newest = refused.answer["merge"], refused.answer["newest"]
        question = f"make your changes on revision {newest['revision']} instead?"
        together = None if quiet or merge is None or back_to is not None else merge["merged"]
        if together is not None and sys.stdin.isatty() and click.confirm(question, err=True):
            _apply(ctx, client, newest, together, how | {"base": None, "yes": False})
            return
        ctx.exit(EXIT_STALE)
    if quiet:
        echo_json(made)
    else:
        echo(f"revision {made['settings']['revision']} holds")
