"""The errors that people see: each names the thing, the reason and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


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
        end = "" if text.endswith(("?", "!", ".")) else "."
        return f"{text}{end} {self.remedy}" if self.remedy else text


class OperatorError(LlmgwError):
    """Something that the operator wrote, or the machine they gave us, cannot work as it is."""


class UnknownError(OperatorError):
    """What was named is not there: a node, a replica, a revision."""


class ConflictError(OperatorError):
    """What is asked could be done, but not as things are now."""


class PeerError(LlmgwError):
    """The other end of a connection did something wrong, or went away."""


class BugError(LlmgwError):
    """A promise inside llmgw was broken; the daemon that sees it should stop and say so."""


def leaves(group: BaseExceptionGroup[E]) -> Iterator[E]:
    """The exceptions in a group, however deep."""
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from leaves(one)
        else:
            yield one


@contextmanager
def first_error() -> Iterator[None]:
    """One error of ours out of a group that holds nothing else, so that the command line can print it."""
    found: LlmgwError | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        ours, others = group.split(LlmgwError)
        if ours is None or others is not None:
            raise
        found = next(leaves(ours))
    if found is not None:
        raise found
