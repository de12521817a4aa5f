"""The errors that people see: each names the thing, the reason and what to do about it."""

from __future__ import annotations


class LlmgwError(Exception):
    """Parent of every error that this project raises on purpose.

    ``thing`` is what it concerns (a file, a node, a model), ``reason`` one sentence of what is wrong with
    it, ``remedy`` one sentence of what to do; an empty remedy means that nothing needs doing.
    """

    def __init__(self, thing: str, reason: str, remedy: str = "") -> None:
        super().__init__(thing, reason, remedy)
        self.thing = thing
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.thing}: {self.reason}"
        return f"{text}. {self.remedy}" if self.remedy else text


class OperatorError(LlmgwError):
    """Something that the operator wrote, or the machine they gave us, cannot work as it is."""


class PeerError(LlmgwError):
    """The other end of a connection did something wrong, or went away."""


class BugError(LlmgwError):
    """A promise inside llmgw was broken; the daemon that sees it should stop and say so."""
