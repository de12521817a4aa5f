"""The hub as a fetch meets it: its list of files, a file's bytes, and what goes wrong with either, in our words."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from llmgw.agent.jobs.cache import COMMIT, Manifest, WantedFile, wanted
from llmgw.agent.jobs.fetch_task import FetchError, FetchTask, Stop, full

Say = Callable[[dict[str, Any]], None]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Hub:
    """What is asked of the hub for one fetch. ``say`` is told what happens; :attr:`got` is how far each file is."""

    def __init__(self, task: FetchTask, token: str | None, say: Say, stop: Stop) -> None:
        self.got: dict[str, int] = {}
        self._task = task
        self._token = token
        self._say = say
        self._stop = stop

    def listed(self, revision: str) -> Manifest:
        """The files of a revision, as the hub lists them. Raises :class:`FetchError`."""
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
            file = WantedFile(sibling.rfilename, sibling.size, sha256, "" if sha256 else sibling.blob_id or "")
            if file.fault:
                at = task.endpoint or "the hub"
                raise FetchError(f"{task.repository} at {at}: {file.fault}", "use another mirror")
            files.append(file)
        return Manifest(info.sha, tuple(sorted(files, key=lambda f: f.name)), whole=not task.file)

    def get(self, commit: str, file: WantedFile) -> None:
        """Have a file in the cache, whatever its digest. Raises :class:`FetchError`."""
        self._try(lambda: self._download(commit, file))

    def _download(self, commit: str, file: WantedFile) -> None:
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
        got, stop = self.got, self._stop
        got[name] = 0

        class Bar(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **{**more, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                stop.check()
                got[name] += int(n or 0)
                return None

        return Bar

    def _try(self, work: Callable[[], Any]) -> Any:
        """Do something over the network, again where that may help."""
        for turn in range(1, self._task.tries + 1):
            try:
                return work()
            except Exception as failed:  # noqa: BLE001 - told apart below, and told on
                wrong = self._said(failed)
                if self._stop.is_set():
                    raise self._stop.why(wrong) from None
                if not wrong.again or turn == self._task.tries:
                    raise wrong from None
                self._say({"type": "log", "text": f"{wrong.reason}; try {turn} of {self._task.tries}"})
                self._stop.wait(self._task.wait_s * 2 ** (turn - 1))
        raise AssertionError

    def _said(self, failed: Exception) -> FetchError:
        """What went wrong, in our words. Nothing of a request is quoted: its headers hold the token."""
        from huggingface_hub import errors

        task = self._task
        at = task.endpoint or "the hub"
        if isinstance(failed, FetchError):
            return failed
        if isinstance(failed, OSError) and failed.errno in _FULL:
            return full(task, "the disk is full")
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
