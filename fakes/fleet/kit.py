"""The parts of which a run is made. A test puts a wrong one in and sees that it is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from llmgw.agent.epoch import Epoch, Kept
from llmgw.scheduler.state import ShardReport

from .shards import Shards
from .store import Disk, MemoryStore
from .wire import Wire

if TYPE_CHECKING:
    from .node import Node


@frozen
class Kit:
    """What makes the parts: an agent's shards, its rule of epochs, a control plane's store, and connections."""

    shards: Callable[[Node, Callable[[ShardReport], None]], Shards] = Shards
    epoch: Callable[[Kept], Epoch] = Epoch
    store: Callable[[Disk, random.Random], MemoryStore] = MemoryStore
    agent_end: Callable[[Wire], trio.abc.Stream] = lambda wire: wire.agent_end
