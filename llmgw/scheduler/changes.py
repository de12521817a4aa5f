"""What is under way for a model besides its replicas coming up: edited profiles that take over, or were taken back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmgw.scheduler.state import ClusterState, Goal, Replica
from llmgw.settings.catalog import Model
from llmgw.settings.digest import profile_digest


def changes(state: ClusterState, model: Model) -> tuple[str, ...]:
    """A sentence for each replica of the model that is on its way from one profile or node to another."""
    rows = {row.id: row for row in state.replicas if row.model == model.name}
    return tuple(_changes(model, rows))


def taken_back(model: Model, rows: Iterable[Replica]) -> tuple[str, ...]:
    """The names of the model's profiles that did not come up as they are in the catalog, and that nobody tries."""
    rejected = {row.rejected for row in rows if row.rejected}
    return tuple(p.name for p in model.profiles if rejected and profile_digest(model.name, p) in rejected)


def _changes(model: Model, rows: dict[str, Replica]) -> Iterator[str]:
    refused = taken_back(model, rows.values())
    for row in rows.values():
        catalog = model.profile(row.profile.name)
        if row.superseded_by is not None and row.goal is Goal.RUN:
            yield f"{row.id} serves until {row.superseded_by} is ready, which replaces it"
        elif row.goal is not Goal.RUN and row.other == row.profile:
            yield f"{row.id} ends and starts anew where it is: {row.reason}"
        elif row.goal is not Goal.RUN and row.other is not None:
            yield f"{row.id} gives its devices up for profile {row.other.name}: {row.reason}"
        elif row.goal is Goal.RUN and not row.shards:
            yield f"{row.id} gave its devices up and waits for a place with profile {row.profile.name}: {row.reason}"
        elif row.goal is Goal.RUN and catalog is not None and catalog != row.profile and catalog.name in refused:
            tail = "it is tried again once it is edited"
            yield f"{row.id} keeps the profile from before the edit, which did not come up; {tail}"
        elif row.goal is Goal.RUN and row.rejected and catalog != row.profile:
            tail = "it was edited since and is tried again"
            yield f"{row.id} keeps the profile from before the edit, which did not come up; {tail}"
        elif row.goal is Goal.RUN and catalog is None:
            yield f"{row.id} runs profile {row.profile.name}, which the catalog no longer has; it is replaced next"
        elif row.goal is Goal.RUN and catalog != row.profile:
            yield f"{row.id} runs profile {row.profile.name} as it was before its edit; it is replaced in its turn"
