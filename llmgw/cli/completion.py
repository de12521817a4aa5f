"""``llmgw completion``, and names that are completed from the control plane when it answers quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem, get_completion_class

from llmgw.cli import contexts
from llmgw.errors import LlmgwError

_WITHIN_S = 1.0

Completed = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what makes a shell complete llmgw's commands.

    \b
    bash   eval "$(llmgw completion bash)"         in ~/.bashrc
    zsh    eval "$(llmgw completion zsh)"          in ~/.zshrc
    fish   llmgw completion fish | source          in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    from llmgw.cli.main import cli

    click.echo(kind(cli, {}, "llmgw", "_LLMGW_COMPLETE").source())  # noqa: TID251


def _items(names: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def names(*kinds: str) -> Completed:
    """Completes with the names of ``models``, ``nodes`` or ``replicas``; with nothing when that takes a second."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found: list[str] = []

        def ask() -> None:
            from llmgw.cli.admin_client import connect

            at: click.Context | None = ctx
            while at is not None and "token_file" not in at.params:
                at = at.parent
            if at is None:
                return
            given = at.params
            try:
                client = connect(given["admin"], given["token_file"], given["config"], given.get("context_name"))
                answer = client.get("names", _WITHIN_S)
                found.extend(name for kind in kinds for name in answer[kind])
            except (LlmgwError, OSError, KeyError, TypeError):
                return  # a shell that completes is no place for errors

        asking = threading.Thread(target=ask, daemon=True)  # a name server may take its time, and cannot be told not to
        asking.start()
        asking.join(_WITHIN_S)
        return _items(list(found), incomplete)

    return complete


def context_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes with the names of contexts."""
    try:
        return _items(sorted(contexts.load().contexts), incomplete)
    except LlmgwError:
        return []
