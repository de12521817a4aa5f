"""The process that fetches weights: ``python -m llmgw.agent.jobs.fetch_child TASK.json``.

It is a process of its own so that it can be killed: huggingface_hub downloads in threads. What it does is told on
standard output, one JSON object a line: ``step``, ``bytes``, and at the end ``done`` or ``failed``. The token is read
from its file here and is nowhere else: not in the arguments, not in the environment, not in what is told.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from llmgw.agent.jobs import cache, lifeline
from llmgw.agent.jobs.cache import COMMIT, Manifest, Repository, WantedFile, wanted

Say = Callable[[dict[str, Any]], None]
Free = Callable[[Path], int]

_TELL_S = 0.5
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DIGEST_TRIES = 2


@frozen
class FetchTask:
    """What to fetch and how. Sizes in bytes, times in seconds.

    ``reserve`` is what must stay free on the cache's disk. A transfer that fails is tried ``tries`` times, with
    ``wait_s`` before the second, twice that before the third, and so on. ``chunk`` is how much is read at once.
    """

    repository: str
    revision: str
    cache: str
    file: str = ""
    endpoint: str = ""
    offline: bool = False
    update: bool = False
    token_file: str = ""
    reserve: int = 0
    workers: int = 4
    tries: int = 6
    wait_s: float = 2.0
    timeout_s: float = 30.0


class FetchError(Exception):
    """It cannot be fetched: why, what to do, and whether the same might work a little later."""

    def __init__(self, reason: str, remedy: str = "", *, again: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.again = again


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write where this path is."""
    return shutil.disk_usage(path).free


def read_token(path: str) -> str | None:
    """The token in this file. Raises :class:`FetchError` when others may read it; never says what is in it."""
    if not path:
        return None
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        text = Path(path).read_text().strip()
    except (OSError, ValueError) as failed:
        reason = getattr(failed, "strerror", None) or type(failed).__name__
        raise FetchError(f"the token file {path} cannot be read: {reason}", "check weights.token_file") from None
    if mode & 0o077:
        raise FetchError(f"others may read the token file {path} (mode {mode:04o})", f"run: chmod 600 {path}")
    if not text:
        raise FetchError(f"the token file {path} is empty", "put a token of the hub into it")
    return text


class Fetcher:
    """One fetch. ``free`` says how much disk there is, ``say`` is told what happens, :attr:`stop` ends it."""

    def __init__(self, task: FetchTask, say: Say, free: Free = free_bytes) -> None:
        self._task = task
        self._say = say
        self._free = free
        self._token = read_token(task.token_file)
        self._repository = Repository(Path(task.cache), task.repository)
        self.stop = threading.Event()
        self._why: FetchError | None = None
        self._got: dict[str, int] = {}

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
        manifest = self._listed(known or task.revision)
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

    def _listed(self, revision: str) -> Manifest:
        """The files of a revision, as the hub lists them."""
        task = self._task
        from huggingface_hub import HfApi

        api = HfApi(endpoint=task.endpoint or None, token=self._token or False)
        info = self._try(
            lambda: api.model_info(task.repository, revision=revision, files_metadata=True, timeout=task.timeout_s)
        )
        siblings = info.siblings or []
        names = wanted([s.rfilename for s in siblings], task.file)
        if not names:
            what = f"no file {task.file}" if task.file else "no files"
            raise FetchError(f"{task.repository} has {what} at {revision}", "correct the profile's weights")
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            raise FetchError(f"the hub did not say which commit {revision} of {task.repository} is", "")
        files = []
        for sibling in siblings:
            if sibling.rfilename not in names:
                continue
            sha256 = sibling.lfs.sha256 if sibling.lfs is not None else ""
            if sibling.size is None or not (sha256 or sibling.blob_id):
                raise FetchError(f"the hub gives no size or digest for {sibling.rfilename}", "use another mirror")
            files.append(WantedFile(sibling.rfilename, sibling.size, sha256, "" if sha256 else sibling.blob_id or ""))
        return Manifest(info.sha, tuple(sorted(files, key=lambda f: f.name)), whole=not task.file)

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
            if self.stop.wait(_TELL_S):
                raise self._why or FetchError("stopped")

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
        return sum(list(self._got.values()))

    def _tell(self, done: int, manifest: Manifest) -> None:
        self._say({"type": "bytes", "done": min(done, manifest.bytes), "total": manifest.bytes})

    def _download(self, manifest: Manifest) -> None:
        commit, repository = manifest.commit, self._repository
        # Whole files of an earlier fetch stay; those that nobody compared yet are compared first.
        missing = [f for f in manifest.files if not (manifest.has(f) and repository.whole(commit, f))]
        absent = sum(f.size for f in missing if not repository.blob(f).exists())
        self._room(absent)
        self._say({"type": "step", "name": "download"})
        self._got = {f.name: f.size for f in manifest.files if f not in missing}
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
                    self._end(self._full("the disk fills up while fetching"))
                if self.stop.is_set():
                    raise self._why or FetchError("stopped")
                self._tell(self._bytes, manifest)
        except BaseException as failed:
            self._end(failed if isinstance(failed, FetchError) else None)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        self._tell(manifest.bytes, manifest)

    def _end(self, why: FetchError | None) -> None:
        """Make every thread end at its next bytes, so that none leaves a part behind."""
        self._why = self._why or why
        self.stop.set()

    def _room(self, needed: int) -> None:
        """Refuse what the disk cannot hold, before anything is written."""
        there = self._free(self._repository.cache)
        if there < needed + self._task.reserve:
            raise self._full(f"{needed} bytes are to be fetched and {self._task.reserve} must stay free, {there} are")

    def _full(self, what: str) -> FetchError:
        return FetchError(
            f"{what}: no room on the disk of {self._task.cache}",
            "free some space, or set weights.cache of agent.yaml to a larger disk",
        )

    def _one(self, commit: str, file: WantedFile) -> None:
        """Have one file whole and verified."""
        path = self._repository.snapshot(commit) / file.name
        for turn in range(_DIGEST_TRIES):
            if self.stop.is_set():
                raise self._why or FetchError("stopped")
            if not (path.exists() and self._repository.whole(commit, file)):
                path.unlink(missing_ok=True)
                self._try(lambda: self._get(commit, file))
            self._got[file.name] = file.size
            found = cache.digest(path, file)
            if found == file.blob:
                return
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._got[file.name] = 0
            self._say({"type": "log", "text": f"{file.name} has digest {found}, not {file.blob}; try {turn + 1}"})
        raise FetchError(
            f"{file.name} of {self._task.repository} has digest {found}, the hub says {file.blob}",
            "what is between this node and the hub alters files; use another mirror",
        )

    def _get(self, commit: str, file: WantedFile) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self._task.repository, file.name, revision=commit, cache_dir=self._task.cache,
            endpoint=self._task.endpoint or None, token=self._token or False, etag_timeout=self._task.timeout_s,
            tqdm_class=self._bar(file.name),
        )  # fmt: skip

    def _bar(self, name: str) -> Any:
        """What huggingface_hub takes for a progress bar: it counts the bytes, and raises once they shall end."""
        import huggingface_hub.utils

        hub: Any = huggingface_hub.utils  # it has the class, and its types do not say so
        base: Any = hub.tqdm
        fetcher = self
        fetcher._got[name] = 0

        class Bar(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **{**more, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if fetcher.stop.is_set():
                    raise fetcher._why or FetchError("stopped")
                fetcher._got[name] += int(n or 0)
                return None

        return Bar

    def _try(self, work: Callable[[], Any]) -> Any:
        """Do something over the network, again where that may help."""
        for turn in range(1, self._task.tries + 1):
            try:
                return work()
            except Exception as failed:  # noqa: BLE001 - told apart below, and told on
                wrong = self._said(failed)
                if self.stop.is_set():
                    raise self._why or wrong from None
                if not wrong.again or turn == self._task.tries:
                    raise wrong from None
                self._say({"type": "log", "text": f"{wrong.reason}; try {turn} of {self._task.tries}"})
                self.stop.wait(self._task.wait_s * 2 ** (turn - 1))
        raise AssertionError

    def _said(self, failed: Exception) -> FetchError:
        """What went wrong, in our words. Nothing of a request is quoted: its headers hold the token."""
        from huggingface_hub import errors

        task = self._task
        at = task.endpoint or "the hub"
        if isinstance(failed, FetchError):
            return failed
        if isinstance(failed, OSError) and failed.errno in _FULL:
            return self._full("the disk is full")
        code = getattr(getattr(failed, "response", None), "status_code", None)
        with_token = "with the token of weights.token_file" if self._token else "without a token"
        if isinstance(failed, errors.GatedRepoError) or code == 403:
            return FetchError(
                f"{at} refuses {task.repository} {with_token}: it is gated",
                "accept the model's terms on its page, and put a token of that account into weights.token_file",
            )
        if isinstance(failed, errors.RevisionNotFoundError):
            return FetchError(f"{task.repository} has no revision {task.revision}", "correct the profile's weights")
        if isinstance(failed, errors.RepositoryNotFoundError) or code == 401:
            return FetchError(
                f"{at} does not show {task.repository} {with_token}",
                "correct the name; a private repository looks the same without a token that may read it",
            )
        if isinstance(failed, errors.EntryNotFoundError) and not isinstance(failed, errors.LocalEntryNotFoundError):
            return FetchError(f"a file of {task.repository} is listed at {at} and not there", "use another mirror")
        if code is not None:
            return FetchError(f"{at} answers {code}", "try again later", again=code in (408, 429) or code >= 500)
        said = type(failed).__name__
        return FetchError(
            f"{at} cannot be reached or broke off ({said})", "check network, proxy and mirror", again=True
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
