from __future__ import annotations

import errno
from pathlib import Path

import pytest

from llmgw.discovery.sysfs import DiskReader, natural, read_adapters
from llmgw.hardware.inventory import AdapterKind

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "fabric" / "sysfs"


class Tree:
    """A reader over a dictionary; a value that is an error is raised as the kernel would raise it."""

    def __init__(self, files: dict[str, str | bytes]) -> None:
        self.files = {f"/r/sys/class/infiniband/{name}": value for name, value in files.items()}

    def text(self, path: Path) -> str | None:
        value = self.files.get(str(path))
        return value.strip() if isinstance(value, str) else None

    def names(self, path: Path) -> tuple[str, ...]:
        under = f"{path}/"
        return tuple(dict.fromkeys(f[len(under) :].split("/")[0] for f in self.files if f.startswith(under)))

    def raw(self, path: Path, limit: int) -> bytes:
        value = self.files.get(str(path), b"")
        return value[:limit] if isinstance(value, bytes) else value.encode()[:limit]

    def target(self, path: Path) -> str | None:
        return "0000:1a:00.0" if self.names(path) else None


def port(
    name: str, layer: str = "InfiniBand", state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)"
) -> dict[str, str | bytes]:
    base = f"{name}/ports/1"
    return {f"{base}/link_layer": layer, f"{base}/state": state, f"{base}/rate": rate, f"{base}/lid": "0x3a4"}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({**port("mlx5_0"), "mlx5_0/node_type": "1: CA", "mlx5_0/device/vendor": "0x15b3"}, AdapterKind.INFINIBAND),
        ({**port("mlx5_0", "Ethernet"), "mlx5_0/device/vendor": "0x15b3"}, AdapterKind.ROCE),
        ({**port("mlx5_0"), "mlx5_0/device/vpd": b"\x82junk SMDL=SW_MNG \xff"}, AdapterKind.SWITCH_MANAGEMENT),
        (
            {**port("irdma0", "Ethernet"), "irdma0/node_type": "4: RNIC", "irdma0/device/vendor": "0x8086"},
            AdapterKind.IWARP,
        ),
        ({**port("rdmap85s0", "Unspecified"), "rdmap85s0/device/vendor": "0x1d0f"}, AdapterKind.EFA),
        ({**port("rxe0", "Ethernet")}, AdapterKind.SOFTWARE),
        ({"mlx5_0/node_type": "1: CA"}, AdapterKind.UNKNOWN),
    ],
)
def test_kinds(files: dict[str, str | bytes], kind: AdapterKind) -> None:
    (adapter,) = read_adapters(Path("/r"), Tree(files))
    assert adapter.kind is kind


def test_values_and_order() -> None:
    tree = Tree(
        {**port("mlx5_10"), **port("mlx5_2", state="1: DOWN", rate="10 Gb/sec (4X)"), "mlx5_2/device/numa_node": "-1"}
    )
    second, tenth = read_adapters(Path("/r"), tree)
    assert (second.name, tenth.name) == ("mlx5_2", "mlx5_10")
    assert (second.ports[0].state, second.numa_node) == ("down", None)
    assert (tenth.ports[0].rate_gbps, tenth.ports[0].lid) == (400.0, 0x3A4)


def test_what_cannot_be_read_is_absent() -> None:
    (adapter,) = read_adapters(Path("/r"), Tree({"mlx5_0/ports/1/state": b"\xff", "mlx5_0/ports/x/state": "4: ACTIVE"}))
    assert [p.number for p in adapter.ports] == [1]
    assert (adapter.ports[0].state, adapter.ports[0].rate_gbps) == ("unknown", None)


def test_natural_order() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "efa_0"], key=natural) == ["efa_0", "mlx5_2", "mlx5_10"]


def test_an_unreadable_file_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(DiskReader):
        def raw(self, path: Path, limit: int) -> bytes:
            if path.name == "rate":
                failure = OSError(errno.EINVAL, "Invalid argument")
                assert failure.errno == errno.EINVAL
                return b""
            return super().raw(path, limit)

    base = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    base.mkdir(parents=True)
    (base / "state").write_text("4: ACTIVE\n")
    (adapter,) = read_adapters(tmp_path, Failing())
    assert (adapter.ports[0].state, adapter.ports[0].rate_gbps) == ("active", None)
    assert read_adapters(tmp_path / "nothing") == ()


@pytest.mark.skipif(not CAPTURES.exists(), reason="no captures here")
def test_captures(tmp_path: Path) -> None:
    seen = 0
    for number, tree in enumerate(sorted(p for p in CAPTURES.iterdir() if p.is_dir())):
        source = next((p for p in (tree / "class/infiniband", tree / "infiniband") if p.is_dir()), tree)
        root = tmp_path / str(number) / "sys/class"
        root.mkdir(parents=True)
        (root / "infiniband").symlink_to(source)
        for adapter in read_adapters(tmp_path / str(number)):
            assert adapter.name
            seen += bool(adapter.ports)
    assert seen >= 10
