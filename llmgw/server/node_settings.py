"""What each node's agent is to run on, and what it said of it. Pure."""

from __future__ import annotations

from attrs import evolve

from llmgw.link.messages import SettingsApplied
from llmgw.settings.agent_part import NodeSettings, SettingsSaid, node_settings
from llmgw.settings.document import Settings


class NodeSettingsBook:
    """Every node's settings, of one revision of the document; worked out once for each that has some of its own."""

    def __init__(self, settings: Settings, revision: int) -> None:
        self.revision = revision
        self._settings = settings
        self._others = node_settings(settings, "", revision)
        self._own: dict[str, NodeSettings] = {}

    def of(self, node: str) -> NodeSettings:
        """What this node is to have."""
        if node not in self._settings.agents.nodes:
            return self._others
        if node not in self._own:
            self._own[node] = node_settings(self._settings, node, self.revision)
        return self._own[node]


def registered(before: SettingsSaid, revision: int) -> SettingsSaid:
    """What is known of a node that registered and runs on this revision; the digest comes with its next answer."""
    digest = before.digest if revision == before.revision else ""
    return SettingsSaid(revision, digest, before.refused_digest, before.refused)


def applied(before: SettingsSaid, message: SettingsApplied) -> SettingsSaid:
    """What is known of it after an answer."""
    if message.refused:
        return evolve(before, refused_digest=message.digest, refused=message.refused, ignored=False)
    return SettingsSaid(message.revision, message.digest)
