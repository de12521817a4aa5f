"""Running a diagnostic program: without a shell, bounded in time and output, and never longer than asked."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

import trio
from attrs import evolve, field, frozen

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
_KEPT = ("PATH", "LD_LIBRARY_PATH")
"""All of our environment that a program gets: some images have the driver's libraries in a folder of their own."""
_REAP_S = 0.5
_LAST_WORDS_S = 0.5


@frozen
class Ran:
    """How a program ended. ``code`` is ``None`` when it was still running at its limit, negative for a signal.

    ``left`` is the process when not even SIGKILL ended it in time: it hangs in the kernel.
    """

    argv: tuple[str, ...]
    code: int | None
    stdout: str
    stderr: str
    left: trio.Process | None = field(default=None, eq=False, repr=False)

    @property
    def said(self) -> str:
        """Its own words about what is wrong, in one line."""
        lines = [line.strip() for line in f"{self.stderr}\n{self.stdout}".splitlines() if line.strip()]
        return lines[0][:300] if lines else "it said nothing"


async def run(argv: Sequence[str], timeout_s: float) -> Ran:
    """Run a program to its end or its limit. Raises ``OSError`` when it cannot be started.

    The program gets a process group of its own, which is killed as a whole at the limit and when this call is
    cancelled: `nvidia-smi` can hang for ever in the driver, and must not keep us.
    """
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    process = await trio.lowlevel.open_process(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", **env, "LC_ALL": "C"},
        start_new_session=True,
    )
    out, err = bytearray(), bytearray()
    # No checkpoint between the start and this try: a cancelled caller must still reach the clean-up.
    try:
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                assert process.stdout is not None
                assert process.stderr is not None
                nursery.start_soon(_collect, process.stdout, out)
                nursery.start_soon(_collect, process.stderr, err)
                await process.wait()
                # What it started may hold its pipes for ever: what is in them by now is all that counts.
                nursery.cancel_scope.deadline = trio.current_time() + _LAST_WORDS_S
            if nursery.cancel_scope.cancelled_caught:
                _kill_group(process)  # it has members still, so the number is nobody else's
        ran = Ran(tuple(argv), process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
    finally:
        if process.returncode is None:
            _kill_group(process)
            with trio.move_on_after(_REAP_S, shield=True):
                await process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                await trio.aclose_forcefully(pipe)
    return ran if process.returncode is not None else evolve(ran, left=process)


def _kill_group(process: trio.Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


async def _collect(stream: trio.abc.ReceiveStream, into: bytearray) -> None:
    """Read to the end; what is beyond the bound is read and dropped, so that the program does not block."""
    async for chunk in stream:
        into += chunk[: max(0, MAX_OUTPUT_BYTES - len(into))]
