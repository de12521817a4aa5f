"""The reconcile loop: take a picture, decide, write it down, and send what follows.

A pass never waits for a node. What a node does comes back as reports, and those wake the next pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import trio
from attrs import evolve

from llmgw.errors import OperatorError
from llmgw.link.messages import DrainShard, ForgetShard, ShardCommand, StartShard, StopShard
from llmgw.router.table import Table
from llmgw.scheduler.brake import HELD, Brake
from llmgw.scheduler.decide import decide
from llmgw.scheduler.explain import Command, Decision, DecisionKind, DrainCommand, Outcome, StartCommand, StopCommand
from llmgw.scheduler.liveness import next_change
from llmgw.scheduler.scale import Scale
from llmgw.scheduler.state import ClusterState, NodeState
from llmgw.scheduler.summary import model_views
from llmgw.server.agents import Agents
from llmgw.server.cluster import Cluster
from llmgw.server.registry import table
from llmgw.settings.digest import profile_digest
from llmgw.settings.document import NOTHING_FETCHED, WeightsRules
from llmgw.store.api import PassRecord, Store
from llmgw.telemetry.logging import logger
from llmgw.telemetry.metrics import ControlPlaneMetrics

TICK_S = 5.0
"""A pass is made this often though nothing woke the loop."""

_STORE_RETRY_S = 2.0

_PAUSE_A_NODE_S = 0.0001
"""How long after a pass the next one waits, for each node (seconds). A pass takes some 10 µs a node: so a thousand
agents that register within seconds have a tenth of the time spent on passes, and not a pass over all of them each."""


def messages(
    commands: Iterable[Command], cluster: str, epoch: int, weights: WeightsRules = NOTHING_FETCHED
) -> dict[str, list[ShardCommand]]:
    """The messages that carry out these commands, by node.

    A command's id says all that makes it what it is, so that the same command of a later pass is known.
    """
    by_node: dict[str, list[ShardCommand]] = defaultdict(list)
    for command in commands:
        match command:
            case StartCommand(replica, place, rendezvous, addresses, hold):
                by_node[place.node].append(
                    StartShard(
                        command=f"{place.shard}#{replica.generation}:{'hold' if hold else 'start'}",
                        epoch=epoch,
                        cluster=cluster,
                        replica=replica.id,
                        shard=place.shard,
                        generation=replica.generation,
                        rank=place.rank,
                        model=replica.model,
                        profile=replica.profile,
                        profile_digest=profile_digest(replica.model, replica.profile),
                        devices=place.devices,
                        uuids=place.uuids,
                        fabric=replica.fabric,
                        rendezvous=rendezvous,
                        addresses=addresses,
                        weights=weights,
                        hold=hold,
                    )
                )
            case DrainCommand(node=node, shard=shard, generation=generation, reason=reason):
                by_node[node].append(DrainShard(f"{shard}#{generation}:drain", epoch, shard, generation, reason))
            case StopCommand(node=node, shard=shard, generation=generation, reason=reason, grace_s=grace_s):
                by_node[node].append(StopShard(f"{shard}#{generation}:stop", epoch, shard, generation, reason, grace_s))
    return by_node


def forgets(state: ClusterState, outcome: Outcome, epoch: int) -> dict[str, list[ShardCommand]]:
    """What connected nodes may drop: ended shards of this cluster that no row of the outcome counts on."""
    wanted = {(s.node, s.shard, r.generation) for r in outcome.replicas for s in r.shards}
    by_node: dict[str, list[ShardCommand]] = defaultdict(list)
    for node in state.nodes:
        if node.state is not NodeState.CONNECTED:
            continue
        for report in node.reports:
            ours = report.cluster == state.cluster
            if ours and report.state.ended and (node.id, report.shard, report.generation) not in wanted:
                name = f"{report.shard}#{report.generation}:forget"
                by_node[node.id].append(ForgetShard(name, epoch, report.shard, report.generation))
    return by_node


def _numbers(scales: Mapping[str, Scale]) -> dict[str, int]:
    """What has to be remembered of them; since when the load asks for what is counted anew after a restart."""
    return {model: found.number for model, found in scales.items()}


class Reconciler:
    """Owns the loop; a pass is made every ``tick_s``. ``wake`` may be called from anywhere in the same Trio run."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        agents: Agents,
        push: Callable[[Table], None],
        clock: Callable[[], float],
        metrics: ControlPlaneMetrics,
        created: int,
        tick_s: float = TICK_S,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._agents = agents
        self._push = push
        self._clock = clock
        self._metrics = metrics
        self._created = created
        self._tick_s = tick_s
        self._woken = trio.Event()
        self._table = Table()
        self._decided: tuple[Decision, ...] = ()
        self._brake: Brake | None = None
        self._log = logger("reconcile")

    def wake(self) -> None:
        """Run a pass soon."""
        self._woken.set()

    async def run(self) -> None:
        """Pass after pass until cancelled; a cancelled pass was either written whole or not at all."""
        while True:
            self._woken = trio.Event()
            again_at = await self._pass()
            await trio.sleep(self._cluster.size * _PAUSE_A_NODE_S)
            with trio.move_on_after(max(0.0, again_at - self._clock())):
                await self._woken.wait()

    async def _pass(self) -> float:
        """One pass; returns when the next one is due even if nothing wakes it."""
        now = self._clock()
        # First: what is to be placed waits for the answers of those that are asked.
        self._agents.ask_for_weights()
        tell_again_s = self._agents.tell_settings()
        state = self._cluster.state(now)
        outcome = decide(state, now)
        self._say_nodes(state, held=outcome.brake is not None)
        # A pass that repeats a decision because its effect is not reported yet decides nothing new.
        decided = outcome.decisions
        fresh = tuple(d for d in decided if d not in self._decided)
        outcome = evolve(outcome, decisions=(*self._brake_decision(outcome), *fresh))
        changed = (
            outcome.replicas != state.replicas
            or outcome.next_serial != state.next_serial
            or outcome.unplaced != self._cluster.unplaced
            or bool(outcome.decisions)
            or bool(outcome.over)
            or _numbers(outcome.scales) != _numbers(self._cluster.scales)
        )
        if changed:
            record = PassRecord(
                epoch=self._cluster.epoch,
                at=now,
                replicas=outcome.replicas,
                next_serial=outcome.next_serial,
                decisions=outcome.decisions,
                unplaced=outcome.unplaced,
                scales=outcome.scales,
                over=outcome.over,
            )
            try:
                number = await self._store.save_pass(record)
            except OperatorError as failed:
                self._log.error("pass not carried out: it could not be stored", error=str(failed))
                self._cluster.stuck = f"nothing is decided: {failed.thing}: {failed.reason}"
                self._publish(now)  # what serves by the rows that hold is still routed
                return self._clock() + _STORE_RETRY_S
            self._say(number, outcome)
        self._cluster.stuck = ""
        self._decided, self._brake = decided, outcome.brake
        self._cluster.apply(outcome)
        self._publish(now, state if not changed and outcome.scales == state.scales else None)
        for by_node in (
            messages(outcome.commands, self._cluster.id, self._cluster.epoch, self._cluster.settings.weights),
            forgets(state, outcome, self._cluster.epoch),
        ):
            for name, commands in by_node.items():
                self._agents.dispatch(name, commands)
        due = [now + self._tick_s, now + tell_again_s]
        if outcome.wake_at is not None:
            due.append(outcome.wake_at)
        liveness = self._cluster.settings.liveness
        changes = (next_change(self._cluster.silent_since(node.heard), now, liveness) for node in state.nodes)
        due.extend(at for at in changes if at is not None)
        self._metrics.observe_pass(self._clock() - now, state, outcome)
        return max(min(due), now + 0.05)

    def _publish(self, now: float, state: ClusterState | None = None) -> None:
        """Push what follows from ``state``, or from a new picture where that one may not hold any more."""
        state = state or self._cluster.state(now)
        views = {view.name: view for view in model_views(state, self._cluster.unplaced, now)}
        new = table(self._cluster.settings, state, views, self._created, self._table)
        if new is not self._table:
            self._table = new
            self._push(new)

    def _say_nodes(self, state: ClusterState, *, held: bool) -> None:
        for change in self._cluster.changes(state):
            write = self._log.info if change.node.state is NodeState.CONNECTED else self._log.warning
            write(
                "node",
                node=change.node.id,
                state=change.node.state.value,
                before=change.before.value if change.before else None,
                reason=change.node.reason,
                next=HELD if held and change.node.state is not NodeState.CONNECTED else change.node.next,
            )

    def _brake_decision(self, outcome: Outcome) -> tuple[Decision, ...]:
        """That the brake went on or off, said once and stored with the pass, for each of the nodes that it held for."""
        now, before = outcome.brake, self._brake
        if now is not None and before is None:
            self._log.error(now.reason)
            return (Decision(DecisionKind.BRAKE, "", "", "", now.reason, now.nodes),)
        if now is None and before is not None:
            self._log.warning("the brake is off")
            reason = "the brake is off: what is still silent may be replaced"
            return (Decision(DecisionKind.BRAKE, "", "", "", reason, before.nodes),)
        return ()

    def _say(self, number: int, outcome: Outcome) -> None:
        for decision in outcome.decisions:
            self._log.info(
                "decision",
                number=number,
                kind=decision.kind.value,
                model=decision.model,
                replica=decision.replica,
                node=decision.node,
                reason=decision.reason,
            )
        if outcome.unplaced != self._cluster.unplaced:
            for unplaced in outcome.unplaced:
                self._log.warning("unplaced", model=unplaced.model, reason=unplaced.reason)
