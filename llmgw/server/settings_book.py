"""The cluster's settings in a running control plane: which revision holds, and how another one comes to.

What holds is the newest revision in the store. The file that ``server.yaml`` names is recorded as one as long as nobody
changed the settings otherwise; from then on it is only compared. Nothing is stored that the strict reader refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

from llmgw.account import account
from llmgw.errors import OperatorError, UnknownError
from llmgw.settings.bounds import reason_of
from llmgw.settings.document import Settings
from llmgw.settings.load import load_settings
from llmgw.store.api import SETTINGS_CHANGED, History, SettingsRevision
from llmgw.store.files import read_text
from llmgw.telemetry.logging import logger

_FILE = "file"
_ROLLED_BACK = "settings.rollback"


class SettingsBook:
    """The settings that hold, as ``settings`` and ``revision``. ``apart`` says that the file says something else.

    ``use`` is called with settings that hold from now on. ``anew`` is set once they make a control plane of a router or
    the other way round: who runs the daemon starts it anew then. Without a ``link`` there can be no control plane.
    """

    def __init__(self, history: History, file: Path, clock: Callable[[], float], *, link: bool) -> None:
        self._history = history
        self._file = file
        self._clock = clock
        self._link = link
        self._turn = trio.Lock()
        self._log = logger("settings")
        self._newest: SettingsRevision | None = None
        self.settings = Settings()
        self.revision = 0
        self.apart = ""
        self.anew = trio.Event()
        self.use: Callable[[Settings, int], None] = lambda _settings, _revision: None

    async def peek(self) -> Settings:
        """The newest settings, or those of the file as long as none are stored. Nothing is recorded."""
        newest = await self._history.settings()
        if newest is None:
            return await self.read(await trio.to_thread.run_sync(read_text, self._file), str(self._file))
        return await self.read(newest.text, f"revision {newest.revision} of the settings")

    async def start(self, *, records: bool = True) -> None:
        """Find what holds. Raises :class:`OperatorError`, and nothing is recorded then, nor without ``records``."""
        newest = await self._history.settings()
        if newest is None and not records:
            self.settings = await self.peek()
            self._fits_link(self.settings)
            return
        if newest is None or (records and _of_file(newest)):
            newest, self.settings = await self._record_file("read at the start")
        else:
            try:
                self.settings = await self.read(newest.text, f"revision {newest.revision} of the settings")
            except OperatorError as wrong:
                raise OperatorError(
                    wrong.thing,
                    wrong.reason,
                    "run the llmgw that it was made with, and correct it with llmgw ctl config",
                ) from wrong
            if records:
                await self._compare(newest)
        self._fits_link(self.settings)
        self._newest, self.revision = newest, newest.revision

    async def reread(self) -> None:
        """The operator says that the file changed. Raises :class:`OperatorError`; what holds stays then."""
        async with self._turn:
            newest = await self._history.settings()
            if newest is not None and not _of_file(newest):
                await self._compare(newest)
                if self.apart:
                    raise OperatorError(str(self._file), self.apart, _remedy(self._file))
                return
            text = await trio.to_thread.run_sync(read_text, self._file)
            settings = await self.read(text, str(self._file))
            self._fits_link(settings)
            made = await self._history.add_settings(text, f"{_FILE} of {account()}", "SIGHUP", self._clock())
            self._hold(made, settings)

    async def refresh(self) -> None:
        """Use the newest revision of the store, which another control plane may have made."""
        async with self._turn:
            newest = await self._history.settings()
            if newest is not None and newest.revision != self.revision:
                self._hold(newest, await self.read(newest.text, f"revision {newest.revision} of the settings"))

    @property
    def newest(self) -> SettingsRevision:
        """The revision that holds, with its text."""
        assert self._newest is not None, "asked before the start"
        return self._newest

    async def row(self, number: int) -> SettingsRevision:
        """One revision. Raises :class:`OperatorError`."""
        found = await self._history.revision(number)
        if found is None:
            raise UnknownError(f"revision {number}", "there is none of this number", "see llmgw ctl config history")
        return found

    async def rows(self, limit: int, before: int | None = None) -> tuple[SettingsRevision, ...]:
        """Revisions, newest first."""
        return await self._history.revisions(limit, before)

    async def read(self, text: str, name: str = "settings") -> Settings:
        """What a text says. Raises ``ConfigError`` with every fault. In a thread: large ones take a second."""
        return await trio.to_thread.run_sync(load_settings, text, name)

    async def change(
        self, text: str, base: int, author: str, reason: str, action: str = SETTINGS_CHANGED
    ) -> SettingsRevision:
        """Make this text the settings, if the newest revision is still ``base``.

        Raises ``StaleBase`` if it is not, and :class:`OperatorError` for what cannot be used; what holds stays then.
        """
        return await self._change(text, base, author, reason_of(reason), action)

    async def _change(self, text: str, base: int, author: str, reason: str, action: str) -> SettingsRevision:
        settings = await self.read(text)
        self._fits_link(settings)
        async with self._turn:
            made = await self._history.add_settings(text, author, reason, self._clock(), base=base, action=action)
            self._hold(made, settings)
            self._log.info("settings changed", revision=made.revision, by=author, reason=reason)
        return made

    async def rollback(self, revision: int, base: int, author: str, reason: str) -> SettingsRevision:
        """Make the text of an older revision the newest one. Raises as :meth:`change` does."""
        text, reason = (await self.row(revision)).text, reason_of(reason)
        said = f"back to revision {revision}" + (f": {reason}" if reason else "")
        return await self._change(text, base, author, said, _ROLLED_BACK)

    def _hold(self, made: SettingsRevision, settings: Settings) -> None:
        if made.revision == self.revision:
            return
        changes_role = settings.needs_control_plane != self.settings.needs_control_plane
        self._newest, self.settings, self.revision = made, settings, made.revision
        if not _of_file(made):
            self.apart = ""
        if changes_role:
            self.anew.set()
            return
        self.use(settings, made.revision)
        self._log.info("settings in use", revision=made.revision)

    def _fits_link(self, settings: Settings) -> None:
        if settings.needs_control_plane and not self._link:
            raise OperatorError(
                "server.yaml: link",
                f"is missing, but model {next(m.name for m in settings.models if m.profiles)} has profiles to place",
                "add a link section with listen and tls, so that agents can connect",
            )

    async def _record_file(self, reason: str) -> tuple[SettingsRevision, Settings]:
        text = await trio.to_thread.run_sync(read_text, self._file)
        settings = await self.read(text, str(self._file))
        self._fits_link(settings)
        author = f"{_FILE} of {account()}"
        return await self._history.add_settings(text, author, reason, self._clock()), settings

    async def _compare(self, newest: SettingsRevision) -> None:
        """Whether the file still says what holds; a warning if not. A file that is not there says nothing."""
        try:
            text = await trio.to_thread.run_sync(read_text, self._file)
        except OperatorError:
            return
        self.apart = ""
        if text != newest.text:
            self.apart = f"is not what holds: revision {newest.revision}, by {newest.author}"
            self._log.warning("the settings' file is not used", file=str(self._file), reason=self.apart,
                              remedy=_remedy(self._file))  # fmt: skip


def _of_file(revision: SettingsRevision) -> bool:
    return revision.author.startswith(_FILE)


def _remedy(file: Path) -> str:
    return f"llmgw ctl config import {file} makes it hold, llmgw ctl config export > {file} takes over what does"
