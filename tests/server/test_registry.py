from __future__ import annotations

from attrs import evolve

from llmgw.router.table import Route, Table
from llmgw.scheduler.state import Assignment, ClusterState, Goal, NodeState, Replica, ShardState
from llmgw.scheduler.summary import ModelView
from llmgw.server.registry import table
from llmgw.settings.catalog import EngineKind, Model
from llmgw.settings.document import Settings
from tests.scheduler.clusters import NOW, cluster, model, node, profile, report, row

LOADING = ModelView("m", 2, 0, "loading", "m-1: rank 1 on n1: loading", NOW, "ready soon", "is loading")
SETTINGS = Settings(models=(model(), Model("elsewhere", endpoints=("http://10.0.0.9:8000",))))


def endpoints(state: ClusterState) -> list[tuple[str, bool]]:
    made = table(SETTINGS, state, {"m": LOADING}, 5, Table())
    return [(e.id, e.draining) for e in made.routes[0].endpoints]


def one(state: ShardState, *, of: Replica | None = None, node_state: NodeState = NodeState.CONNECTED) -> ClusterState:
    of = of or row()
    return cluster((node(state=node_state, reports=(report(of, state),)),), (model(),), (of,))


def test_only_what_serves_is_routed() -> None:
    assert endpoints(one(ShardState.READY)) == [("m-1.0", False)]
    assert endpoints(one(ShardState.DRAINING)) == [("m-1.0", True)]
    for state in (ShardState.STARTING, ShardState.LOADING, ShardState.STOPPING, ShardState.STOPPED, ShardState.FAILED):
        assert endpoints(one(state)) == []


def test_a_silent_nodes_engines_stay() -> None:
    for state in (NodeState.UNREACHABLE, NodeState.LOST):
        assert endpoints(one(ShardState.READY, node_state=state)) == [("m-1.0", False)]


def test_what_is_on_its_way_out_gets_nothing_new() -> None:
    assert endpoints(one(ShardState.READY, of=row(goal=Goal.DRAIN))) == [("m-1.0", True)]
    evicted = row(goal=Goal.STOP)
    assert endpoints(one(ShardState.READY, of=evicted, node_state=NodeState.LOST)) == [("m-1.0", False)]


def test_reports_of_an_earlier_start_are_not_routed() -> None:
    again = row(generation=2)
    state = cluster((node(reports=(report(again, ShardState.READY, generation=1),)),), (model(),), (again,))
    assert endpoints(state) == []


def test_a_replica_of_which_a_rank_is_going_gets_nothing_although_rank_0_answers() -> None:
    places = (Assignment("m-1.0", 0, "n1", (0,)), Assignment("m-1.1", 1, "n2", (0,)))
    both = row(shards=places)
    for state, wanted in ((ShardState.READY, [("m-1.0", False)]), (ShardState.STOPPING, []), (ShardState.FAILED, [])):
        nodes = (
            node(reports=(report(both, ShardState.READY),)),
            node("n2", reports=(report(both, state, rank=1),)),
        )
        assert endpoints(cluster(nodes, (model(),), (both,))) == wanted


def test_versions_go_up_only_when_something_changed() -> None:
    first = table(SETTINGS, one(ShardState.LOADING), {"m": LOADING}, 5, Table())
    assert first.version == 1
    assert first.routes[0] == Route("m", (), "is loading", 5, 0.0, "loading", 0, 2), "nothing of the operators' words"
    assert first.routes[1].endpoints[0].host == "10.0.0.9"
    assert table(SETTINGS, one(ShardState.LOADING), {"m": LOADING}, 5, first) is first
    assert table(SETTINGS, one(ShardState.READY), {"m": LOADING}, 5, first).version == 2
    assert table(evolve(SETTINGS, models=()), one(ShardState.READY), {}, 5, first).routes == ()


def test_adapters_are_routed_to_the_replicas_that_have_them() -> None:
    new = profile(lora={"sql": "/a", "law": "/b"})
    with_lora, old = row(profile=new), row(2, profile=profile(lora={"sql": "/a"}))
    catalog = evolve(model(), profiles=(new,))
    reports = (report(with_lora, ShardState.READY), report(old, ShardState.READY))
    state = cluster((node(reports=reports),), (catalog,), (with_lora, old))
    ready = ModelView("m", 2, 2, "ready", "why", NOW, "", "is ready")
    made = table(Settings(models=(catalog,)), state, {"m": ready}, 5, Table())
    assert {r.model: ([e.id for e in r.endpoints], r.public) for r in made.routes} == {
        "m": (["m-1.0", "m-2.0"], "is ready"),
        "m:sql": (["m-1.0", "m-2.0"], "is ready"),
        "m:law": (["m-1.0"], "is ready"),
    }
    only_old = table(Settings(models=(catalog,)), evolve(state, replicas=(old,)), {"m": ready}, 5, Table())
    assert [r.public for r in only_old.routes] == ["is ready", "is ready", "is being updated"]
    assert [r.model for r in made.routes] == ["m", "m:sql", "m:law"]


def test_other_names_lead_to_the_model_and_say_how_it_is() -> None:
    of = evolve(model(), aliases=("gpt", "gpt-mini"))
    elsewhere = Model("elsewhere", endpoints=("http://10.0.0.9:8000",), aliases=("far",))
    made = table(Settings(models=(of, elsewhere)), one(ShardState.READY), {"m": LOADING}, 5, Table()).routes
    assert [(r.model, r.alias_of, len(r.endpoints)) for r in made] == [
        ("m", "", 1), ("gpt", "m", 0), ("gpt-mini", "m", 0), ("elsewhere", "", 1), ("far", "elsewhere", 0),
    ]  # fmt: skip
    assert made[1].public == made[0].public
    assert made[1].state == "loading"


def test_engines_that_know_salts() -> None:
    for engine, salted in ((EngineKind.VLLM, True), (EngineKind.SGLANG, True), (EngineKind.LLAMACPP, False)):
        replica = row(of=model("m", 1, profile(engine=engine)))
        made = table(SETTINGS, one(ShardState.READY, of=replica), {}, 5, Table())
        assert [e.salted for e in made.routes[0].endpoints] == [salted]
