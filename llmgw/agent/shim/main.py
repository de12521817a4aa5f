"""The parent of one engine: starts it, reaps it, rotates its log, and writes down how it ended.

Run by path as ``python -I -S shim/main.py FOLDER LOG_BYTES CGROUP ASKED COMMAND …``; standard library only, because a
copy of it lives as long as each engine does, and outlives any agent. It detaches itself, so that it is nobody's child,
and is the subreaper of everything that the engine starts: a worker that leaves the process group is still its own.

Files in FOLDER: ``lock`` is held for as long as the shim lives; ``shim.json`` has its pid and the engine's, with
their start times, and the fingerprint of its own command line; ``exit.json`` says how the engine ended, once nothing
that it started is left; ``engine.log`` and ``engine.log.1`` have its output. It does not start without a
``record.json`` that has the LLMGW_LAUNCH of its own environment: an agent that gave the launch up removes that first,
under the lock.

CGROUP, if it is not empty, is made for the engine and removed when nothing is left in it. The shim itself stays out of
it, so that killing all that is in there leaves somebody who can say how the engine ended.

SIGTERM asks the engine's group to end, or where ASKED is ``first`` only its first process, which then ends the others
itself; SIGUSR1 kills everything that it started. When the engine's first process ends, the rest of its group is ended
too: workers of a dead engine hold GPU memory and serve nobody. What is killed may leave shared memory behind; Python's
resource tracker, which removes it once all else is gone, is killed last.
"""

import ctypes
import json
import os
import signal
import sys
import time

sys.path.append(os.path.abspath(f"{__file__}/../../../.."))  # run by path, with nothing but the standard library

from llmgw.agent.shim.cgroup import Cgroup
from llmgw.agent.shim.files import is_wanted, locked, put, write
from llmgw.agent.shim.log import Log
from llmgw.agent.shim.members import (
    boot_id,
    children,
    fingerprint,
    kill_all_but_trackers,
    reap_others,
    signal_all,
    start_time,
)

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ROOM = 4096
_GROUP_GRACE_S = 3.0
_GIVE_UP_S = 20.0
_TIDY_S = 1.0
_CANNOT = b"! "
_HANDLED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


def spawn(command: list[str], log: int) -> int:
    """Start the engine in a session of its own, with our signal mask and handlers undone."""
    return os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, *_HANDLED),
    )


def watch(engine: int, log: Log, cgroup: Cgroup, asked: str) -> dict[str, object]:
    """Wait for the end of the engine and of everything that it started."""
    ended: dict[str, object] | None = None
    ended_at = look_at = time.monotonic()
    killing_since: float | None = None
    while True:
        pause_s = max(0.0, look_at - time.monotonic())
        received = signal.sigtimedwait(_HANDLED, pause_s if ended is None else 0.05)
        number = None if received is None else received.si_signo
        if number in (signal.SIGTERM, signal.SIGINT) and asked == "first":
            os.kill(engine, signal.SIGTERM)
        elif number in (signal.SIGTERM, signal.SIGINT):
            signal_all(engine, signal.SIGTERM, everything=False, cgroup=cgroup)
        elif number == signal.SIGUSR1:
            killing_since = killing_since or time.monotonic()
            kill_all_but_trackers(engine)
        others = reap_others(engine)
        if ended is None:
            seen = os.waitid(os.P_PID, engine, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is not None:
                by_signal = seen.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                ended = {
                    "code": None if by_signal else seen.si_status,
                    "signal": seen.si_status if by_signal else None,
                    "at": time.time(),
                }
                ended_at = time.monotonic()
                if killing_since is None:
                    signal_all(engine, signal.SIGTERM, everything=True, cgroup=cgroup)
                others = reap_others(engine)
        now = time.monotonic()
        if now >= look_at:
            look_at = now + log.look()
        if ended is not None:
            if not others:
                os.waitpid(engine, 0)
                return {**ended, "left": []}
            if now - ended_at > _GIVE_UP_S:
                return {**ended, "left": [pid for pid in children() if pid != engine]}
            if killing_since is None and now - ended_at > _GROUP_GRACE_S:
                killing_since = now
        if killing_since is not None:
            if now - killing_since < _TIDY_S:
                kill_all_but_trackers(engine)
            else:
                signal_all(engine, signal.SIGKILL, everything=True, cgroup=cgroup)


def main() -> int:
    """Detach, start the engine, say which pids, watch it to its end."""
    folder, limit, cgroup = sys.argv[1], int(sys.argv[2]), Cgroup(sys.argv[3])
    asked, command = sys.argv[4], sys.argv[5:]
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not locked(lock):
        sys.stderr.write("another shim has this folder\n")
        return 3
    if not is_wanted(folder):
        sys.stderr.write("the launch was given up\n")
        return 4
    report, said = os.pipe()
    if os.fork():
        # The agent waits for this process only: until the engine was started, or could not be.
        os.close(said)
        with os.fdopen(report, "rb") as pipe:
            answer = pipe.read()
        (sys.stderr if answer.startswith(_CANNOT) else sys.stdout).write(answer.decode())
        return 0 if answer and not answer.startswith(_CANNOT) else 5
    os.close(report)
    os.setsid()
    os.chdir(folder)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    me: dict[str, object] = {"shim": os.getpid(), "shim_start": start_time(os.getpid()), "boot": boot_id()}
    me |= {"engine": None, "engine_start": None, "fingerprint": fingerprint()}
    try:
        log = Log(limit)
        write(folder, "shim.json", me)
        for name in ("shim.json", "exit.json"):
            put(f".{name}.new", b" " * _ROOM)  # so that a disk that is full by then hides neither pid nor end
    except OSError as failed:
        os.write(said, _CANNOT + f"{folder} cannot be written: {failed.strerror}".encode())
        return 5
    try:
        cgroup.enter()
        try:
            engine = spawn(command, log.file)
        finally:
            cgroup.leave()
    except OSError as failed:
        cgroup.remove()
        write(folder, "exit.json", {"code": None, "signal": None, "at": time.time(), "left": [],
                                    "error": f"{command[0]} cannot be started: {failed.strerror}"})  # fmt: skip
        os.write(said, json.dumps({**me, "cgroup": cgroup.entered}).encode())
        return 0
    me |= {"engine": engine, "engine_start": start_time(engine)}
    try:
        write(folder, "shim.json", me)
    except OSError as failed:
        # An engine whose pid nobody knows must not be: whoever holds this shim is told, and ends what there is.
        signal_all(engine, signal.SIGKILL, everything=True, cgroup=cgroup)
        os.waitpid(engine, 0)
        cgroup.remove()
        os.write(said, _CANNOT + f"{folder} cannot be written: {failed.strerror}".encode())
        return 5
    # Not left for the agent to look for: an engine that ends at once takes its cgroup with it.
    os.write(said, json.dumps({**me, "cgroup": cgroup.entered}).encode())
    os.close(said)
    end = watch(engine, log, cgroup, asked)
    cgroup.remove()
    write(folder, "exit.json", end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
