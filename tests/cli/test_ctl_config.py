"""``llmgw ctl config`` as an operator uses it, against an admin listener on a real socket over a real store."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import trio

from tests.web.admin import TOKEN
from tests.web.test_jobs_api import Admin
from tests.web.test_settings_api import TEXT, admin, more


async def ctl(it: Admin, folder: Path, *words: str, **how: Any) -> tuple[int, str]:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    line = [
        sys.executable, "-m", "llmgw", "ctl", "--admin", f"http://127.0.0.1:{it.port}", "--token-file", str(token),
        "config",
    ]  # fmt: skip
    done = await trio.run_process(
        [*line, *words], capture_stdout=True, stderr=subprocess.STDOUT, check=False, **({"stdin": b""} | how)
    )
    return done.returncode, done.stdout.decode().replace("\r\n", "\n")


async def test_shown_and_got(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, _):
        assert await ctl(it, tmp_path, "show") == (0, TEXT)
        assert await ctl(it, tmp_path, "export") == (0, TEXT)
        assert await ctl(it, tmp_path, "get", "models.m.replicas") == (0, "3\n")
        assert (await ctl(it, tmp_path, "get", "models.e"))[1] == "endpoints: [http://h:1]\n"
        code, said = await ctl(it, tmp_path, "get", "router.auth")
        assert (code, said.splitlines()) == (0, ["open", "router.auth is not set: this is its default"])
        code, said = await ctl(it, tmp_path, "get", "router.auht", "--json")
        assert (code, "did you mean auth?" in said) == (2, True)
        code, said = await ctl(it, tmp_path, "get", "models.m.profiles.p.tp", "--json")
        assert json.loads(said) == {"path": "models.m.profiles[0].tp", "value": 1, "written": False, "revision": 1}


async def test_set_shows_what_it_means_and_needs_a_yes(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        code, said = await ctl(it, tmp_path, "set", "models.m.replicas=4", "--dry-run")
        assert code == 0
        for part in ("-    replicas: 3    # three", "+    replicas: 4    # three", "~ models.m.replicas: 3 -> 4",
                     "models: m", "no place for all of m"):  # fmt: skip
            assert part in said
        code, said = await ctl(it, tmp_path, "set", "models.m.replicas=4")
        assert (code, "nobody can be asked here" in said, there.book.revision) == (2, True, 1)
        code, said = await ctl(it, tmp_path, "set", "models.m.replicas=4", "router.auth=keys", "--yes", "--reason", "r")
        assert (code, "revision 2 holds" in said) == (0, True)
        assert there.book.newest.text == more() + "router:\n  auth: keys\n"
        code, said = await ctl(it, tmp_path, "set", "models.m.replicas=4", "--yes")
        assert (code, said) == (0, "nothing would change\n")
        code, said = await ctl(it, tmp_path, "unset", "router.auth", "--yes", "--json")
        assert (code, json.loads(said)["settings"]["revision"]) == (0, 3)
        code, said = await ctl(it, tmp_path, "set", "models.m.replicas=-4", "--yes")
        assert code == 2
        assert "settings:3:5: models.m.replicas: expected at least 0, found -4" in said
        code, said = await ctl(it, tmp_path, "set", "models.m", "--yes")
        assert (code, "write PATH=VALUE" in said) == (2, True)
        assert there.book.revision == 3


async def test_a_stale_base_shows_what_both_did(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        await ctl(it, tmp_path, "set", "models.m.replicas=4", "--yes")
        code, said = await ctl(it, tmp_path, "set", "models.m.replicas=7", "--base", "1", "--yes")
        assert code == 4
        tail = said[said.index("what they changed:") :].splitlines()
        assert tail == [
            "what they changed:", "  ~ models.m.replicas: 3 -> 4", "what you changed:", "  ~ models.m.replicas: 3 -> 7",
            "where that is in each other's way:", "  theirs  ~ models.m.replicas: 3 -> 4",
            "  mine    ~ models.m.replicas: 3 -> 7",
        ]  # fmt: skip
        code, said = await ctl(it, tmp_path, "set", "liveness.lost_s=90", "--base", "1", "--yes")
        assert (code, "none of it is in the other's way" in said) == (4, True)
        assert there.book.revision == 2


async def test_files_history_and_rollback(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    async with admin(tmp_path) as (it, there):
        file.write_text(more())
        code, said = await ctl(it, tmp_path, "check", str(file))
        assert (code, "~ models.m.replicas: 3 -> 4" in said) == (1, True)
        assert (await ctl(it, tmp_path, "diff", str(file)))[0] == 1
        assert (await ctl(it, tmp_path, "import", str(file), "--yes", "--reason", "file"))[0] == 0
        assert (await ctl(it, tmp_path, "check", str(file))) == (0, "nothing would change\n")
        file.write_text("models: {m: {}}\n")
        code, said = await ctl(it, tmp_path, "check", str(file))
        assert (code, f"{file}:1:10: models.m: has neither profiles nor endpoints" in said) == (2, True)
        assert (await ctl(it, tmp_path, "import", str(file), "--yes"))[0] == 2
        code, said = await ctl(it, tmp_path, "diff")
        assert (code, "+    replicas: 4    # three" in said) == (1, True)
        assert (await ctl(it, tmp_path, "diff", "2", "2"))[0] == 0
        code, said = await ctl(it, tmp_path, "rollback", "1", "--yes")
        assert (code, there.book.newest.text) == (0, TEXT)
        code, said = await ctl(it, tmp_path, "history")
        assert [line.split()[0] for line in said.splitlines()] == ["REVISION", "3", "2", "1"]
        assert "back to revision 1" in said
        out = tmp_path / "out.yaml"
        assert (await ctl(it, tmp_path, "export", "--revision", "2", "--out", str(out)))[0] == 0
        assert out.read_text() == more()


async def test_edited_on_a_terminal_and_confirmed(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        editor = tmp_path / "editor"
        editor.write_text(
            "#!/bin/sh\n"
            # First a mistake; what is opened again has it in it, and is put right.
            "if grep -q -- '-4' \"$1\"; then sed -i 's/-4/4/' \"$1\"; else sed -i 's/replicas: 3/replicas: -4/' \"$1\"; fi\n"
        )
        editor.chmod(0o755)
        ours, theirs = pty.openpty()
        os.write(ours, b"y\ny\n")
        env = dict(os.environ, EDITOR=str(editor), VISUAL="")
        code, said = await ctl(it, tmp_path, "edit", stdin=theirs, env=env)
        os.close(ours)
        os.close(theirs)
        assert "settings:3:5: models.m.replicas: expected at least 0, found -4" in said
        assert (code, "revision 2 holds" in said, there.book.newest.text) == (0, True, more())
        code, said = await ctl(it, tmp_path, "edit", env=dict(env, EDITOR=""))
        assert (code, "no editor can be opened here" in said) == (2, True)
        code, said = await ctl(it, tmp_path, "edit", env=dict(env, EDITOR="true"))
        assert (code, said) == (0, "nothing was changed\n")
        code, said = await ctl(it, tmp_path, "edit", "--json", env=dict(env, EDITOR="true"))
        assert (code, json.loads(said)["text"]) == (0, [])
        code, said = await ctl(it, tmp_path, "edit", env=dict(env, EDITOR="/no/editor"))
        assert (code, said.endswith("set EDITOR to a program that runs here\n")) == (2, True), said


async def test_on_a_terminal_a_change_is_made_on_the_newest_where_nothing_is_in_its_way(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        await ctl(it, tmp_path, "set", "models.m.replicas=4", "--yes")
        ours, theirs = pty.openpty()
        os.write(ours, b"y\ny\n")
        code, said = await ctl(it, tmp_path, "set", "liveness.lost_s=90", "--base", "1", "--yes", stdin=theirs)
        os.close(ours)
        os.close(theirs)
        assert "make your changes on revision 2 instead?" in said
        assert (code, "revision 3 holds" in said) == (0, True)
        assert there.book.newest.text == more() + "liveness: {lost_s: 90}\n"


async def test_what_somebody_wrote_in_vain_is_kept(tmp_path: Path) -> None:
    async with admin(tmp_path) as (it, there):
        editor = tmp_path / "editor"
        editor.write_text("#!/bin/sh\nsed -i 's/replicas: 3/replicas: -4/' \"$1\"\n")
        editor.chmod(0o755)
        env = dict(os.environ, EDITOR=str(editor), VISUAL="", TMPDIR=str(tmp_path))
        code, said = await ctl(it, tmp_path, "edit", env=env)
        (kept,) = tmp_path.glob("llmgw-settings-*.yaml")
        assert (code, f"your text is in {kept}" in said) == (2, True)
        assert kept.read_text() == more(replicas=-4)
        assert there.book.revision == 1
