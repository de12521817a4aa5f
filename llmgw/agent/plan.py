"""What an agent runs on: its file and its settings, and which of those that there are. Pure.

New settings are on trial until the agent has been up on them for a while. Those that do not load beside the file are
refused without a try, those that it does not come up on after one, those that end the process after :data:`MOST_TRIES`.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from llmgw.agent.kept import Kept
from llmgw.agent.own_file import Written
from llmgw.errors import OperatorError
from llmgw.link.messages import SettingsApplied
from llmgw.settings.agent_part import NodeSettings, beside, in_words
from llmgw.settings.daemon import AgentConfig
from llmgw.settings.load_agent import agent_of

MOST_TRIES = 3
"""Starts on settings that the process did not survive, before they are given up."""

Usable = Callable[[AgentConfig], None]
"""Raises :class:`OperatorError` when this machine lacks what a configuration needs to start."""


@frozen
class Plan:
    """What one agent runs on. With ``trial`` its settings have yet to be seen to work."""

    written: Written
    config: AgentConfig
    settings: NodeSettings | None = None
    trial: bool = False

    @property
    def revision(self) -> int:
        """That of its settings; 0 without any."""
        return 0 if self.settings is None else self.settings.revision


@frozen
class Stay:
    """The agent goes on as it is: what is to be kept, and what is said of the settings that were offered."""

    plan: Plan
    kept: Kept
    said: SettingsApplied


@frozen
class Take:
    """The agent starts again, on this plan, once this is kept."""

    plan: Plan
    kept: Kept


def first_plans(written: Written, kept: Kept) -> tuple[tuple[Plan, ...], Kept]:
    """What to start with, what to do if that fails, and so on; the last is the file alone. And what is to be kept.

    Raises :class:`OperatorError` when the file does not load: it has to say what an agent needs to start.
    """
    alone = Plan(written, agent_of(written.document, written.folder))
    plans: list[Plan] = []
    if (trial := kept.trial) is not None:
        if kept.tries >= MOST_TRIES:
            reason = f"the agent ended {kept.tries} times while it started on them or soon after"
            kept = kept.refusing(trial, reason, tried=True)
        else:
            try:
                plans.append(_beside(written, trial, trial=True))
            except OperatorError as wrong:
                kept = kept.refusing(trial, in_words(wrong), tried=False)
    if (used := kept.used) is not None:
        try:
            plans.append(_beside(written, used, trial=False))
        except OperatorError as wrong:
            kept = kept.refusing(used, in_words(wrong), tried=False)
    return (*plans, alone), kept


def _beside(written: Written, settings: NodeSettings | None, *, trial: bool) -> Plan:
    return Plan(written, beside(written.document, written.folder, settings), settings, trial)


def offered(plan: Plan, kept: Kept, offer: NodeSettings, usable: Usable) -> Stay | Take:
    """What becomes of settings that the control plane sent."""
    yes = SettingsApplied(offer.revision, offer.digest)
    if plan.settings is not None and plan.settings.digest == offer.digest:
        return Stay(evolve(plan, settings=offer), _holding(kept, plan, offer), yes)
    before = kept.refused
    if before is not None and before.tried and before.settings.digest == offer.digest:
        return Stay(plan, kept, evolve(yes, refused=before.reason))
    try:
        new = _beside(plan.written, offer, trial=True)
        if new.config == plan.config:
            return Stay(evolve(plan, settings=offer), _holding(kept, plan, offer), yes)
        usable(new.config)
    except OperatorError as wrong:
        reason = in_words(wrong)
        return Stay(plan, kept.refusing(offer, reason, tried=False), evolve(yes, refused=reason))
    return Take(new, evolve(kept, trial=offer, tries=1, refused=None))


def _holding(kept: Kept, plan: Plan, settings: NodeSettings) -> Kept:
    """What is kept when the plan's settings are these, and no others are waited for."""
    made = evolve(kept, refused=None)
    return evolve(made, trial=settings) if plan.trial else evolve(made, used=settings, trial=None, tries=0)


def edited(plan: Plan, written: Written, usable: Usable) -> Plan:
    """The plan with another ``agent.yaml``. Raises :class:`OperatorError` when nothing can be started on it."""
    alone = agent_of(written.document, written.folder)
    if alone.state_dir != plan.config.state_dir:
        raise OperatorError(
            f"{written.document.file}: state_dir",
            f"is {alone.state_dir}, and this agent keeps its engines in {plan.config.state_dir}",
            "stop the agent and its engines (llmgw agent stop-engines) before you move it",
        )
    new = evolve(plan, written=written, config=beside(written.document, written.folder, plan.settings))
    if new.config != plan.config:
        usable(new.config)
    return new
