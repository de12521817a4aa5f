"""Cluster states for the scheduler's tests: small builders, and Hypothesis strategies over whole states."""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st

from llmgw.hardware.inventory import (
    AdapterKind,
    Device,
    DeviceProcess,
    Fabric,
    FabricPort,
    Fault,
    Host,
    Inventory,
)
from llmgw.scheduler.memory import Learned
from llmgw.scheduler.state import (
    Assignment,
    ClusterState,
    Exit,
    Goal,
    Node,
    NodeState,
    Replica,
    ShardReport,
    ShardState,
)
from llmgw.settings.catalog import EngineKind, Model, Profile
from llmgw.settings.daemon import Address
from llmgw.settings.digest import profile_digest
from llmgw.settings.weight_facts import WeightFacts

NOW = 1_000_000.0
CLUSTER = "c1"


def device(number: int, device_class: str = "h100-80g", *, fault: str = "", used_mib: int = 1) -> Device:
    return Device(
        number=number,
        uuid=f"GPU-{number}",
        name=device_class,
        device_class=device_class,
        total_mib=81559,
        used_mib=used_mib,
        processes=(DeviceProcess(4711, "python", used_mib),) if used_mib > 100 else (),
        faults=(Fault("ecc-uncorrected", fault),) if fault else (),
    )


def fabric(label: str = "rack-1", ports: int = 1, *, fault: str = "") -> Fabric:
    return Fabric(
        label,
        AdapterKind.INFINIBAND,
        tuple(FabricPort(f"mlx5_{n}", 1) for n in range(ports)),
        (Fault("port-down", fault),) if fault else (),
    )


def node(
    name: str = "n1",
    devices: tuple[Device, ...] = (device(0), device(1)),
    *,
    state: NodeState = NodeState.CONNECTED,
    engines: tuple[EngineKind, ...] = (EngineKind.VLLM,),
    reports: tuple[ShardReport, ...] = (),
    domains: tuple[tuple[int, ...], ...] = (),
    fabrics: tuple[Fabric, ...] = (),
) -> Node:
    inventory = Inventory(Host(name, "boot"), "nvidia-smi", devices, nvlink_domains=domains, fabrics=fabrics)
    return Node(name, state, NOW - 100, "", "", "10.0.0.1", inventory, engines, reports)


def profile(name: str = "p", gpus: int = 1, classes: tuple[str, ...] = ("h100-80g",), **more: object) -> Profile:
    made = Profile(name, EngineKind.VLLM, "/w", classes, gpus=gpus, tp=gpus)
    return evolve(made, **more)


def model(name: str = "m", replicas: int = 1, *profiles: Profile) -> Model:
    return Model(name, profiles or (profile(),), replicas)


def row(
    serial: int = 1,
    on: str = "n1",
    devices: tuple[int, ...] = (0,),
    *,
    of: Model | None = None,
    goal: Goal = Goal.RUN,
    **more: object,
) -> Replica:
    of = of or model()
    name = f"{of.name}-{serial}"
    made = Replica(name, of.name, of.profiles[0], (Assignment(f"{name}.0", 0, on, devices),), goal, "r", NOW - 50)
    return evolve(made, **more)


def wide(nodes: int = 2, gpus: int = 1, **more: object) -> Profile:
    """A profile over several nodes."""
    return profile("wide", gpus, nodes=nodes, tp=gpus * nodes, **more)


def report(
    of: Replica, state: ShardState, *, generation: int | None = None, cluster: str = CLUSTER, rank: int = 0
) -> ShardReport:
    place = of.shards[rank]
    return ShardReport(
        shard=place.shard,
        replica=of.id,
        generation=of.generation if generation is None else generation,
        model=of.model,
        rank=rank,
        cluster=cluster,
        profile_digest="d",
        devices=place.devices,
        state=state,
        reason="killed by signal 9" if state is ShardState.FAILED else "because",
        next="",
        since=NOW - 10,
        pid=42,
        endpoint="http://10.0.0.1:20000" if rank == 0 else None,
        exit=Exit(signal=9) if state is ShardState.FAILED else None,
        rendezvous=Address("10.0.0.1", 20500) if rank == 0 and len(of.shards) > 1 else None,
    )


def cluster(
    nodes: tuple[Node, ...], models: tuple[Model, ...], replicas: tuple[Replica, ...] = (), **more: object
) -> ClusterState:
    state = ClusterState(CLUSTER, models, nodes, replicas, next_serial=100)
    return evolve(state, **more)


_CLASSES = ("h100-80g", "l40s-45g", "a100-80g-mig-3g.40gb")


@st.composite
def devices(draw: st.DrawFn) -> tuple[Device, ...]:
    count = draw(st.integers(0, 6))
    return tuple(
        device(
            n,
            draw(st.sampled_from(_CLASSES)),
            fault=draw(st.sampled_from(("", "", "", "has 2 uncorrected ECC errors"))),
            used_mib=draw(st.sampled_from((0, 0, 0, 11_000))),
        )
        for n in range(count)
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, ...]:
    names = draw(st.lists(st.sampled_from(("a", "b", "c/d")), unique=True, max_size=3))
    made = []
    for name in names:
        profiles = []
        for index in range(draw(st.integers(1, 2))):
            classes = tuple(draw(st.lists(st.sampled_from(_CLASSES), unique=True, min_size=1, max_size=2)))
            mig = any("-mig-" in c for c in classes)
            gpus = 1 if mig else draw(st.integers(1, 3))
            count = 1 if mig else draw(st.sampled_from((1, 1, 2)))
            profiles.append(profile(f"p{index}", gpus, classes, nodes=count, tp=gpus * count))
        made.append(Model(name, tuple(profiles), draw(st.integers(0, 3))))
    return tuple(made)


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    """Any state at all: stale rows, contradictory reports, nodes that were never heard of."""
    catalog = draw(models())
    known = catalog or (model("a"),)
    replicas = []
    for serial in draw(st.lists(st.integers(1, 9), unique=True, max_size=4)):
        of = draw(st.sampled_from(known))
        places = draw(st.lists(st.sampled_from(("n0", "n1", "gone")), unique=True, min_size=1, max_size=2))
        replicas.append(
            evolve(
                row(serial, of=of),
                shards=tuple(
                    Assignment(
                        f"{of.name.replace('/', '-')}-{serial}.{rank}",
                        rank,
                        place,
                        tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3)))),
                    )
                    for rank, place in enumerate(places)
                ),
                id=f"{of.name.replace('/', '-')}-{serial}",
                model=draw(st.sampled_from((of.name, "left"))),
                goal=draw(st.sampled_from(Goal)),
                generation=draw(st.integers(1, 3)),
                failures=draw(st.integers(0, 20)),
                not_before=NOW + draw(st.sampled_from((-100.0, 0.0, 30.0))),
                since=NOW - draw(st.sampled_from((0.0, 0.5, 5.0, 5000.0))),
                superseded_by=draw(st.sampled_from((None, None, "a-1", "nobody"))),
            )
        )
    nodes = []
    for name in ("n0", "n1", "n2")[: draw(st.integers(0, 3))]:
        reports = []
        for of_row in replicas:
            if draw(st.booleans()):
                state = draw(st.sampled_from(ShardState))
                reports.append(
                    report(
                        of_row,
                        state,
                        generation=draw(st.integers(1, 3)),
                        cluster=draw(st.sampled_from((CLUSTER, CLUSTER, "other"))),
                        rank=draw(st.integers(0, len(of_row.shards) - 1)),
                    )
                )
        made = node(
            name,
            draw(devices()),
            state=draw(st.sampled_from(NodeState)),
            engines=draw(st.sampled_from(((EngineKind.VLLM,), ()))),
            reports=tuple(reports),
            domains=draw(st.sampled_from(((), ((0, 1), (2, 3, 4, 5))))),
            fabrics=draw(
                st.sampled_from(
                    ((), (fabric(),), (fabric(), fabric("rack-2", 2)), (fabric("rack-2"),), (fabric(fault="x"),))
                )
            ),
        )
        nodes.append(
            evolve(
                made,
                weights=tuple(
                    WeightFacts("/w", 10**9 * draw(st.sampled_from((1, 50, 500))), "f")
                    for _ in range(draw(st.integers(0, 1)))
                ),
                looking=draw(st.sampled_from((frozenset(), frozenset(), frozenset({"/w"})))),
            )
        )
    learned = {
        (profile_digest(m.name, p), c)
        for m in catalog
        for p in m.profiles
        for c in p.device_class
        if draw(st.booleans())
    }
    flights = {s.shard: draw(st.integers(0, 2)) for r in replicas for s in r.shards if draw(st.booleans())}
    ran = tuple(Learned(digest, name, draw(st.integers(1, 90_000)), NOW) for digest, name in sorted(learned))
    return cluster(tuple(nodes), catalog, tuple(replicas), in_flight=flights, learned=ran)
