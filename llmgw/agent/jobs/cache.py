"""The cache of weights: huggingface_hub's own layout, and beside it what llmgw knows of each commit.

``models--org--name/{blobs,refs,snapshots}`` and ``.locks`` are as huggingface_hub writes them
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache). ``.llmgw/models--org--name/<commit>.json`` says which
files of a commit are wanted and which were compared with their digests; ``refs.json`` which commit a branch was first
resolved to. Standard library only: the fetching process imports it. All functions block.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import evolve, field, frozen

from llmgw.durable import content, regular

COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 4 * 1024 * 1024
_OURS = ".llmgw"
_SHARD = re.compile(r"^(?P<name>.+-)[0-9]{5}(?P<of>-of-[0-9]{5}\.gguf)$")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".msgpack", ".h5", ".ot", ".onnx", ".gguf", ".ckpt", ".tflite")


_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@frozen
class WantedFile:
    """A file of a repository: its size in bytes and its digest, a sha256 (LFS) or else git's sha1 of a blob."""

    name: str
    size: int
    sha256: str = ""
    git_sha1: str = ""

    @property
    def blob(self) -> str:
        """What huggingface_hub calls its blob."""
        return self.sha256 or self.git_sha1

    @property
    def fault(self) -> str:
        """Why it is not fetched: what a hub calls it becomes a path here, which must stay below the cache."""
        if any(part in ("", ".", "..") for part in self.name.split("/")) or not self.name.isprintable():
            return f"{self.name!r} is no name of a file below it"
        if self.size < 0 or not _DIGEST.fullmatch(self.blob):
            return f"{self.name} has size {self.size} and digest {self.blob[:80]!r}"
        return ""


@frozen
class Manifest:
    """What is wanted of a commit and what of it is verified (name to digest).

    ``whole`` says that ``files`` are all that is wanted of the repository, not one file that was asked for.
    """

    commit: str
    files: tuple[WantedFile, ...] = ()
    verified: dict[str, str] = field(factory=dict)
    whole: bool = False

    @property
    def bytes(self) -> int:
        """The size of all of it."""
        return sum(f.size for f in self.files)

    def with_verified(self, file: WantedFile) -> Manifest:
        """The same, with one more file verified."""
        return evolve(self, verified={**self.verified, file.name: file.blob})

    def joined(self, other: Manifest | None) -> Manifest:
        """The two together; of a file that both know this one knows better."""
        if other is None:
            return self
        files = {f.name: f for f in (*other.files, *self.files)}
        verified = {**other.verified, **self.verified}
        return Manifest(self.commit, tuple(files.values()), verified, self.whole or other.whole)

    def has(self, file: WantedFile) -> bool:
        """Whether this very file was verified."""
        return self.verified.get(file.name) == file.blob


@frozen
class Repository:
    """One repository's part of a cache."""

    cache: Path
    name: str

    @property
    def folder(self) -> Path:
        """Where huggingface_hub keeps it."""
        return self.cache / f"models--{self.name.replace('/', '--')}"

    @property
    def locks(self) -> Path:
        """Where huggingface_hub keeps its locks on it."""
        return self.cache / ".locks" / self.folder.name

    @property
    def ours(self) -> Path:
        """Where llmgw keeps what it knows of it."""
        return self.cache / _OURS / self.folder.name

    def snapshot(self, commit: str) -> Path:
        """The folder with the files of a commit, which engines are given."""
        return self.folder / "snapshots" / commit

    def blob(self, file: WantedFile) -> Path:
        """Where a file's bytes are."""
        return self.folder / "blobs" / file.blob

    def resolved(self, revision: str) -> str | None:
        """The commit that this revision was resolved to, by us or by whoever filled the cache before."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            known = json.loads(content(self.ours / "refs.json")).get(revision)
        except (OSError, ValueError, AttributeError):
            known = None
        if isinstance(known, str) and COMMIT.fullmatch(known):
            return known
        try:
            text = content(self.folder / "refs" / revision).decode().strip()
        except (OSError, ValueError):
            return None
        return text if COMMIT.fullmatch(text) else None

    def resolve(self, revision: str, commit: str) -> None:
        """Remember what a branch or tag was resolved to."""
        if COMMIT.fullmatch(revision):
            return
        path = self.ours / "refs.json"
        try:
            known = dict(json.loads(content(path)))
        except (OSError, ValueError, TypeError):
            known = {}
        _replace(path, {**known, revision: commit})

    def manifest(self, commit: str) -> Manifest | None:
        """What is known of a commit."""
        try:
            said = json.loads(content(self.ours / f"{commit}.json"))
            files = tuple(WantedFile(**f) for f in said["files"])
            verified = {str(k): str(v) for k, v in said["verified"].items()}
            return Manifest(commit, files, verified, said["whole"] is True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def remember(self, manifest: Manifest) -> None:
        """Write down what is known of a commit."""
        files = [{"name": f.name, "size": f.size, "sha256": f.sha256, "git_sha1": f.git_sha1} for f in manifest.files]
        said = {"files": files, "verified": manifest.verified, "whole": manifest.whole}
        _replace(self.ours / f"{manifest.commit}.json", said)

    def whole(self, commit: str, file: WantedFile) -> bool:
        """Whether the file is there in its full length."""
        try:
            return (self.snapshot(commit) / file.name).stat().st_size == file.size
        except OSError:
            return False

    def complete(self, revision: str, file: str = "") -> Path | None:
        """The folder (or file) to give an engine, when all that is wanted is there and verified; without a network."""
        commit = self.resolved(revision)
        manifest = None if commit is None else self.manifest(commit)
        if commit is None or manifest is None or not (file or manifest.whole):
            return None
        files = [f for f in manifest.files if f.name in wanted([f.name for f in manifest.files], file)]
        if not files or not all(manifest.has(f) and self.whole(commit, f) for f in files):
            return None
        return self.snapshot(commit) / file


def _replace(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def wanted(names: Iterable[str], file: str) -> frozenset[str]:
    """Which files of a repository are fetched. Pure.

    One file when it is named, with all parts of a GGUF in several. Else everything but what no engine reads beside
    safetensors: the same weights in other formats, and the original ones that some publishers keep in ``original/``.
    """
    names = list(names)
    if file:
        part = _SHARD.match(file)
        if part is None:
            return frozenset(n for n in names if n == file)
        others = re.compile(re.escape(part["name"]) + r"[0-9]{5}" + re.escape(part["of"]))
        return frozenset(n for n in names if others.fullmatch(n))
    if not any(n.endswith(".safetensors") and "/" not in n for n in names):
        return frozenset(names)
    return frozenset(n for n in names if not n.endswith(_OTHER_FORMATS) and not n.startswith("original/"))


def digest(path: Path, file: WantedFile) -> str:
    """The digest of the bytes that are there, of the kind that the hub gave for this file."""
    if file.sha256:
        made = hashlib.sha256()
    else:
        # A git blob's name: sha1 over "blob <length>\0" and the content.
        made = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with regular(path) as source:
        while chunk := source.read(_CHUNK):
            made.update(chunk)
    return made.hexdigest()


def sweep(repository: Repository) -> list[str]:
    """Remove parts and locks that dead processes left; returns their names. What a living process holds stays.

    A part's name begins with its blob's, whose lock its writer holds.
    """
    gone: list[str] = []
    for part in sorted(repository.folder.glob("blobs/*.incomplete")):
        if not _held(repository.locks / f"{part.name.partition('.')[0]}.lock"):
            part.unlink(missing_ok=True)
            gone.append(part.name)
    for lock in sorted(repository.locks.glob("*.lock")):
        if not _held(lock):
            lock.unlink(missing_ok=True)
            gone.append(lock.name)
    return gone


def _held(lock: Path) -> bool:
    """Whether a living process holds this lock of huggingface_hub's.

    It is the kernel's (flock), or on a file system without that a file with pid and host in it (filelock's
    ``SoftFileLock``), which stays when its process is killed.
    """
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        lines = os.pread(handle, 512, 0).decode(errors="replace").split("\n")
    finally:
        os.close(handle)
    if len(lines) < 2 or not lines[0].isdigit():
        return False
    return lines[1] != socket.gethostname() or Path(f"/proc/{lines[0]}").exists()


@contextmanager
def turn(repository: Repository) -> Iterator[str | None]:
    """Try to become the only one who fetches into this repository; yields ``None``, or who does already.

    The lock is the kernel's: it ends with its process, however that ends.
    """
    path = repository.cache / _OURS / f"{repository.folder.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield os.pread(handle, 256, 0).decode(errors="replace").strip() or "another process"
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            yield None
    finally:
        os.close(handle)
