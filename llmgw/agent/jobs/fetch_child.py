"""The process that fetches weights: ``python -m llmgw.agent.jobs.fetch_child TASK.json``.

It is a process of its own so that it can be killed: huggingface_hub downloads in threads. What it does is told on
standard output, one JSON object a line: ``step``, ``bytes``, and at the end ``done`` or ``failed``. The token is read
from its file here and is nowhere else: not in the arguments, not in the environment, not in what is told.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import evolve

from llmgw.agent.jobs import cache, lifeline
from llmgw.agent.jobs.cache import Manifest, Repository, WantedFile
from llmgw.agent.jobs.fetch_task import FetchError, FetchTask, Stop, full, read_token
from llmgw.agent.jobs.hub import Hub, Say

Free = Callable[[Path], int]

_TELL_S = 0.5
_DIGEST_TRIES = 2


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write where this path is."""
    return shutil.disk_usage(path).free


class Fetcher:
    """One fetch. ``free`` says how much disk there is, ``say`` is told what happens, :attr:`stop` ends it."""

    def __init__(self, task: FetchTask, say: Say, free: Free = free_bytes) -> None:
        self._task = task
        self._say = say
        self._free = free
        self._repository = Repository(Path(task.cache), task.repository)
        self.stop = Stop()
        self._hub = Hub(task, read_token(task.token_file), say, self.stop)

    def run(self) -> dict[str, str]:
        """Fetch, verify, and return ``path`` and ``commit``. Raises :class:`FetchError`."""
        task, repository = self._task, self._repository
        self._say({"type": "step", "name": "resolve"})
        known = None if task.update and not task.offline else repository.resolved(task.revision)
        if known is not None and not task.update and (path := repository.complete(known, task.file)) is not None:
            return self._result(known, path)
        if task.offline:
            missing = "is not whole" if known is not None else "is not"
            raise FetchError(
                f"{task.repository}@{task.revision} {missing} in the cache {task.cache}, and nothing may be asked",
                "copy it there, or take `offline` out of the settings",
            )
        Path(task.cache).mkdir(parents=True, exist_ok=True)
        manifest = self._hub.listed(known or task.revision)
        with self._turn(manifest):
            repository.resolve(task.revision, manifest.commit)
            old = repository.manifest(manifest.commit)
            manifest = evolve(manifest, verified={} if old is None else old.verified)
            self._remember(manifest)
            for name in cache.sweep(repository):
                self._say({"type": "log", "text": f"removed {name}, left by a process that is gone"})
            self._download(manifest)
        return self._result(manifest.commit, repository.snapshot(manifest.commit) / task.file)

    def _remember(self, manifest: Manifest) -> None:
        self._repository.remember(manifest.joined(self._repository.manifest(manifest.commit)))

    def _result(self, commit: str, path: Path) -> dict[str, str]:
        return {"path": str(path), "commit": commit}

    @contextmanager
    def _turn(self, manifest: Manifest) -> Iterator[None]:
        """Wait until nobody else fetches into this repository; how far they are is told meanwhile."""
        while True:
            with cache.turn(self._repository) as other:
                if other is None:
                    yield
                    return
            self._say({"type": "step", "name": f"wait for {other}, which fetches the same"})
            self._tell(self._there(manifest), manifest)
            self.stop.wait(_TELL_S)
            self.stop.check()

    def _there(self, manifest: Manifest) -> int:
        """How many of the wanted bytes are on the disk, parts of files included."""
        blobs = self._repository.folder / "blobs"
        sizes: dict[str, int] = {}
        for path in blobs.iterdir() if blobs.is_dir() else ():
            try:
                name = path.name.partition(".")[0]
                sizes[name] = max(sizes.get(name, 0), path.stat().st_size)
            except OSError:
                continue
        return sum(min(f.size, sizes.get(f.blob, 0)) for f in manifest.files)

    @property
    def _bytes(self) -> int:
        return sum(list(self._hub.got.values()))

    def _tell(self, done: int, manifest: Manifest) -> None:
        self._say({"type": "bytes", "done": min(done, manifest.bytes), "total": manifest.bytes})

    def _download(self, manifest: Manifest) -> None:
        commit, repository = manifest.commit, self._repository
        # Whole files of an earlier fetch stay; those that nobody compared yet are compared first.
        missing = [f for f in manifest.files if not (manifest.has(f) and repository.whole(commit, f))]
        absent = sum(f.size for f in missing if not repository.blob(f).exists())
        self._room(absent)
        self._say({"type": "step", "name": "download"})
        self._hub.got = {f.name: f.size for f in manifest.files if f not in missing}
        self._tell(self._bytes, manifest)
        pool = ThreadPoolExecutor(self._task.workers, thread_name_prefix="fetch")
        try:
            waiting: dict[Future[None], WantedFile] = {pool.submit(self._one, commit, f): f for f in missing}
            while waiting:
                ended, _ = wait(waiting, timeout=_TELL_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    file = waiting.pop(future)
                    future.result()
                    manifest = manifest.with_verified(file)
                    self._remember(manifest)
                if self._free(repository.cache) < self._task.reserve:
                    self.stop.set(full(self._task, "the disk fills up while fetching"))
                self.stop.check()
                self._tell(self._bytes, manifest)
        except BaseException as failed:
            self.stop.set(failed if isinstance(failed, FetchError) else None)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        self._tell(manifest.bytes, manifest)

    def _room(self, needed: int) -> None:
        """Refuse what the disk cannot hold, before anything is written."""
        there = self._free(self._repository.cache)
        if there < needed + self._task.reserve:
            raise full(
                self._task, f"{needed} bytes are to be fetched and {self._task.reserve} must stay free, {there} are"
            )

    def _one(self, commit: str, file: WantedFile) -> None:
        """Have one file whole and verified."""
        path = self._repository.snapshot(commit) / file.name
        for turn in range(_DIGEST_TRIES):
            self.stop.check()
            if not (path.exists() and self._repository.whole(commit, file)):
                path.unlink(missing_ok=True)
                self._hub.get(commit, file)
            self._hub.got[file.name] = file.size
            found = cache.digest(path, file)
            if found == file.blob:
                return
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._hub.got[file.name] = 0
            self._say({"type": "log", "text": f"{file.name} has digest {found}, not {file.blob}; try {turn + 1}"})
        raise FetchError(
            f"{file.name} of {self._task.repository} has digest {found}, the hub says {file.blob}",
            "what is between this node and the hub alters files; use another mirror",
        )


def main() -> None:
    """Run the task that the first argument names."""
    lifeline.hold()
    lock = threading.Lock()

    def say(what: dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

    code = 1
    try:
        fetcher = Fetcher(FetchTask(**json.loads(Path(sys.argv[1]).read_bytes())), say)
        signal.signal(signal.SIGTERM, lambda *_: fetcher.stop.set())
        say({"type": "done", **fetcher.run()})
        code = 0
    except FetchError as wrong:
        say({"type": "failed", "reason": wrong.reason, "remedy": wrong.remedy})
    except ImportError:
        say({"type": "failed", "reason": "huggingface_hub is not installed", "remedy": "install it where llmgw is"})
    except OSError as failed:
        say({"type": "failed", "reason": f"{failed.strerror}: {failed.filename}", "remedy": "check the disk"})
    # Not by way of atexit: a thread that waits for the network must not keep the process.
    os._exit(code)


if __name__ == "__main__":
    main()
