"""The numbers of several workers as one, over their lives and deaths."""

from __future__ import annotations

from pathlib import Path

from llmgw.router.metrics_files import Families, Family, MetricsFiles, forget


def counted(requests: float, waiting: float = 0, version: float = 1) -> Families:
    at = (("model", "m"),)
    return {
        "llmgw_router_requests": Family("counter", "t", {("llmgw_router_requests_total", at): requests}),
        "llmgw_router_waiting": Family("gauge", "t", {("llmgw_router_waiting", at): waiting}),
        "llmgw_router_keys_version": Family("gauge", "t", {("llmgw_router_keys_version", ()): version}),
    }


def shown(files: MetricsFiles, number: int, families: Families) -> tuple[float, float, float]:
    lines = dict(
        line.rsplit(" ", 1) for line in files.sum(number, families).decode().splitlines() if not line.startswith("#")
    )
    return (
        float(lines['llmgw_router_requests_total{model="m"}']),
        float(lines['llmgw_router_waiting{model="m"}']),
        float(lines["llmgw_router_keys_version"]),
    )


def test_sums_of_those_that_live_and_counts_of_those_that_died(tmp_path: Path) -> None:
    one, two = MetricsFiles(tmp_path), MetricsFiles(tmp_path)
    one.write(1, counted(5, waiting=2, version=7))
    assert shown(two, 1, counted(3, waiting=1, version=6)) == (8, 3, 6)
    two.write(1, counted(0))  # one that was taken before it is written after it
    one.close()
    assert shown(two, 2, counted(4, version=6)) == (9, 0, 6)
    three = MetricsFiles(tmp_path)
    assert not list(tmp_path.glob(f"*{one._name}*")), "added to the past"
    assert shown(three, 1, counted(0)) == (9, 0, 1)
    for files in (two, three):
        files.close()
    four = MetricsFiles(tmp_path)
    assert shown(four, 1, counted(1)) == (10, 0, 1)
    four.close()
    forget(tmp_path)
    five = MetricsFiles(tmp_path)
    assert shown(five, 1, counted(1)) == (1, 0, 1)
    five.close()


def test_one_that_dies_while_it_adds_the_past_up_counts_nothing_twice(tmp_path: Path) -> None:
    one = MetricsFiles(tmp_path)
    one.write(1, counted(5))
    one.close()
    data = tmp_path / f"metrics-{one._name}.json"
    kept = data.read_bytes()
    two = MetricsFiles(tmp_path)
    data.write_bytes(kept)  # as if it had been killed between the sum and the end of the file
    assert shown(two, 1, counted(1))[0] == 6
    two.close()
    three = MetricsFiles(tmp_path)
    assert shown(three, 1, counted(0))[0] == 6
    three.close()


def test_what_cannot_be_read_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics-past").write_bytes(b"{")
    (tmp_path / "metrics-odd.json").write_bytes(b'{"families": [["x", 1]]}')
    files = MetricsFiles(tmp_path)
    assert shown(files, 1, counted(2))[0] == 2
    files.close()
