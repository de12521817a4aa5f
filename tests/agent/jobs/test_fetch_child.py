"""Fetching from a hub over real HTTP: what is whole stays, what is wrong is refused, and nothing tells the token."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from fakes.hub import Faults, Hub
from llmgw.agent.jobs import cache
from llmgw.agent.jobs.cache import Repository
from llmgw.agent.jobs.fetch_child import Fetcher
from llmgw.agent.jobs.fetch_task import FetchError, FetchTask

FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"x" * 2000,
    "a.safetensors": bytes(range(256)) * 1000,
    "b.safetensors": bytes(reversed(range(256))) * 2000,
    "pytorch_model.bin": b"old" * 100,
    "original/weights.00.pth": b"older",
}
WANTED = {n: c for n, c in FILES.items() if not n.endswith((".bin", ".pth"))}
SIZE = sum(map(len, WANTED.values()))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"org/tiny": dict(FILES)}) as started:
        yield started


class Fetch:
    """One fetch and what it said."""

    def __init__(self, hub: Hub, folder: Path, **more: Any) -> None:
        self.said: list[dict[str, Any]] = []
        free = more.pop("free", None)
        task = {"endpoint": hub.url, "wait_s": 0.0, "workers": 1, "tries": 3, "revision": "main", **more}
        made = FetchTask("org/tiny", cache=str(folder), **task)
        self.fetcher = Fetcher(made, self.said.append, *([free] if free else []))

    def run(self) -> dict[str, str]:
        return self.fetcher.run()

    def refused(self) -> FetchError:
        with pytest.raises(FetchError) as caught:
            self.run()
        return caught.value


def check(path: str) -> None:
    here = Path(path)
    assert {str(p.relative_to(here)): p.read_bytes() for p in here.rglob("*") if p.is_file()} == WANTED


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*.incomplete")]


def test_what_is_wanted_is_fetched_verified_and_remembered(hub: Hub, tmp_path: Path) -> None:
    fetch = Fetch(hub, tmp_path)
    result = fetch.run()
    assert result["commit"] == hub.commit("org/tiny")
    check(result["path"])
    assert fetch.said[-1] == {"type": "bytes", "done": SIZE, "total": SIZE}
    assert [s["name"] for s in fetch.said if s["type"] == "step"] == ["resolve", "download"]
    assert Repository(tmp_path, "org/tiny").complete("main") == Path(result["path"])
    asked = len(hub.asked)
    assert Fetch(hub, tmp_path).run() == result
    assert len(hub.asked) == asked, "what is whole is not asked about again"


def test_a_branch_is_resolved_once_and_again_only_when_asked(hub: Hub, tmp_path: Path) -> None:
    first = Fetch(hub, tmp_path).run()
    hub.repositories["org/tiny"]["config.json"] = b'{"a": 2}'
    assert Fetch(hub, tmp_path).run() == first
    newer = Fetch(hub, tmp_path, update=True).run()
    assert newer["commit"] == hub.commit("org/tiny") != first["commit"]
    assert Path(newer["path"], "config.json").read_bytes() == b'{"a": 2}'
    assert Fetch(hub, tmp_path).run() == newer


def test_one_file_and_all_parts_of_a_gguf(hub: Hub, tmp_path: Path) -> None:
    parts = {f"m-q4-0000{n}-of-00002.gguf": bytes([n]) * 500 for n in (1, 2)}
    hub.repositories["org/tiny"] |= {**parts, "m-q8-00001-of-00001.gguf": b"other"}
    result = Fetch(hub, tmp_path, file="m-q4-00001-of-00002.gguf").run()
    assert Path(result["path"]).read_bytes() == parts["m-q4-00001-of-00002.gguf"]
    assert {p.name for p in Path(result["path"]).parent.iterdir()} == set(parts)
    repository = Repository(tmp_path, "org/tiny")
    assert repository.complete("main") is None, "one file is not the whole repository"
    assert repository.complete("main", "m-q4-00001-of-00002.gguf") is not None


def test_a_wrong_digest_is_fetched_again_and_then_refused(hub: Hub, tmp_path: Path) -> None:
    hub.faults.wrong = ("b.safetensors",)
    error = Fetch(hub, tmp_path).refused()
    assert error.reason.startswith("b.safetensors of org/tiny has digest ")
    assert hub.bytes_sent["b.safetensors"] == 2 * len(FILES["b.safetensors"])
    assert not list(tmp_path.rglob("b.safetensors"))
    assert Repository(tmp_path, "org/tiny").complete("main") is None
    hub.faults = Faults()
    sent = hub.bytes_sent["a.safetensors"]
    check(Fetch(hub, tmp_path).run()["path"])
    assert hub.bytes_sent["a.safetensors"] == sent, "whole files stay"


@pytest.mark.parametrize(
    "name", ["../../../../mine", "a/../../../../../mine", "/mine", "a//b", "a//../x", "a\nb", "./x", "x/", ""]
)
def test_a_hub_names_no_file_that_is_not_below_the_cache(hub: Hub, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"not the hub's")
    hub.repositories["org/tiny"][str(mine) if name == "/mine" else name] = b"theirs"
    error = Fetch(hub, tmp_path / "cache").refused()
    assert "is no name of a file below it" in error.reason
    assert mine.read_bytes() == b"not the hub's"
    assert not list(tmp_path.rglob("*.safetensors")), "nothing of it is taken"


def test_bytes_that_changed_on_the_disk_are_not_taken_as_they_are(hub: Hub, tmp_path: Path) -> None:
    """A blob that nobody compared, as a fetch that was killed may leave it, is compared before it counts."""
    path = Path(Fetch(hub, tmp_path).run()["path"])
    blob = (path / "a.safetensors").resolve()
    blob.chmod(0o600)
    blob.write_bytes(bytes(len(FILES["a.safetensors"])))
    repository = Repository(tmp_path, "org/tiny")
    manifest = repository.manifest(path.name)
    assert manifest is not None
    del manifest.verified["a.safetensors"]
    repository.remember(manifest)
    assert repository.complete("main") is None
    check(Fetch(hub, tmp_path).run()["path"])


def test_cut_busy_and_broken_are_tried_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults.busy, hub.faults.broken, hub.faults.cut = 1, 1, 1
    check(Fetch(hub, tmp_path).run()["path"])
    assert hub.faults == Faults()


def test_a_hub_that_is_away_is_said_so_after_all_tries(tmp_path: Path) -> None:
    with Hub({}) as gone:
        pass
    fetch = Fetch(gone, tmp_path)
    error = fetch.refused()
    assert "cannot be reached" in error.reason
    assert error.again
    assert len([s for s in fetch.said if s["type"] == "log"]) == 2


def test_no_room_is_known_before_anything_is_written(hub: Hub, tmp_path: Path) -> None:
    error = Fetch(hub, tmp_path, reserve=100, free=lambda _: SIZE + 99).refused()
    assert "no room" in error.reason
    assert not hub.bytes_sent
    check(Fetch(hub, tmp_path, reserve=100, free=lambda _: SIZE + 100).run()["path"])


def test_a_disk_that_fills_up_ends_it_and_leaves_no_part(hub: Hub, tmp_path: Path) -> None:
    hub.faults.hold_after = 64 * 1024

    def free(_: Path) -> int:
        if not hub.held.is_set():
            return 10 * SIZE
        hub.go.set()
        return 5

    error = Fetch(hub, tmp_path, reserve=100, free=free).refused()
    assert "the disk fills up" in error.reason
    assert leftovers(tmp_path) == []
    assert Repository(tmp_path, "org/tiny").complete("main") is None


def test_gated_needs_the_token_and_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.faults.gated = True
    error = Fetch(hub, tmp_path).refused()
    assert "without a token: it is gated" in error.reason
    secret = tmp_path / "token"
    secret.write_text("wrong-one\n")
    secret.chmod(0o600)
    error = Fetch(hub, tmp_path, token_file=str(secret)).refused()
    assert "with the token of weights.token_file: it is gated" in error.reason
    assert "wrong-one" not in str(vars(error))
    secret.write_text(f"{hub.token}\n")
    fetch = Fetch(hub, tmp_path, token_file=str(secret))
    check(fetch.run()["path"])
    assert hub.token not in json.dumps(fetch.said)


def test_without_a_token_file_the_environments_token_is_not_used(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of-somebody")
    Fetch(hub, tmp_path).run()
    assert hub.authorizations == set()


def test_a_token_that_others_may_read_is_refused(hub: Hub, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    with pytest.raises(FetchError, match="others may read") as caught:
        Fetch(hub, tmp_path, token_file=str(secret))
    assert "s3cret" not in str(vars(caught.value))


def test_what_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    assert "no revision nope" in Fetch(hub, tmp_path, revision="nope").refused().reason
    assert "no file x.gguf" in Fetch(hub, tmp_path, file="x.gguf").refused().reason
    hub.repositories.clear()
    assert "does not show org/tiny without a token" in Fetch(hub, tmp_path).refused().reason


def test_offline_takes_what_is_whole_and_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    assert "is not in the cache" in Fetch(hub, tmp_path, offline=True).refused().reason
    result = Fetch(hub, tmp_path).run()
    asked = len(hub.asked)
    assert Fetch(hub, tmp_path, offline=True).run() == result
    (Path(result["path"]) / "a.safetensors").unlink()
    assert "is not whole in the cache" in Fetch(hub, tmp_path, offline=True).refused().reason
    assert len(hub.asked) == asked


def test_stale_parts_and_locks_go_and_living_ones_stay(hub: Hub, tmp_path: Path) -> None:
    repository = Repository(tmp_path, "org/tiny")
    (repository.folder / "blobs").mkdir(parents=True)
    repository.locks.mkdir(parents=True)
    dead = repository.folder / "blobs" / "aaaa.1f.incomplete"
    alive = repository.folder / "blobs" / "bbbb.2f.incomplete"
    for part in (dead, alive):
        part.write_bytes(b"part")
    (repository.locks / "aaaa.lock").touch()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    soft = repository.locks / "cccc.lock"
    soft.write_text(f"{ended.pid}\n{os.uname().nodename}\n")
    elsewhere = repository.locks / "dddd.lock"
    elsewhere.write_text(f"{ended.pid}\nanother-host\n")
    with (repository.locks / "bbbb.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert set(cache.sweep(repository)) == {"aaaa.1f.incomplete", "aaaa.lock", "cccc.lock"}
    assert alive.exists()
    assert elsewhere.exists()
    assert not dead.exists()


def test_two_at_once_share_what_the_first_one_fetches(hub: Hub, tmp_path: Path) -> None:
    hub.faults.hold_after = 64 * 1024
    first, second = Fetch(hub, tmp_path), Fetch(hub, tmp_path)
    results: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda f=f: results.append(f.run())) for f in (first, second)]
    threads[0].start()
    assert hub.held.wait(10)
    threads[1].start()
    until(lambda: any("wait for pid" in s.get("name", "") for s in second.said))
    hub.go.set()
    for thread in threads:
        thread.join(20)
    assert len(results) == 2
    assert results[0] == results[1]
    check(results[0]["path"])
    assert all(hub.bytes_sent[n] == len(WANTED[n]) for n in ("a.safetensors", "b.safetensors"))


def until(seen: Any, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.01)


class Child:
    """The real process."""

    def __init__(self, hub: Hub, folder: Path, **more: Any) -> None:
        task = {"repository": "org/tiny", "revision": "main", "cache": str(folder / "hub"), "endpoint": hub.url}
        path = folder / "task.json"
        path.write_text(json.dumps({**task, "workers": 1, "wait_s": 0.0, **more}))
        argv = [sys.executable, "-m", "llmgw.agent.jobs.fetch_child", str(path)]
        top = str(Path(cache.__file__).parents[3])
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": top},
        )

    def end(self) -> list[dict[str, Any]]:
        assert self.process.stdout is not None
        out = self.process.stdout.read()  # not communicate(): that closes the lifeline
        self.process.wait(10)
        self.process.stdout.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("how", ["kill", "cancel", "agent gone"])
def test_one_that_is_ended_in_the_middle_is_gone_on_with(hub: Hub, tmp_path: Path, how: str) -> None:
    hub.faults.hold_after = len(FILES["a.safetensors"]) + 16 * 1024  # the first large file whole, the second in part
    child = Child(hub, tmp_path)
    assert hub.held.wait(30)
    # The first file counts once it is compared and written down; only then is the cut where this test wants it.
    repository = Repository(tmp_path / "hub", "org/tiny")
    until(lambda: (m := repository.manifest(hub.commit("org/tiny"))) is not None and "a.safetensors" in m.verified)
    if how == "kill":
        child.process.kill()
    elif how == "cancel":
        child.process.terminate()
        hub.go.set()
    else:
        assert child.process.stdin is not None
        child.process.stdin.close()
        child.process.stdin = None
    said = child.end()
    assert child.process.returncode == {"kill": -signal.SIGKILL, "cancel": 1, "agent gone": -signal.SIGKILL}[how]
    assert not any(s["type"] == "done" for s in said)
    assert len(leftovers(tmp_path)) == (0 if how == "cancel" else 1)
    hub.go.set()
    before = hub.bytes_sent["a.safetensors"]
    again = Child(hub, tmp_path).end()
    assert again[-1]["type"] == "done"
    check(again[-1]["path"])
    assert hub.bytes_sent["a.safetensors"] == before, "whole files stay"
    assert leftovers(tmp_path) == []


def test_the_token_is_nowhere_but_in_its_file(hub: Hub, tmp_path: Path) -> None:
    hub.faults.gated = True
    hub.faults.hold_after = 64 * 1024
    secret = tmp_path / "token"
    secret.write_text(hub.token)
    secret.chmod(0o600)
    child = Child(hub, tmp_path, token_file=str(secret))
    assert hub.held.wait(30)
    proc = Path("/proc", str(child.process.pid))
    told = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
    hub.go.set()
    said = child.end()
    assert said[-1]["type"] == "done"
    assert hub.token.encode() not in told + json.dumps(said).encode()
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and hub.token.encode() in p.read_bytes()]
    assert holders == [secret]
