"""An agent that is offered settings as soon as it is up, as a control plane would, and dies where it is told.

    python -m tests.agent.taker AGENT_YAML SETTINGS POINT

Every step, and what became of the settings, is a line of standard output. At the step ``POINT`` it kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import trio

from llmgw.agent import main
from llmgw.agent.kept import KeptFile
from llmgw.agent.offers import Offers
from llmgw.agent.own_file import OwnFile
from llmgw.agent.turnover import Turnover
from llmgw.link.messages import SettingsApplied
from llmgw.settings.agent_part import NodeSettings, digest_of
from llmgw.settings.daemon import AgentConfig, Log, LogFormat
from llmgw.settings.load_agent import agent_of
from llmgw.store.folder import held
from llmgw.telemetry.logging import configure


def settings_of(part: object, revision: int = 2) -> NodeSettings:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return NodeSettings(revision, digest_of(text), text)


def _said(message: SettingsApplied) -> None:
    print("refused" if message.refused else "applied", message.revision, message.refused, flush=True)


def run(file: Path, settings: NodeSettings, point: str) -> None:
    def step(name: str) -> None:
        print(name, flush=True)
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    async def life(
        config: AgentConfig, offers: Offers, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        if config.weights.reserve_gib == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        async with trio.open_nursery() as nursery:
            await nursery.start(main._life, config, offers)
            task_status.started()
            offers.offered(settings, _said)

    own = OwnFile(file)
    written = own.read()
    config = agent_of(written.document, written.folder)
    configure(Log(format=LogFormat.JSON), "agent")
    with held(Path(config.state_dir), "agent"):
        turnover = Turnover(own, KeptFile(Path(config.state_dir)), life, main.usable, step)
        trio.run(main._main, turnover, strict_exception_groups=True)
        turnover.stopped()


if __name__ == "__main__":
    run(Path(sys.argv[1]), settings_of(json.loads(sys.argv[2])), sys.argv[3])
