"""The parent of one engine: starts it, reaps it, rotates its log, and writes down how it ended.

Run by path as ``python -I -S shim.py FOLDER LOG_BYTES CGROUP ASKED COMMAND …``; standard library only, because a copy
of it lives as long as each engine does, and outlives any agent. It detaches itself, so that it is nobody's child, and
is the subreaper of everything that the engine starts: a worker that leaves the process group is still its own.

Files in FOLDER: ``lock`` is held for as long as the shim lives; ``shim.json`` has its pid and the engine's, with
their start times; ``exit.json`` says how the engine ended, once nothing that it started is left; ``engine.log`` and
``engine.log.1`` have its output. It does not start without a ``record.json`` that has the LLMGW_LAUNCH of its own
environment: an agent that gave the launch up removes that first, under the lock.

CGROUP, if it is not empty, is made for the engine and removed when nothing is left in it. The shim itself stays out of
it, so that killing all that is in there leaves somebody who can say how the engine ended.

SIGTERM asks the engine's group to end, or where ASKED is ``first`` only its first process, which then ends the others
itself; SIGUSR1 kills everything that it started. When the engine's first process ends, the rest of its group is ended
too: workers of a dead engine hold GPU memory and serve nobody. What is killed may leave shared memory behind; Python's
resource tracker, which removes it once all else is gone, is killed last.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S, _LOOK_AT_LEAST_S = 0.25, 0.02
_PART, _LAST_BYTES = 1024 * 1024, 64 * 1024
_BLOCK = _ROOM = 4096
_COLLAPSE_RANGE = 0x08  # linux/falloc.h
_GROUP_GRACE_S = 3.0
_GIVE_UP_S = 20.0
_TIDY_S = 1.0
_LOCK_S = 3.0
_CANNOT = b"! "
_TRACKER = b"multiprocessing.resource_tracker"
_HANDLED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


def write(folder: str, name: str, value: object) -> None:
    """Replace a file atomically and durably."""
    fresh = os.path.join(folder, f".{name}.new")
    data = json.dumps(value).encode()
    put(fresh, data)
    os.replace(fresh, os.path.join(folder, name))
    entry = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def put(path: str, data: bytes) -> None:
    """Write a file durably; over what is in it, so that room that was reserved is used."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.write(handle, data[done:])
        os.ftruncate(handle, len(data))
        os.fsync(handle)
    finally:
        os.close(handle)


def locked(lock: int) -> bool:
    """Take the folder's lock; a shim that finds its own launch given up holds it for a moment."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def is_wanted(folder: str) -> bool:
    """Whether the record is there, and of this very launch: the folder may have been given up and used again."""
    try:
        with open(os.path.join(folder, "record.json"), "rb") as file:
            return bool(json.load(file)["launch"] == os.environ.get("LLMGW_LAUNCH", ""))
    except (OSError, ValueError, KeyError):
        return False


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat: clock ticks from boot to the start of this process."""
    return stat_field(pid, 19)


def children() -> list[int]:
    """Everything whose parent is this process: the engine, and whatever lost its own parent."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == os.getpid()]


def parent(pid: int) -> int | None:
    """Field 4 of /proc/<pid>/stat, for kernels without the list of children."""
    return stat_field(pid, 1)


def stat_field(pid: int, number: int) -> int | None:
    """A number from /proc/<pid>/stat, counted from the process's state, which is field 3 of all."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[number])
    except (OSError, ValueError, IndexError):
        return None


def write_to(path: str, text: str) -> bool:
    """Write to a file of the kernel's; whether it took it."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError:
        return False
    return True


class Cgroup:
    """The engine's cgroup, or none: everything here works without one as well."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.made = False

    def enter(self) -> None:
        """Make it and go into it: what is started now begins its life there."""
        if self.path:
            with contextlib.suppress(OSError):
                os.mkdir(self.path, 0o755)
                self.made = True
                write_to(f"{self.path}/cgroup.procs", "0")

    def leave(self) -> None:
        """Back to where we came from; the engine stays."""
        if self.made:
            write_to(f"{os.path.dirname(self.path)}/cgroup.procs", "0")

    def kill(self) -> None:
        """SIGKILL all that is in it; kernels before 5.14 cannot, and what is in reach is signalled anyway."""
        if self.made:
            write_to(f"{self.path}/cgroup.kill", "1")

    def remove(self) -> None:
        """Take it away, if it is empty."""
        if self.made:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)


def signal_all(engine: int, number: int, *, everything: bool, cgroup: Cgroup) -> None:
    """Signal the engine's group and, for the last resort, every child that left it.

    The engine is not reaped before all else is gone, so its number cannot have become somebody else's.
    """
    if everything and number == signal.SIGKILL:
        cgroup.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(engine, number)
    if everything:
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def kill_all_but_trackers(engine: int) -> None:
    """Kill the engine's group and every child that left it, but for those that clean up after the others."""
    own = set(children())
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                # Looked at after the handle was taken, so that no other process can be meant.
                if (stat_field(pid, 2) == engine or pid in own) and not is_tracker(pid):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def is_tracker(pid: int) -> bool:
    """Whether this is a resource tracker of Python's multiprocessing, which ends by itself with those it is for."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except OSError:
        return False


def reap_others(engine: int) -> bool:
    """Reap every ended child but the engine; whether any of them is still alive.

    Who has no living parent is our child, so as long as anything that the engine started lives, one of ours does.
    """
    alive = False
    for pid in children():
        if pid != engine:
            with contextlib.suppress(ChildProcessError):
                alive |= os.waitpid(pid, os.WNOHANG) == (0, 0)
    return alive


class Log:
    """The engine's log, kept short: what it holds becomes ``engine.log.1``, and it starts anew.

    The engine writes in append mode, so that after the cut it goes on at the beginning.
    """

    def __init__(self, limit: int) -> None:
        self.file = os.open("engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.limit = limit
        self.size, self.seen_at = 0, time.monotonic()

    def look(self) -> float:
        """Cut it if it is too long, or long and the disk full; says in how many seconds to look again.

        The faster it grows the sooner.
        """
        with contextlib.suppress(OSError):
            size, now = os.fstat(self.file).st_size, time.monotonic()
            rate = max(0, size - self.size) / max(now - self.seen_at, 0.001)
            room = os.fstatvfs(self.file)
            full = room.f_bavail * room.f_frsize < _LAST_BYTES and size > 2 * _LAST_BYTES
            if size > self.limit or full:
                self.cut()
                size, now = 0, time.monotonic()
            self.size, self.seen_at = size, now
            return min(_LOOK_S, max(_LOOK_AT_LEAST_S, (self.limit - size) / (rate or 1)))
        return _LOOK_S

    def cut(self) -> None:
        """Keep the end of it; on a full disk only its last lines, which must not cost the room that is gained."""
        with open("engine.log", "rb") as old:
            size = os.fstat(old.fileno()).st_size
            try:
                with open("engine.log.1.new", "wb") as new:
                    old.seek(max(0, size - self.limit))
                    # To its very end, as more is written meanwhile.
                    while new.tell() < 2 * self.limit and (part := old.read(_PART)):
                        new.write(part)
                        new.flush()
                    copied = old.tell()
                    if self.drop(copied // _BLOCK * _BLOCK):
                        new.truncate(new.tell() - copied % _BLOCK)
                    else:
                        os.ftruncate(self.file, 0)  # what came between the last look and this is lost
                os.replace("engine.log.1.new", "engine.log.1")
            except OSError:
                old.seek(max(0, size - _LAST_BYTES))
                last = old.read(2 * _LAST_BYTES)
                os.ftruncate(self.file, 0)
                with contextlib.suppress(OSError):
                    os.unlink("engine.log.1.new")
                with contextlib.suppress(OSError):
                    put("engine.log.1", last)

    def drop(self, count: int) -> bool:
        """Take so much off its beginning and leave what was written since; whether the file system can (ext4, XFS)."""
        size = ctypes.c_int64
        return bool(ctypes.CDLL(None).fallocate64(self.file, _COLLAPSE_RANGE, size(0), size(count)) == 0)


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
    me = {"shim": os.getpid(), "shim_start": start_time(os.getpid()), "engine": None, "engine_start": None}
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
        os.write(said, json.dumps(me).encode())
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
    os.write(said, json.dumps(me).encode())
    os.close(said)
    end = watch(engine, log, cgroup, asked)
    cgroup.remove()
    write(folder, "exit.json", end)
    return 0


if __name__ == "__main__":
    sys.exit(main())
