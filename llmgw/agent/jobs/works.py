"""What is run for each kind of job on this node."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import orjson

from llmgw.agent.jobs import fetch_child, install_child
from llmgw.agent.jobs.child import Work
from llmgw.agent.jobs.fetch_task import FetchTask
from llmgw.agent.jobs.installs import Installs
from llmgw.agent.process import environment
from llmgw.errors import OperatorError
from llmgw.scheduler.jobs import Fetch, Install, JobSpec
from llmgw.settings.daemon import AgentConfig
from llmgw.settings.sources import hub_source
from llmgw.store.files import write_private

_CANCEL_S = 2.0
_TIMEOUT_S = 30
_TOP = str(Path(fetch_child.__file__).parents[3])
_NOT_INHERITED = ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_HUB_CACHE")


class NodeWorks:
    """:class:`llmgw.agent.jobs.runner.Works` of a node with this configuration. ``installed`` is called, in a thread,
    after an engine was."""

    def __init__(
        self, config: AgentConfig, installs: Installs | None = None, installed: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._installs = installs or Installs(config)
        self._installed = installed

    def work(self, spec: JobSpec, folder: Path) -> Work:
        """What to run. Raises :class:`OperatorError`. Blocking."""
        if spec.fetch is not None:
            return self._fetch(spec.fetch, folder)
        if spec.install is not None:
            return self._install(spec.install, folder)
        raise OperatorError(f"job {spec.id}", "says nothing that this agent could do", "upgrade the agent")

    def finish(self, spec: JobSpec, result: dict[str, str]) -> dict[str, str]:
        """It went well; an engine that was installed is the one that shards start with from now on. Blocking."""
        if spec.install is not None:
            try:
                self._installs.switch(spec.install, result.get("version", ""))
            except OSError as failed:
                reason = f"is made, and cannot be switched to: {failed.strerror}"
                raise OperatorError(result.get("path", ""), reason, "check the disk") from failed
            self._installed()
        return result

    def _install(self, install: Install, folder: Path) -> Work:
        path = folder / "task.json"
        write_private(path, orjson.dumps(attrs.asdict(self._installs.task(install))))
        env = {k: v for k, v in environment(os.environ).items() if k not in _NOT_INHERITED}
        env |= {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_"))} | {"PYTHONPATH": _TOP}
        return Work((sys.executable, "-P", "-m", install_child.__name__, str(path)), env)

    def _fetch(self, fetch: Fetch, folder: Path) -> Work:
        source = hub_source(fetch.weights)
        if source is None:
            raise OperatorError(f"weights {fetch.weights}", "are nothing that is fetched", "name hf:org/name@revision")
        store = self._config.weights
        task = FetchTask(
            repository=source.repository,
            revision=source.revision,
            file=source.file,
            cache=self._config.weights_cache,
            endpoint=fetch.mirror,
            offline=fetch.offline,
            update=fetch.update,
            token_file=store.token_file,
            reserve=int(store.reserve_gib * 1024**3),
        )
        path = folder / "task.json"
        write_private(path, orjson.dumps(attrs.asdict(task)))
        env = {k: v for k, v in environment(os.environ).items() if k not in _NOT_INHERITED}
        env |= {
            "PYTHONPATH": _TOP,
            "HF_HOME": f"{self._config.weights_cache}/.llmgw/home",
            "HF_HUB_CACHE": self._config.weights_cache,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": str(_TIMEOUT_S),
            "HF_HUB_ETAG_TIMEOUT": str(_TIMEOUT_S),
        }
        if fetch.mirror:
            env["HF_HUB_DISABLE_XET"] = "1"  # its storage is not what a mirror mirrors
        return Work((sys.executable, "-P", "-m", fetch_child.__name__, str(path)), env, grace_s=_CANCEL_S)
