"""Commands of the control plane: each is done once, refused with a reason, or known to be done already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from llmgw.agent.epoch import Epoch
from llmgw.agent.shards import Shards
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Inventory
from llmgw.link.messages import CommandResult, DrainShard, ForgetShard, ShardCommand, StartShard, StopShard
from llmgw.telemetry.logging import logger

_REMEMBERED = 1000


class Dispatch:
    """Carries commands out. ``inventory`` is asked for the hardware as it is now."""

    def __init__(self, shards: Shards, epoch: Epoch, inventory: Callable[[], Inventory]) -> None:
        self._shards = shards
        self._epoch = epoch
        self._inventory = inventory
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._log = logger("dispatch")

    async def run(self, command: ShardCommand) -> CommandResult:
        """Do one command and say how that went. Never raises for what a command asks."""
        if (known := self._results.get(command.command)) is not None:
            return known
        try:
            admitted = await trio.to_thread.run_sync(self._epoch.admit, command.epoch)
        except OperatorError as failed:
            return CommandResult(command.command, False, f"{failed.thing}: {failed.reason}", failed.remedy)
        if not admitted:
            reason = f"epoch {command.epoch} is over, {self._epoch.highest} was seen"
            return CommandResult(command.command, False, reason, "only the newest control plane is obeyed")
        try:
            await self._carry_out(command)
            result = CommandResult(command.command, True)
        except OperatorError as refused:
            self._log.warning("command refused", command=command.command, reason=str(refused))
            result = CommandResult(command.command, False, f"{refused.thing}: {refused.reason}", refused.remedy)
        self._results[command.command] = result
        while len(self._results) > _REMEMBERED:
            self._results.popitem(last=False)
        return result

    async def _carry_out(self, command: ShardCommand) -> None:
        supervisor = self._shards.find(command.shard, command.generation)
        match command:
            case StartShard():
                if supervisor is None:
                    await self._shards.start(command, self._inventory())
            case DrainShard(reason=reason):
                if supervisor is not None:
                    supervisor.drain(reason)
            case StopShard(reason=reason, grace_s=grace_s):
                # One that is not here has been stopped already, or never came about: nothing is left to do.
                if supervisor is not None:
                    supervisor.stop(reason, grace_s)
            case ForgetShard():
                await self._shards.forget(command.shard, command.generation)
