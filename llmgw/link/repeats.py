"""What is said again and again: written down when it is news, not at every try. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from attrs import define

from llmgw.link.attempts import Attempts
from llmgw.link.messages import Refused

AGAIN_S = 600.0
_CHANGES, _CHANGES_S = 10, 60.0
_SUBJECTS = 4096


@define
class _Said:
    what: int | None
    at: float
    times: int = 0


class Repeats:
    """What was said last of each subject, so that nobody fills a log by trying for ever.

    What is other than the last is news, of a subject ``changes`` times in a minute; what stays is said once in
    ``again_s`` seconds. Choose as subject what whoever tries cannot choose itself: its address, its certificate. Holds
    a bounded number of subjects, those longest not heard of forgotten first.
    """

    def __init__(self, again_s: float = AGAIN_S, changes: int = _CHANGES) -> None:
        self._again_s = again_s
        self._changes = Attempts(changes, _CHANGES_S)
        self._said: OrderedDict[str, _Said] = OrderedDict()

    def times(self, subject: str, what: Hashable, now: float) -> int:
        """For how many times saying it now stands; 0 for not saying it. ``now`` is in seconds and goes forward."""
        told = hash(what)  # it may be long, and the peer's
        last = self._said.setdefault(subject, _Said(None, now))
        self._said.move_to_end(subject)
        if len(self._said) > _SUBJECTS:
            self._said.popitem(last=False)
        last.times += 1
        if told == last.what:
            if now < last.at + self._again_s:
                return 0
        elif self._changes.wait_s(subject, now) > 0:
            return 0
        else:
            self._changes.failed(subject, now)
        last.what, last.at = told, now
        times, last.times = last.times, 0
        return times

    def over(self, subject: str) -> None:
        """It went well: what is said next is news, though it be the same as before."""
        if (last := self._said.get(subject)) is not None:
            last.what = None


def gist(refused: Refused) -> tuple[str, str, str]:
    """What makes a refusal another one. How far a clock is off is not looked at: it differs at every try."""
    return refused.claim, refused.certificate, "" if refused.claim == "validity" else refused.found
