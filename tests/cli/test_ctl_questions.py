"""``llmgw ctl plan`` and ``why`` as an operator sees them, against an admin listener on a real socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve

from llmgw.cli.admin_client import connect
from llmgw.cli.ctl import role_of
from llmgw.errors import OperatorError
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import Assignment, NodeState, ShardState
from llmgw.settings.catalog import Scaling
from llmgw.settings.daemon import Address
from llmgw.web.access import Access
from llmgw.web.api import app
from llmgw.web.serve import listen, serve
from llmgw.web.source import Routed, RoutedReplica, Turned
from llmgw.web.watch import Watch
from tests.scheduler.clusters import NOW, device, fabric, model, node, profile, report, row, wide
from tests.web.admin import TOKEN, Admin, Picture, admin


async def ctl(it: Admin, folder: Path, *words: str) -> tuple[int, str]:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    line = [sys.executable, "-m", "llmgw", "ctl", "--admin", f"http://127.0.0.1:{it.port}", "--token-file", str(token)]
    done = await trio.run_process([*line, *words], capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout.decode()


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


async def test_a_plan_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    async with admin() as it:
        more = (node("n2", (device(0),)), node("n3", (device(0, "l40s-45g"),)))
        it.picture.cluster = evolve(it.picture.cluster, nodes=(*it.picture.cluster.nodes, *more))
        code, said = await ctl(it, tmp_path, "plan")
        full = "1 of 1 devices short: gpu-0 runs m-1.0, gpu-1 runs m-100.0 [devices] -> wait for a device, lower the"
        assert code == 0
        assert squeezed(said) == [
            "WHEN WHAT REPLICA WHERE WHY",
            "now place m-101 n2: gpu-0 profile p on n2: gpu-0 (h100-80g)",
            "",
            "MODEL CHANGE WANTED PLACED ON",
            "m same 3 2 -> 3 2 -> 3 x h100-80g",
            "",
            "DEVICE CLASS DEVICES USED NOW USED THEN FREE THEN",
            "h100-80g 3 2 3 0",
            "l40s-45g 1 0 0 1",
            "",
            "m, profile p, on n2; why not elsewhere:",
            f"n1, profile p: {full} replicas of what runs there, or add a node",
            "n3, profile p: class h100-80g wanted, node has 1 x l40s-45g [device-class] -> add a profile for a class that "
            "it has",
            "",
            "everything has a place",
        ]
        code, said = await ctl(it, tmp_path, "plan", "m", "--replicas", "4")
        assert code == 1
        lines = squeezed(said)
        assert lines[1].endswith("p on n2: gpu-0 (h100-80g) (without the change as well)")
        assert "m changed 3 -> 4 2 -> 3 2 -> 3 x h100-80g" in lines
        at = lines.index(
            "m: 3 of 4 placed. no node can take it: 3 candidates turned down (2 by devices, 1 by device-class)"
        )
        assert [line.split(",")[0] for line in lines[at + 1 :]] == ["n1", "n2", "n3", "", "no place for all of m"]
        code, said = await ctl(it, tmp_path, "plan", "m", "--replicas", "4", "--json")
        assert (code, json.loads(said)["lacking"]) == (1, ["m"])


async def test_a_plan_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    async with admin() as it:
        file.write_text(
            "models: {m: {replicas: 1, profiles: [{name: p, engine: vllm, weights: /w, device_class: h100-80g}]}}"
        )
        code, said = await ctl(it, tmp_path, "plan", "--settings", str(file))
        lines = squeezed(said)
        assert code == 0
        assert lines[0] == "~ models.m.replicas: 3 -> 1"
        assert "now drain m-100 n1 1 replica is wanted, this is one too many" in lines
        assert "m changed 3 -> 1 2 -> 1 2 -> 1 x h100-80g" in lines
        file.write_text("models: {m: {replicas: x}}")
        code, said = await ctl(it, tmp_path, "plan", "--settings", str(file))
        assert (code, f"{file}:1:14: models.m.replicas: expected" in said) == (2, True), said
        code, said = await ctl(it, tmp_path, "plan", "--replicas", "3")
        assert (code, "name it" in said) == (2, True)
        code, said = await ctl(it, tmp_path, "plan", "mm")
        assert (code, "model mm: is not in the catalog" in said) == (2, True)


async def test_a_plan_over_several_nodes_with_what_ends_first(tmp_path: Path) -> None:
    async with admin() as it:
        of = model("m", 1, profile("one"))
        old = row(of=of)
        nodes = (
            node("n1", (device(0),), reports=(report(old, ShardState.READY),), fabrics=(fabric(),)),
            node("n2", (device(0),), fabrics=(fabric(),)),
        )
        both = model("m", 1, wide())
        it.picture.cluster = evolve(it.picture.cluster, nodes=nodes, models=(both,), replicas=(old,))
        code, said = await ctl(it, tmp_path, "plan")
        lines = squeezed(said)
        assert code == 0, said
        assert lines[1].startswith("now drain m-1 n1 profile one was removed")
        assert lines[2].startswith("once m-1 ended place m-101 n1: gpu-0; n2: gpu-0 ")


async def test_why(tmp_path: Path) -> None:
    async with admin() as it:
        code, said = await ctl(it, tmp_path, "why", "m-1", "--limit", "1")
        assert code == 0
        assert squeezed(said) == [
            "replica m-1: ready for 10 s: because",
            "of model m, profile p, start 1",
            "m-1.0 on n1: gpu-0: ready, pid 42: because",
            "",
            "AGO DECISION REPLICA NODE WHY",
            "0 s place m-1 n1 why",
        ]
        it.picture.traffic = Routed(
            (RoutedReplica("m-1.0", False, 3, 1200, 2, 1, 0.42), RoutedReplica("m-2.0", True, 0, 0)),
            4, {"affinity": 8, "room": 2}, (Turned("overloaded", 12, NOW - 3, "too many requests wait for it"),),
        )  # fmt: skip
        _, said = await ctl(it, tmp_path, "why", "m")
        lines = squeezed(said)
        at = next(n for n, line in enumerate(lines) if line.startswith("routing: prefix: a conversation stays"))
        assert lines[at + 1 : at + 7] == [
            "m-1.0: 3 requests with 1200 tokens outstanding; its engine: 2 running, 1 waiting, 42% of the KV cache",
            "m-2.0: 0 requests with 0 tokens outstanding",
            "drains: it gets nothing new",
            "why replicas were taken, since the router began: 8 affinity, 2 room",
            "4 requests wait: replicas are ready and take as many as come; the requests that waited for one go on",
            "turned away in the last 5 min: 12 overloaded, the last one 3 s ago: too many requests wait for it",
        ]
        assert "1 of 3 ready; its users are told that it is ready with 1 of 3 replicas" in said
        assert "m-100 placed with profile p on n1: gpu-1" in said
        assert "1 without a place: no node can take it" in said
        _, said = await ctl(it, tmp_path, "why", "n1")
        assert "gpu-0 h100-80g: has m-1.0" in said
        assert "labels: none; taints: none; engines: vllm" in said
        _, said = await ctl(it, tmp_path, "why", "m-0", "--limit", "1")
        assert squeezed(said)[0] == "replica m-0 is gone; what was decided about it:"
        code, said = await ctl(it, tmp_path, "why", "m-10")
        assert (code, "did you mean m-100 or m-1? there are 2 models, 2 replicas, 1 node" in said) == (2, True)


async def test_replicas_with_the_ranks_of_those_over_several_nodes(tmp_path: Path) -> None:
    async with admin() as it:
        of = model("m", 1, wide())
        both = evolve(row(of=of), shards=(Assignment("m-1.0", 0, "n1", (0,)), Assignment("m-1.1", 1, "n2", (0,))))
        told = [report(both, ShardState.READY, rank=rank) for rank in (0, 1)]
        nodes = (
            node("n1", reports=(evolve(told[0], load_mib=(2048,)),)),
            node("n2", reports=(evolve(told[1], load_mib=(1024,), serving_mib=(3072,)),)),
        )
        it.picture.cluster = evolve(it.picture.cluster, nodes=nodes, models=(of,), replicas=(both,))
        code, said = await ctl(it, tmp_path, "replicas")
        assert code == 0, said
        assert squeezed(said)[1:] == [
            "m-1 ready 10 s n1, n2 n1/gpu-0, n2/gpu-0 2.0 GiB loading, 3.0 GiB serving 42 because",
            "rank 0 ready 10 s n1 gpu-0 2.0 GiB loading 42 because",
            "rank 1 ready 10 s n2 gpu-0 1.0 GiB loading, 3.0 GiB serving 42 because",
        ]
        it.picture.cluster = evolve(it.picture.cluster, nodes=(node("n1"), node("n2")))
        code, said = await ctl(it, tmp_path, "replicas")
        assert (code, "rank 1" in said) == (0, True), said


async def test_why_an_adapter(tmp_path: Path) -> None:
    async with admin() as it:
        both = model("m", 3, profile(lora={"sql": "/s"}), profile("q"))
        old, new = it.picture.cluster.replicas
        rows = (evolve(old, profile=both.profiles[0]), new)
        it.picture.catalog = evolve(it.picture.catalog, models=(both,))
        it.picture.cluster = evolve(it.picture.cluster, models=(both,), replicas=rows)
        code, said = await ctl(it, tmp_path, "why", "m:sql", "--limit", "1")
        lines = squeezed(said)
        assert code == 0
        assert lines[:5] == [
            "adapter m:sql of model m: degraded, its users are told that it is ready with 1 of 3 replicas",
            "replicas that were started with it: m-1",
            "replicas without it: m-100",
            "profiles without it: q",
            "model m: degraded for 0 s: m-100: profile p on n1: gpu-1 (h100-80g)",
        ], said


async def test_scaling_is_explained(tmp_path: Path) -> None:
    async with admin() as it:
        busy = evolve(model("m", 1), scaling=Scaling(min=0, max=4))
        says = Scale(1, 3, NOW - 5, 3, NOW - 30, "50 running and 0 waiting, for 16 each; that makes 3 in 10 s")
        it.picture.catalog = evolve(it.picture.catalog, models=(busy,))
        it.picture.cluster = evolve(it.picture.cluster, models=(busy,), scales={"m": says})
        for words in (("why", "m"), ("models",), ("status",)):
            code, said = await ctl(it, tmp_path, *words)
            line = next(line for line in squeezed(said) if "scaling 0 to 4" in line)
            assert code == 0
            assert line.removeprefix("m: ") == f"scaling 0 to 4, now 1, for 30 s: {says.reason}"
        code, said = await ctl(it, tmp_path, "models", "--json")
        assert json.loads(said)["models"][0]["scaling"] == {
            "min": 0, "max": 4, "number": 1, "want": 3, "since": NOW - 5, "changed": NOW - 30, "reason": says.reason,
        }  # fmt: skip


async def test_what_has_no_place_on_a_large_fleet_is_said_in_short(tmp_path: Path) -> None:
    async with admin() as it:
        taken = {f"n{n}": row(n, f"n{n}", (0,)) for n in range(10, 60)}
        away = node("n60", (device(0),), state=NodeState.LOST)
        nodes = (*(node(name, (device(0),)) for name in taken), away)
        of = model("m", 60)
        it.picture.catalog = evolve(it.picture.catalog, models=(of,))
        it.picture.cluster = evolve(it.picture.cluster, nodes=nodes, models=(of,), replicas=tuple(taken.values()))
        it.picture.decide()
        for words in (("status",), ("models",)):
            code, said = await ctl(it, tmp_path, *words)
            assert (code, said.count("1 of 1 devices short")) == (0, 4), said
            assert "  … and 46 more by devices, see --json" in said
        _, said = await ctl(it, tmp_path, "nodes")
        assert "1 x h100-80g (0 free)" in squeezed(said)[-1], "what nobody can get is not free"
        _, said = await ctl(it, tmp_path, "models", "--json")
        assert len(json.loads(said)["models"][0]["unplaced"]["candidates"]) == 51


async def test_a_shell_completes_commands_and_names_and_nothing_where_nobody_answers(tmp_path: Path) -> None:
    async def completed(port: int, *words: str) -> list[str]:
        line = ["llmgw", "ctl", "--admin", f"http://127.0.0.1:{port}", "--token-file", str(token), *words]
        env = os.environ | {"_LLMGW_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line),
                            "COMP_CWORD": str(len(line) - 1)}  # fmt: skip
        start = "from llmgw.cli.main import cli; cli(prog_name='llmgw')"
        done = await trio.run_process([sys.executable, "-c", start], capture_stdout=True, capture_stderr=True, env=env)
        assert done.stderr == b""
        return [row.partition(",")[2] for row in done.stdout.decode().split()]

    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    async with admin() as it:
        assert await completed(it.port, "repl") == ["replica", "replicas"]
        assert await completed(it.port, "replica", "restart", "m-") == ["m-1", "m-100"]
        port = it.port
    assert await completed(port, "replica", "restart", "m-") == []


async def line_of(stream: trio.abc.ReceiveStream) -> str:
    found = b""
    while not found.endswith(b"\n"):
        found += (byte := await stream.receive_some(1))
        assert byte, found
    return found.decode()


async def test_a_watch_comes_back_after_a_connection_that_broke(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    picture, access = Picture(), Access(TOKEN)
    port = 0
    async with trio.open_nursery() as nursery:
        for turn in range(2):
            async with trio.open_nursery() as served:
                listener = listen(Address("127.0.0.1", port))
                port = listener.getsockname()[1]
                watch = Watch(picture, None, access)
                served.start_soon(watch.run)
                await served.start(serve, app(picture, access, watch=watch), listener)
                if turn == 0:
                    command = [sys.executable, "-m", "llmgw", "ctl", "--admin", f"http://127.0.0.1:{port}",
                               "--token-file", str(token), "replicas", "--watch", "--json"]  # fmt: skip
                    start = partial(
                        trio.run_process, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False
                    )
                    process = await nursery.start(start)
                with trio.fail_after(20):
                    assert json.loads(await line_of(process.stdout))["type"] == "snapshot"
                served.cancel_scope.cancel()
            with trio.fail_after(20):
                assert "trying again in 0.5 s" in await line_of(process.stderr)
        nursery.cancel_scope.cancel()


async def test_a_watch_of_nobody_and_one_that_may_not(tmp_path: Path) -> None:
    nobody = Admin(1, Picture())
    code, said = await ctl(nobody, tmp_path, "status", "--watch")
    assert code == 3
    remedy = "check that llmgw server runs, and --admin"
    assert f"admin API at 127.0.0.1:1: does not answer: Connection refused. {remedy}" in said
    async with admin() as it:
        (tmp_path / "wrong").write_text("llmgw_admin_0.x")
        (tmp_path / "wrong").chmod(0o600)
        code, said = await ctl(it, tmp_path, "--token-file", str(tmp_path / "wrong"), "status", "--watch")
        assert code == 2
        assert "a valid admin token is needed. send Authorization: Bearer" in said


async def test_lists_say_that_they_are_empty(tmp_path: Path) -> None:
    async with admin() as it:
        it.picture.cluster = evolve(it.picture.cluster, nodes=(), replicas=(), models=())
        for name, words in (
            ("nodes", "no node has ever registered"),
            ("replicas", "no replica is placed"),
        ):  # fmt: skip
            code, said = await ctl(it, tmp_path, name)
            assert (code, words in said) == (0, True), said


@pytest.mark.parametrize(
    ("answer", "role"),
    [
        ({"control_plane": False, "leads": True, "leader": ""}, "router only"),
        ({"control_plane": True, "leads": True, "leader": ""}, "control plane"),
        ({"control_plane": True, "leads": True, "leader": "a:1"}, "control plane that leads"),
        ({"control_plane": True, "leads": False, "leader": "a:1"}, "control plane that follows a:1"),
        ({"control_plane": True, "leads": False, "leader": ""}, "control plane; nobody leads"),
    ],
)
def test_what_a_control_plane_is_among_others(answer: dict[str, object], role: str) -> None:
    assert role_of(answer) == role


def test_an_address_without_a_token_is_not_enough() -> None:
    with pytest.raises(OperatorError, match="--admin: is given without --token-file, and there"):
        connect("http://127.0.0.1:1", None, None)
    with pytest.raises(OperatorError, match="--token-file: is given without --admin"):
        connect(None, Path("x"), None)
