"""The files of a shim: durable ones that appear whole, the folder's lock, and whether its launch is still wanted."""

import fcntl
import json
import os
import time

_LOCK_S = 3.0


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
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
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
