"""Adapters as sysfs shows them, from a few words: a reader over a dictionary, without a disk."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/r")
ZERO = ":".join(["0000"] * 8)


class Tree:
    """A reader over files by path; what is not there cannot be read, as an entry that the kernel refuses."""

    def __init__(
        self, files: dict[str, str | bytes], links: dict[str, str] | None = None, shut: tuple[str, ...] = ()
    ) -> None:
        self.shut = {f"/r/{name}" for name in shut}
        self.files = {f"/r/{name}": value for name, value in files.items()}
        self.links = {f"/r/{name}": value for name, value in (links or {}).items()}
        self.read: list[str] = []

    def text(self, path: Path) -> str | None:
        data = self.raw(path, 4096)
        return data.decode(errors="replace").strip() or None

    def names(self, path: Path) -> tuple[str, ...]:
        under = f"{path}/"
        found = (f[len(under) :].split("/")[0] for f in (*self.files, *self.links) if f.startswith(under))
        return tuple(dict.fromkeys(found))

    def raw(self, path: Path, limit: int) -> bytes:
        self.read.append(str(path))
        value = self.files.get(str(path), b"")
        return value[:limit] if isinstance(value, bytes) else value.encode()[:limit]

    def usable(self, path: Path) -> bool:
        return str(path) not in self.shut

    def target(self, path: Path) -> str | None:
        real = self.real(path)
        return None if real is None else real.rsplit("/", 1)[-1]

    def real(self, path: Path) -> str | None:
        if (link := self.links.get(str(path))) is not None:
            return link
        return str(path) if self.names(path) else None


def port(
    name: str, layer: str = "InfiniBand", state: str = "4: ACTIVE", *, rate: str = "400 Gb/sec (4X NDR)",
    physical: str = "5: LinkUp", number: int = 1, lid: str = "0x0",
) -> dict[str, str | bytes]:  # fmt: skip
    base = f"sys/class/infiniband/{name}/ports/{number}"
    said = {"link_layer": layer, "state": state, "rate": rate, "lid": lid, "phys_state": physical}
    return {f"{base}/{file}": text for file, text in said.items()}


def adapter(name: str, **said: str | bytes) -> dict[str, str | bytes]:
    """Files below the adapter; ``device__x`` is ``device/x``."""
    return {f"sys/class/infiniband/{name}/{file.replace('__', '/')}": text for file, text in said.items()}


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def local(tail: int) -> str:
    return f"fe80:0000:0000:0000:0ac0:ebff:fe00:{tail:04x}"


def gids(name: str, *entries: tuple[int, str, str | None, str | None], size: int = 16) -> dict[str, str | bytes]:
    """A GID table: index, GID, type and interface of each entry that is set; the others are zero and have no type."""
    base = f"sys/class/infiniband/{name}/ports/1"
    made: dict[str, str | bytes] = {f"{base}/gids/{n}": ZERO for n in range(size)}
    for index, gid, kind, netdev in entries:
        made[f"{base}/gids/{index}"] = gid
        if kind is not None:
            made[f"{base}/gid_attrs/types/{index}"] = kind
        if netdev is not None:
            made[f"{base}/gid_attrs/ndevs/{index}"] = netdev
    return made


def usual(name: str, address: str, netdev: str) -> dict[str, str | bytes]:
    """The usual RoCE adapter: link-local for v1 and v2, then its address for v1 and v2."""
    table = gids(
        name,
        (0, local(1), "IB/RoCE v1", netdev),
        (1, local(1), "RoCE v2", netdev),
        (2, mapped(address), "IB/RoCE v1", netdev),
        (3, mapped(address), "RoCE v2", netdev),
    )
    return {**port(name, "Ethernet"), **table, **adapter(name, **{f"device__net__{netdev}__mtu": "9000"})}
