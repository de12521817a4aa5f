"""One agent after the other in one process: on other settings or another ``agent.yaml``, engines serving throughout.

The process, its lock on the state folder and its signals stay; everything else of the agent ends as on SIGTERM and
starts as the next agent would. One that does not come up, or fails before it is :data:`PROVEN_S` old, is followed by
one on what worked before, and the control plane is told why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import trio
from attrs import evolve, frozen

from llmgw.agent.kept import Kept, KeptFile
from llmgw.agent.offers import Answer, Offers
from llmgw.agent.own_file import OwnFile
from llmgw.agent.plan import Plan, Stay, Take, Usable, edited, first_plans, offered
from llmgw.agent.systemd import reloading
from llmgw.errors import LlmgwError, OperatorError, leaves
from llmgw.link.messages import SettingsApplied
from llmgw.settings.agent_part import NodeSettings, in_words, set_by_both
from llmgw.settings.daemon import AgentConfig
from llmgw.telemetry.logging import logger

PROVEN_S = 30.0
"""An agent that has been up for so long works."""

_COME_UP_S = 60.0
"""What is new must be up within this time."""

_POLL_S = 1.0
_ASIDE_S = 5.0

_Kind = TypeVar("_Kind")


class Life(Protocol):
    """All that an agent is, until it is cancelled; started once it is up."""

    async def __call__(
        self, config: AgentConfig, offers: Offers, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None: ...


@frozen
class _Failed:
    """A plan that the agent did not come up on, what was new about it, and why."""

    plan: Plan
    settings: bool
    reason: str


class Turnover:
    """Owns what the agent runs on; to make one reads its files, and blocks for that.

    ``usable`` says what a machine lacks for a configuration. ``step`` is told the name of each thing that is done when
    the agent starts again. Raises :class:`OperatorError` when ``agent.yaml`` does not load.
    """

    def __init__(
        self,
        own: OwnFile,
        kept_file: KeptFile,
        life: Life,
        usable: Usable,
        step: Callable[[str], None] = lambda _: None,
        proven_s: float = PROVEN_S,
    ) -> None:
        self._own = own
        self._stamp = self._seen = own.stamp()
        self._kept_file = kept_file
        self._on_disk = kept_file.read()
        plans, kept = first_plans(own.read(), self._on_disk)
        self._plan, self._fallbacks = plans[0], list(plans[1:])
        self._proven = not self._plan.trial
        self._of_settings = True
        self._kept = evolve(kept, file="", tries=kept.tries + self._plan.trial)
        self._life = life
        self._usable = usable
        self._step = step
        self._proven_s = proven_s
        self._failed: list[_Failed] = []
        self._up = False
        self._offer: tuple[NodeSettings, Answer] | None = None
        self._last: tuple[NodeSettings, Answer] | None = None
        self._again = False
        self._woken = trio.Event()
        self._writing = trio.Lock()
        self._files, self._checks = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
        self._log = logger("settings")

    @property
    def revision(self) -> int:
        """That of the settings in force; 0 without any."""
        return self._plan.revision

    def offered(self, settings: NodeSettings, answer: Answer) -> None:
        """The control plane sent these."""
        self._offer = self._last = settings, answer
        self._woken.set()

    def look_again(self) -> None:
        """Read ``agent.yaml`` now, and try settings again that were refused."""
        self._again = True
        self._woken.set()

    async def run(self) -> None:
        """One agent after the other, until cancelled. Raises what ends one that has nothing to go back to."""
        await self._write(self._kept)
        while True:
            following = await self._one(self._plan)
            self._step("ended")
            self._plan = following

    async def _one(self, plan: Plan) -> Plan:
        """Be the agent on this plan until another one is to follow; returns that."""
        self._up, self._offer = False, None
        self._say(plan)
        self._step("starting")
        try:
            async with trio.open_nursery() as nursery:
                if self._proven:
                    await nursery.start(self._life, plan.config, self)
                else:
                    await self._start_in_time(nursery, plan)
                await self._came_up()
                if not self._proven:
                    nursery.start_soon(self._prove)
                following = await self._watch()
                self._step("ending")
                nursery.cancel_scope.cancel(reason="the agent starts again")
        except Exception as failed:
            # Whatever it is that a new configuration brings about, the old one is there to go back to.
            if not self._fallbacks or (self._up and self._proven):
                self._give_back()
                raise
            return self._going_back(plan, failed)
        return following

    async def _start_in_time(self, nursery: trio.Nursery, plan: Plan) -> None:
        try:
            with trio.fail_after(_COME_UP_S):
                await nursery.start(self._life, plan.config, self)
        except trio.TooSlowError as slow:
            raise OperatorError("the agent", f"did not come up on it within {_COME_UP_S:g} s") from slow

    def _say(self, plan: Plan) -> None:
        if keys := set_by_both(plan.written.document, plan.settings):
            said = "the settings stand in for keys of agent.yaml"
            self._log.info(said, revision=plan.revision, keys=list(keys))

    async def _came_up(self) -> None:
        self._up = True
        self._step("ready")
        kept = self._kept
        for failed in self._failed:
            if failed.settings and failed.plan.settings is not None:
                kept = kept.refusing(failed.plan.settings, failed.reason, tried=True)
            else:
                kept = evolve(kept, file=failed.reason)
        self._failed.clear()
        if self._proven:
            self._fallbacks.clear()
        async with self._writing:
            await self._write(kept)

    async def _prove(self) -> None:
        """What is new has worked for a while: from now on it is what to go back to."""
        await trio.sleep(self._proven_s)
        async with self._writing:
            if self._plan.trial:
                await self._write(evolve(self._kept, used=self._plan.settings, trial=None, tries=0))
            self._plan = evolve(self._plan, trial=False)
            self._proven = True
            self._fallbacks.clear()
        self._step("proven")

    async def _watch(self) -> Plan:
        """Wait for something that the agent has to start again for; returns what on."""
        while True:
            with trio.move_on_after(_POLL_S):
                await self._woken.wait()
            self._woken = trio.Event()
            again, self._again = self._again, False
            async with self._writing:
                if again:
                    await self._forget_refusal()
                following = await self._look_at_file(again=again) or await self._weigh()
                if following is not None:
                    reloading()
                    return following

    async def _forget_refusal(self) -> None:
        if self._kept.refused is not None:
            await self._write(evolve(self._kept, refused=None))
        if self._offer is None:
            self._offer = self._last

    async def _weigh(self) -> Plan | None:
        """Look at what the control plane sent last; returns what to start on if that is anything new."""
        if self._offer is None:
            return None
        (settings, answer), self._offer = self._offer, None
        found = await self._bounded(partial(offered, self._plan, self._kept, settings, self._usable), self._checks)
        no = SettingsApplied(settings.revision, settings.digest)
        match found:
            case None:
                answer(evolve(no, refused=f"what they name did not answer within {_ASIDE_S:g} s"))
            case Stay(plan, kept, said):
                if said.refused and self._kept.refused != kept.refused:
                    self._log.error("settings refused; the old ones stay", revision=said.revision, reason=said.refused)
                await self._write(kept)
                self._plan = plan
                answer(said)
            case Take(plan, kept):
                before = self._kept
                if failure := await self._write(kept):
                    self._kept = before
                    answer(evolve(no, refused=f"they cannot be kept on the node's disk: {failure}"))
                    return None
                self._step("written")
                self._log.info("the agent starts again on new settings", revision=settings.revision)
                self._take_over(of_settings=True)
                return plan
        return None

    async def _look_at_file(self, *, again: bool) -> Plan | None:
        """Read ``agent.yaml`` if it is another one; returns what to start on if that says anything new."""
        stamp = await self._bounded(self._own.stamp, self._files)
        if stamp != self._seen and not again:
            self._seen = stamp  # whoever writes it may not have done with it: it is read once it stays as it is
            return None
        if stamp == self._stamp and not again:
            return None
        self._stamp = self._seen = stamp
        try:
            new = await self._bounded(lambda: edited(self._plan, self._own.read(), self._usable), self._files)
        except OperatorError as wrong:
            await self._file_refused(str(wrong))
            return None
        if new is None:
            await self._file_refused(f"what it names did not answer within {_ASIDE_S:g} s")
            return None
        await self._write(evolve(self._kept, file=""))
        if new.config == self._plan.config:
            self._plan = new
            return None
        self._log.info("the agent starts again on another agent.yaml")
        self._take_over(of_settings=False)
        return new

    async def _file_refused(self, reason: str) -> None:
        self._log.error("agent.yaml as it is now is not used", reason=reason)
        await self._write(evolve(self._kept, file=reason))

    def _take_over(self, *, of_settings: bool) -> None:
        if self._proven:
            self._fallbacks = [self._plan]
        self._proven, self._of_settings = False, of_settings

    def _going_back(self, plan: Plan, failed: Exception) -> Plan:
        self._step("going back")
        reason = _in_words(failed)
        known = isinstance(failed, LlmgwError) or (
            isinstance(failed, ExceptionGroup) and all(isinstance(one, LlmgwError) for one in leaves(failed))
        )
        self._log.error(
            "the agent did not come up and goes back to what worked", revision=plan.revision, reason=reason,
            exc_info=None if known else failed,
        )  # fmt: skip
        self._failed.append(_Failed(plan, self._of_settings, reason))
        before = self._fallbacks.pop(0)
        if self._of_settings and before.written != plan.written:
            self._stamp = None  # the file is another one than that of what worked, and not to blame
        self._proven, self._of_settings = True, True
        return before

    def _give_back(self) -> None:
        """Nothing comes up, whatever it is on: that is not the fault of what was tried."""
        if self._failed:
            self.stopped(always=True)

    def stopped(self, *, always: bool = False) -> None:
        """The agent was stopped, and not by what it ran on: that start does not count. Blocking; after :meth:`run`."""
        if self._kept.trial is not None and (always or self._up):
            try:
                self._kept_file.write(evolve(self._kept, tries=0))
            except OSError as failed:
                self._log.warning("settings on trial are not written down", error=str(failed))

    async def _write(self, kept: Kept) -> str:
        """Keep it. Returns why it is not on the disk, empty if it is; then it is in memory, and written later."""
        self._kept = kept
        if kept == self._on_disk:
            await trio.lowlevel.checkpoint()
            return ""
        try:
            await trio.to_thread.run_sync(self._kept_file.write, kept)
        except OSError as failed:
            self._log.error("the settings are not written down", error=str(failed))
            return failed.strerror or str(failed)
        self._on_disk = kept
        return ""

    async def _bounded(self, work: Callable[[], _Kind], one: trio.CapacityLimiter) -> _Kind | None:
        """Something of the disk, in a thread that is left behind if it hangs; ``None`` then."""
        with trio.move_on_after(_ASIDE_S):
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=one)
        return None


def _in_words(failed: Exception) -> str:
    """What went wrong, in one line."""
    each = leaves(failed) if isinstance(failed, ExceptionGroup) else iter((failed,))
    return "; ".join(
        dict.fromkeys(in_words(e) if isinstance(e, OperatorError) else f"{type(e).__name__}: {e}" for e in each)
    )
