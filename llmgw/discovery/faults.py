"""Why hardware could not be read: one error type, whatever the source."""

from __future__ import annotations

from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Fault


class DiscoveryError(OperatorError):
    """A source could not be read. ``code`` is stable: ``driver-missing``, ``driver-mismatch``, ``malformed``, …"""

    def __init__(self, code: str, thing: str, reason: str, remedy: str = "") -> None:
        super().__init__(thing, reason, remedy)
        self.code = code

    def as_fault(self) -> Fault:
        """The same as a warning in the inventory."""
        return Fault(self.code, f"{self.thing}: {self.reason}", self.remedy)
