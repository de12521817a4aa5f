"""The parts of which a run is made. A test puts a wrong one in and sees that it is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from llmgw.agent.epoch import Epoch, Kept
from llmgw.scheduler.state import ShardReport
from llmgw.settings.document import Settings

from .shards import Shards
from .store import Disk, MemoryStore
from .traffic import Traffic
from .wire import Wire

if TYPE_CHECKING:
    from .node import Node
    from .world import World


@frozen
class Kit:
    """What makes the parts: an agent's shards, its rule of epochs, a control plane's store, and connections.

    ``traffic`` is what the router tells; ``read`` is what a control plane takes the settings for.
    """

    shards: Callable[[Node, Callable[[ShardReport], None]], Shards] = Shards
    epoch: Callable[[Kept], Epoch] = Epoch
    store: Callable[[Disk, random.Random], MemoryStore] = MemoryStore
    traffic: Callable[[World], Traffic] = Traffic
    read: Callable[[Settings], Settings] = lambda settings: settings
    agent_end: Callable[[Wire], trio.abc.Stream] = lambda wire: wire.agent_end
