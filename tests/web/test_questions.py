"""What is asked of the admin side with a body or a name: plans, why, and the brake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from llmgw.scheduler.state import NodeState
from llmgw.settings.catalog import Balance, Routing, Scaling
from llmgw.settings.digest import profile_digest
from llmgw.web.bodies import MAX_BYTES
from llmgw.web.source import Routed, RoutedReplica, Turned
from tests.scheduler.clusters import NOW, model, node, profile
from tests.web.admin import Admin, Picture, admin

SETTINGS = """
models:
  m: {replicas: 1, profiles: [{name: p, engine: vllm, weights: /w, device_class: h100-80g}]}
  new: {profiles: [{name: p, engine: vllm, weights: /w, device_class: l40s-45g}]}
"""


async def post(it: Admin, path: str, body: object) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, answer = await it.ask(f"/api/v1/{path}", "POST", body=content)
    return status, json.loads(answer)


async def test_a_plan_of_one_model() -> None:
    async with admin() as it:
        before = it.picture.cluster
        status, made = await post(it, "plan", {"model": "m", "replicas": 1})
        assert (status, made["fits"], made["lacking"]) == (200, True, [])
        assert [[(m["kind"], m["replica"]) for m in s["moves"]] for s in made["steps"]] == [[("drain", "m-100")]]
        assert made["models"][0] | {"classes": []} == {
            "name": "m", "change": "changed", "wanted": [3, 1], "placed": [2, 1], "classes": [],
        }  # fmt: skip
        assert made["classes"] == [{"device_class": "h100-80g", "total": 2, "before": 2, "after": 1, "free": 1}]
        status, made = await post(it, "plan", {"model": "m", "replicas": 5, "profile": "p"})
        assert (status, made["fits"], made["lacking"]) == (200, False, ["m"])
        assert made["unplaced"][0]["candidates"][0]["refusals"][0]["filter"] == "devices"
        assert it.picture.cluster is before


async def test_a_plan_of_a_whole_document() -> None:
    async with admin() as it:
        status, made = await post(it, "plan", {"settings": SETTINGS})
        assert status == 200
        first, second, third = made["differences"]
        assert first == "~ models.m.replicas: 3 -> 1"
        assert second.startswith('- models.e: {"replicas": 1, "endpoints": ["http://h:1"]')
        assert third.startswith("+ models.new: ")
        assert made["lacking"] == ["new"]
        assert {m["name"]: m["change"] for m in made["models"]} == {"m": "changed", "new": "added"}
        status, made = await post(it, "plan", {"settings": "models: {e: {endpoints: ['http://h:1']}}"})
        assert status == 200
        assert "starts itself anew" in made["notes"][0]
        assert (await post(it, "plan", {}))[1]["differences"] == []


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "is not valid JSON"),
        (b"[1]", 400, "expected a mapping, found a list"),
        ({"modle": "m"}, 400, "did you mean model?"),
        ({"model": 7}, 400, "expected text, found the number 7 @ $.model"),
        ({"model": "m", "replicas": True}, 400, "expected a whole number, found true"),
        ({"model": "m", "replicas": -1}, 400, "'replicas' must be >= 0: -1"),
        ({"model": "m", "replicas": 1e9}, 400, "'replicas' must be <= 10000"),
        ({"replicas": 1}, 400, "name the model"),
        ({"model": "mm"}, 404, "model mm: is not in the catalog"),
        ({"model": "m", "profile": "q"}, 404, "model m: has no profile q"),
        ({"model": "e"}, 409, "is served by engines that llmgw does not run"),
        ({"settings": "models: {m: {replicas: x, profles: []}}"}, 400, "2 faults"),
        ({"settings": "a" * MAX_BYTES}, 413, "is larger than"),
    ],
)
async def test_what_is_wrong_about_a_question_is_said(body: object, status: int, said: str) -> None:
    async with admin() as it:
        found, answer = await post(it, "plan", body)
        assert found == status
        assert said in " ".join(answer["error"].values())


async def test_an_adapter_is_planned_with_its_model() -> None:
    async with admin() as it:
        it.picture.cluster = evolve(it.picture.cluster, models=(model("m", 3, profile(lora={"sql": "/s"})),))
        status, answer = await post(it, "plan", {"model": "m:sql", "replicas": 4})
        assert (status, answer["error"]) == (
            404, {"reason": "model m:sql: is an adapter of m, and goes where that goes", "remedy": "plan m"},
        )  # fmt: skip


async def test_methods() -> None:
    async with admin() as it:
        for path, method, usable in (
            ("plan", "GET", "POST"),
            ("brake/release", "GET", "POST"),
            ("why/m", "POST", "GET"),
        ):
            status, _, body = await it.ask(f"/api/v1/{path}", method)
            assert (status, json.loads(body)["error"]["remedy"]) == (405, f"use {usable}")


async def why(it: Admin, name: str) -> tuple[int, Any]:
    status, _, body = await it.ask(f"/api/v1/why/{name}")
    return status, json.loads(body)


async def test_why_a_replica_a_model_and_a_node() -> None:
    async with admin() as it:
        _, told = await why(it, "m-1")
        assert (told["kinds"], told["replica"]["state"], told["gone"]) == (["replica"], "ready", None)
        assert told["replica"]["shards"][0]["node"] == "n1"
        assert (len(told["decisions"]), told["decisions"][0]["reason"]) == (20, "why")
        assert len((await why(it, "m-1?limit=3"))[1]["decisions"]) == 3
        _, told = await why(it, "m")
        assert (told["kinds"], told["model"]["ready"], told["model"]["wanted"]) == (["model"], 1, 3)
        assert [r["id"] for r in told["model"]["replicas"]] == ["m-1", "m-100"]
        assert told["model"]["unplaced"]["candidates"][0]["node"] == "n1"
        assert told["model"]["public"] == "is ready with 1 of 3 replicas"
        _, told = await why(it, "n1")
        assert [(d["shard"], d["unusable"]) for d in told["node"]["devices"]] == [
            ("m-1.0", "gpu-0 runs m-1.0"),
            ("m-100.0", "gpu-1 runs m-100.0"),
        ]
        assert (told["node"]["labels"], told["node"]["taints"]) == ({}, [])
        _, told = await why(it, "e")
        assert told["model"]["state"] == "static"


async def test_why_a_model_s_requests_go_where_they_go() -> None:
    async with admin() as it:
        it.picture.traffic = Routed(
            (
                RoutedReplica("m-1.0", False, 3, 1200, 2, 1, 0.42, full=True),
                RoutedReplica("m-2.0", False, 0, 0, left_alone=2, until=NOW + 12, why="silent"),
                RoutedReplica("m-3.0", True, 1, 300, left_alone=1, until=NOW - 1, why="errors"),
            ),
            4,
            {"affinity": 8, "room": 2},
            (Turned("overloaded", 12, NOW - 3, "too many requests wait for it"),),
        )
        routing = (await why(it, "m"))[1]["model"]["routing"]
        assert (routing["balance"], routing["waiting"], routing["choices"]) == ("prefix", 4, {"affinity": 8, "room": 2})
        assert routing["waits"].startswith("replicas are ready and take as many as come")
        assert [r["notes"] for r in routing["replicas"]] == [
            ["says that it has no room (1 requests wait in it): others are taken before it"],
            ["left alone by 2 workers for 12 s more: it took requests and answered none, and is asked by the router "
             "before a client's request tries it"],
            ["drains: it gets nothing new", "left alone by 1 worker until it has been tried: it answered 5 times with "
             "5xx within 10 s; one request tries it then"],
        ]  # fmt: skip
        assert routing["refused"][0]["code"] == "overloaded"
        (m, other) = it.picture.catalog.models
        m = evolve(
            m, routing=Routing(Balance.LEAST, concurrency=2, queue=9, queue_s=5), scaling=Scaling(0, 2, hold_s=60)
        )
        it.picture.catalog = evolve(it.picture.catalog, models=(m, other))
        routing = (await why(it, "m"))[1]["model"]["routing"]
        assert routing["rule"] == "of two replicas that are drawn the one with fewer tokens outstanding"
        assert (
            routing["waits"]
            == "every replica has the 2 requests that it may have; they wait for up to 5 s, 9 of them at most"
        )
        it.picture.traffic = Routed(waiting=1)
        routing = (await why(it, "m"))[1]["model"]["routing"]
        assert routing["waits"] == "no replica takes requests yet; they are held for up to 60 s"


async def test_why_what_is_gone_and_what_never_was() -> None:
    async with admin() as it:
        status, told = await why(it, "m-0")
        assert (status, told["gone"], told["replica"], told["kinds"]) == (200, "replica", None, [])
        assert told["decisions"]
        status, told = await why(it, "m-10")
        assert status == 404
        assert told["error"] == {
            "reason": "no model, replica or node is called m-10, and no decision is stored about one",
            "remedy": "did you mean m-100 or m-1? there are 2 models, 2 replicas, 1 node",
        }
        for odd in ("a%2Fb", "..%2f..%2fetc", "%00", "m" * 3000, "m-1/x"):
            assert (await why(it, odd))[0] == 404
        assert (await why(it, "m?limit=0"))[0] == 400


async def test_a_model_whose_name_has_slashes() -> None:
    async with admin() as it:
        it.picture.catalog = evolve(it.picture.catalog, models=(model("org/m"),))
        assert (await why(it, "org%2Fm"))[1]["model"]["name"] == "org/m"
        assert (await why(it, "org/m"))[1]["model"]["name"] == "org/m"


async def test_why_an_adapter() -> None:
    async with admin() as it:
        both = model("m", 3, profile(lora={"sql": "/s"}), profile("q"))
        old, new = it.picture.cluster.replicas
        rows = (evolve(old, profile=profile(lora={"sql": "/s", "law": "/l"})), new)
        it.picture.catalog = evolve(it.picture.catalog, models=(both,))
        it.picture.cluster = evolve(it.picture.cluster, models=(both,), replicas=rows)
        status, told = await why(it, "m:sql")
        assert (status, told["kinds"], told["gone"], told["model"]["name"]) == (200, ["adapter"], None, "m")
        assert told["adapter"] == {
            "name": "m:sql", "model": "m", "state": "degraded", "ready": 1, "public": "is ready with 1 of 3 replicas",
            "replicas": ["m-1"], "without": ["m-100"], "profiles_without": ["q"],
        }  # fmt: skip
        assert [d["model"] for d in told["decisions"]] == ["m"] * 20, "those about its model"
        # The only replica that is ready was started without it.
        it.picture.cluster = evolve(it.picture.cluster, replicas=(old, new))
        _, told = await why(it, "m:sql")
        assert {k: told["adapter"][k] for k in ("state", "ready", "public", "replicas")} == {
            "state": "waiting", "ready": 0, "public": "is being updated", "replicas": [],
        }  # fmt: skip
        status, told = await why(it, "m:law")
        assert (status, told["error"]["remedy"]) == (
            404, "did you mean m:sql? there are 1 model, 1 adapter, 2 replicas, 1 node",
        )  # fmt: skip


async def test_an_edited_profile_under_way_is_said() -> None:
    async with admin() as it:
        edited = model("m", 3, profile(context_length=4096))
        it.picture.catalog = evolve(it.picture.catalog, models=(edited,))
        it.picture.cluster = evolve(it.picture.cluster, models=(edited,))
        _, told = await why(it, "m")
        assert told["model"]["changes"][0] == (
            "m-1 runs profile p as it was before its edit; it is replaced in its turn"
        )
        first, second = it.picture.cluster.replicas
        it.picture.cluster = evolve(it.picture.cluster, replicas=(evolve(first, superseded_by="m-100"), second))
        assert (await why(it, "m"))[1]["model"]["changes"][0].startswith("m-1 serves until m-100 is ready")
        # It was tried with one of them and did not come up: none of the others is replaced either.
        kept = evolve(first, rejected=profile_digest("m", edited.profiles[0]))
        it.picture.cluster = evolve(it.picture.cluster, replicas=(kept, second))
        _, told = await why(it, "m")
        ends = "keeps the profile from before the edit, which did not come up; it is tried again once it is edited"
        assert told["model"]["changes"] == [f"m-1 {ends}", f"m-100 {ends}"]
        assert told["model"]["reason"].endswith("; the edited profile p did not come up, what was before it stays")
        again = model("m", 3, profile(context_length=2048))
        it.picture.catalog = evolve(it.picture.catalog, models=(again,))
        it.picture.cluster = evolve(it.picture.cluster, models=(again,))
        _, told = await why(it, "m")
        assert told["model"]["changes"][0].endswith("it was edited since and is tried again")
        assert "did not come up" not in told["model"]["reason"]


def silent(picture: Picture, count: int = 3) -> None:
    away = tuple(evolve(node(f"s{n}", state=NodeState.LOST), heard=NOW - 100) for n in range(count))
    picture.cluster = evolve(picture.cluster, nodes=(*picture.cluster.nodes, *away))


async def test_the_brake_is_said_everywhere_and_released_by_hand() -> None:
    async with admin() as it:
        status, answer = await post(it, "brake/release", {})
        assert (status, answer["error"]["reason"]) == (409, "the brake is not on")
        silent(it.picture)
        for path in ("status", "nodes", "models", "replicas", "brake", "why/m", "why/s1"):
            _, _, body = await it.ask(f"/api/v1/{path}")
            assert json.loads(body)["brake"]["reason"].startswith("the brake is on: 3 of 4")
        shown = json.loads((await it.ask("/api/v1/status"))[2])
        assert shown["healthy"] is False
        assert shown["problems"][0].startswith("the brake is on")
        _, told = await why(it, "s1")
        assert told["node"]["next"].startswith("the brake is on: nothing is replaced")
        assert (await post(it, "plan", {}))[1]["brake"].startswith("the brake is on")

        status, answer = await post(it, "brake/release", {"nodes": ["s0", "s1"]})
        assert (status, answer["error"]["reason"]) == (409, "meanwhile s2 fell silent as well")
        for wrong in (b"", [], {"nods": []}, {"nodes": [1]}, {"nodes": "s0"}):
            assert (await post(it, "brake/release", wrong))[0] == 400
        it.picture.full = True
        status, answer = await post(it, "brake/release", {"nodes": ["s0", "s1", "s2"]})
        assert (status, answer["error"]["reason"]) == (503, "the brake stays on: db: the disk is full")
        it.picture.full = False
        status, answer = await post(it, "brake/release", {"nodes": ["s0", "s1", "s2"]})
        assert (status, answer["nodes"]) == (200, ["s0", "s1", "s2"])
        assert json.loads((await it.ask("/api/v1/brake"))[2])["brake"] is None
        assert (await it.ask("/api/v1/brake/release", "POST", token="x", body=b"{}"))[0] == 401
