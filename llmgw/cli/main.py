"""The ``llmgw`` command: finds the sub-command, and turns every known error into a sentence and an exit code."""

from __future__ import annotations

import errno
import sys
from importlib import import_module

import click

from llmgw import __version__
from llmgw.errors import LlmgwError, OperatorError, PeerError

_COMMANDS = {
    "server": "llmgw.cli.server",
    "agent": "llmgw.cli.agent",
    "ctl": "llmgw.cli.ctl_all",
    "ca": "llmgw.cli.ca",
    "config": "llmgw.cli.config",
    "completion": "llmgw.cli.completion",
    "demo": "llmgw.cli.demo",
    "doctor": "llmgw.cli.doctor",
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class _Lazy(click.Group):
    """Imports a sub-command only when it is asked for: ``llmgw version`` must not load an HTTP stack."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            command: click.Command = import_module(_COMMANDS[cmd_name]).command
            return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmgw", message="%(prog)s %(version)s")
def cli() -> None:
    """One OpenAI-compatible address in front of a fleet of GPU machines.

    \b
    Try it on this machine:     llmgw demo
    Run the control plane:      llmgw server --config server.yaml
    Run a node:                 llmgw agent --config agent.yaml
    See what a node has:        llmgw agent inventory
    See what is wrong with it:  llmgw doctor
    See what the cluster does:  llmgw ctl status

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 the control plane cannot be reached.
    """


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"llmgw {__version__}")  # noqa: TID251 - nothing else is loaded for it


def main() -> None:
    """Entry point of the ``llmgw`` program."""
    try:
        code = cli(prog_name="llmgw", standalone_mode=False)  # what a command gave to ctx.exit()
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as wrong:
        wrong.show()
        sys.exit(wrong.exit_code)
    except LlmgwError as failed:
        from llmgw.cli.terminal import echo

        echo(f"error: {failed}", err=True)
        if isinstance(failed, PeerError):
            sys.exit(EXIT_UNREACHABLE)
        sys.exit(EXIT_USAGE if isinstance(failed, OperatorError) else EXIT_FAILED)
    except BrokenPipeError:
        # The reader of our output left (`llmgw ctl nodes | head`): nothing is wrong.
        sys.stderr.close()
        sys.exit(0)
    except OSError as failed:
        # Files are written under their names: what has none is our output.
        if failed.errno not in _NO_ROOM or failed.filename is not None:
            raise
        click.echo(f"error: the output cannot be written: {failed.strerror}", err=True)  # noqa: TID251
        sys.exit(EXIT_USAGE)
    sys.exit(code if isinstance(code, int) else 0)
