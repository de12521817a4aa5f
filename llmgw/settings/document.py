"""The settings document: everything that the cluster as a whole is told."""

from __future__ import annotations

from attrs import frozen

from llmgw.settings.catalog import Model


@frozen
class Liveness:
    """When a silent node stops counting as there, in seconds since its last heartbeat.

    ``heartbeat_s`` is how often agents send one; at ``unreachable_s`` nothing new is placed on the node; at
    ``lost_s`` its replicas are placed elsewhere.
    """

    heartbeat_s: float = 5.0
    unreachable_s: float = 15.0
    lost_s: float = 60.0


@frozen
class RouterSettings:
    """How the router treats requests. Times in seconds, sizes in bytes."""

    max_body_bytes: int = 8 * 1024 * 1024
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0


@frozen
class Settings:
    """The whole document. ``models`` keeps the order in which the operator wrote them."""

    models: tuple[Model, ...] = ()
    router: RouterSettings = RouterSettings()
    liveness: Liveness = Liveness()

    def model(self, name: str) -> Model | None:
        """The model of this name, if the catalog has it."""
        return next((m for m in self.models if m.name == name), None)

    @property
    def needs_control_plane(self) -> bool:
        """Whether any model declares a profile; without one ``llmgw server`` is only a router."""
        return any(m.profiles for m in self.models)
