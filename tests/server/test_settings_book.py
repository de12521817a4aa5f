"""The settings of a control plane: the file's rules, changes, rollbacks, and what is refused."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llmgw.errors import OperatorError
from llmgw.server.settings_book import SettingsBook
from llmgw.settings.document import Settings
from llmgw.settings.faults import ConfigError
from llmgw.store.api import StaleBase
from llmgw.store.opening import sqlite_store
from llmgw.store.sql import SqlStore

ONE = "models: {m: {endpoints: ['http://h:1']}}  # mine\n"
TWO = "models: {m: {endpoints: ['http://h:2']}}\n"
PLACED = "models: {m: {profiles: [{name: p, engine: vllm, weights: /w, device_class: h100-80g}]}}\n"


class Plane:
    def __init__(self, store: SqlStore, file: Path, *, link: bool = True) -> None:
        self.store = store
        self.file = file
        self.used: list[tuple[Settings, int]] = []
        self.book = SettingsBook(store, file, lambda: 7.0, link=link)
        self.book.use = lambda settings, revision: self.used.append((settings, revision))

    async def again(self) -> SettingsBook:
        book = SettingsBook(self.store, self.file, lambda: 8.0, link=True)
        await book.start()
        return book


@asynccontextmanager
async def plane(folder: Path, text: str = ONE, *, link: bool = True) -> AsyncIterator[Plane]:
    file = folder / "settings.yaml"
    file.write_text(text)
    async with sqlite_store(folder / "db") as store:
        made = Plane(store, file, link=link)
        await made.book.start()
        yield made


async def test_the_file_holds_until_somebody_changes_the_settings_otherwise(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        assert (it.book.revision, it.book.newest.text, it.book.apart) == (1, ONE, "")
        assert (await it.again()).revision == 1, "the same text is no new revision"
        it.file.write_text(TWO)
        await it.book.reread()
        assert (it.book.revision, it.used[-1][1]) == (2, 2)
        it.file.write_text(ONE)
        assert (await it.again()).revision == 3, "a file that changed while nothing ran"
        await it.book.refresh()
        await it.book.change(TWO, 3, "token ada", "because")
        assert (await it.again()).newest.text == TWO, "the file says something else"
        other = await it.again()
        assert other.apart == "is not what holds: revision 4, by token ada"
        with pytest.raises(OperatorError, match=r"is not what holds.*llmgw ctl config import .*settings\.yaml makes"):
            await it.book.reread()
        assert it.book.newest.text == TWO
        it.file.write_text(TWO)
        await it.book.reread()
        assert it.book.apart == ""
        it.file.unlink()
        assert (await it.again()).revision == 4, "it is not needed any more"


async def test_a_file_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        it.file.write_text("models: {m: {}}\n")
        with pytest.raises(ConfigError):
            await it.book.reread()
        with pytest.raises(ConfigError):
            await it.again()
        assert (it.book.revision, len(await it.store.revisions(9)), it.used) == (1, 1, [])


async def test_changed_and_taken_back(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        made = await it.book.change(TWO, 1, "token ada", "more")
        assert (made.revision, made.author, made.reason, it.used[-1][1]) == (2, "token ada", "more", 2)
        with pytest.raises(StaleBase) as stale:
            await it.book.change(ONE, 1, "token bob", "")
        assert stale.value.newest == made
        back = await it.book.rollback(1, 2, "token bob", "it was wrong")
        assert (back.text, back.reason) == (ONE, "back to revision 1: it was wrong")
        assert [row.action for row in await it.store.audit(9)] == [
            "settings.rollback", "settings.change", "settings.change",
        ]  # fmt: skip
        with pytest.raises(OperatorError, match="there is none of this number"):
            await it.book.rollback(9, 3, "x", "")
        with pytest.raises(OperatorError, match="the reason"):
            await it.book.change(TWO, 3, "x", "a\nb")
        same = await it.book.change(ONE, 3, "x", "")
        assert (same.revision, len(it.used)) == (3, 2), "the same text is no change"


async def test_a_router_becomes_a_control_plane(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        await it.book.change(PLACED, 1, "x", "")
        assert it.book.anew.is_set()
        assert it.used == [], "what runs in this process cannot"
        assert (await it.again()).settings.needs_control_plane
    (tmp_path / "b").mkdir()
    async with plane(tmp_path / "b", link=False) as it:
        with pytest.raises(OperatorError, match="link: is missing, but model m has profiles"):
            await it.book.change(PLACED, 1, "x", "")
        assert (it.book.revision, it.book.anew.is_set()) == (1, False)


async def test_what_another_control_plane_made_is_used(tmp_path: Path) -> None:
    async with plane(tmp_path) as it:
        await (await it.again()).change(TWO, 1, "x", "")
        await it.book.refresh()
        await it.book.refresh()
        assert [revision for _, revision in it.used] == [2]


_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(20)
)
ATTACKS = {
    "aliases": (_LAUGHS, ":1:4: a: anchors are not allowed"),
    "tags": ("models: !!python/object/apply:os.system [id]\n", ":1:9: models: tags are not allowed"),
    "keys twice": ("router: {}\nrouter: {}\n", ":2:1: the key router stands here twice"),
    "50,000 keys": ("".join(f"k{n}: {n}\n" for n in range(50_000)), "the document has more than 20000 keys"),
    "50,000 models": ("models:\n" + "".join(f"  k{n}: {n}\n" for n in range(50_000)), "has more than 20000 keys"),
    "9,900 unknown keys": (
        "router:\n" + "".join(f"  max_body_byte{n}: {n}\n" for n in range(9_900)),
        "and more, which are not told",
    ),
    "deep flow": ("a: " + "[" * 5000 + "]" * 5000 + "\n", "nested deeper than 32 levels"),
    "deep block": ("".join(" " * n + "a:\n" for n in range(1000)), "nested deeper than 32 levels"),
    "long line": ("a: " + "x" * 2_000_000, "the document is larger than 1048576 bytes"),
    "merge keys": ("router: {<<: {auth: keys}}\n", ":1:10: router: merge keys are not allowed"),
    "documents": ("a: 1\n---\nb: 1\n", ":2:1: a second document begins here"),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_a_fault_with_a_line_within_a_second(tmp_path: Path, name: str) -> None:
    text, said = ATTACKS[name]
    async with plane(tmp_path) as it:
        began = time.process_time()
        with pytest.raises(ConfigError) as caught:
            await it.book.change(text, 1, "x", "")
        assert time.process_time() - began < 3.0  # half a second; three times that where others share the processor
        assert said in str(caught.value)
        assert caught.value.faults[0].line >= 1
        assert (it.book.revision, it.book.newest.text) == (1, ONE)
