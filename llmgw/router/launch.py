"""How a router worker is started: as nobody's child, with the listening socket that all of them share."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import cattrs
import orjson
import trio
from attrs import evolve, frozen

from llmgw import __version__
from llmgw.errors import OperatorError
from llmgw.settings.convert import strict_converter
from llmgw.settings.daemon import Log, RouterListener

_MOST_BY_ITSELF = 4


@frozen
class Setup:
    """All that a worker is started with, besides its sockets."""

    router: RouterListener
    log: Log


@cache
def _converter() -> cattrs.Converter:
    return strict_converter()


def encode(setup: Setup) -> str:
    """As one argument of a command line. There is nothing secret in it."""
    return orjson.dumps(_converter().unstructure(setup)).decode()


def decode(text: str) -> Setup:
    """What :func:`encode` made. Raises ``ValueError`` or cattrs' errors."""
    return _converter().structure(orjson.loads(text), Setup)


def fingerprint(setup: Setup) -> str:
    """A worker with another one is replaced: of another version of llmgw or Python, or with other settings.

    How many of them there are is nothing that one of them knows.
    """
    alike = evolve(setup, router=evolve(setup.router, workers=None))
    return hashlib.sha256(f"{__version__} {sys.version} {encode(alike)}".encode()).hexdigest()[:16]


def count(router: RouterListener) -> int:
    """How many workers there shall be."""
    return router.workers or min(_MOST_BY_ITSELF, len(os.sched_getaffinity(0)))


async def launch(control: Path, setup: Setup, listener: socket.socket, *, alone: bool) -> int:
    """Start a worker; returns its pid. It is heard of over the control socket when it lives.

    Raises :class:`OperatorError`.
    """
    argv = [
        sys.executable, "-m", "llmgw.router.main",
        "--socket", str(control), "--listen-fd", str(listener.fileno()), "--setup", encode(setup),
        "--fingerprint", fingerprint(setup),
        *(("--alone",) if alone else ()),
    ]  # fmt: skip
    launched = await trio.run_process(
        argv, stdin=subprocess.DEVNULL, capture_stdout=True, check=False, pass_fds=(listener.fileno(),)
    )
    if launched.returncode != 0:
        raise OperatorError("the router", f"cannot be launched (exit code {launched.returncode})")
    return int(launched.stdout)
