"""When an engine that fails is left alone and tried again, and how many requests may be tried twice. Pure."""

from __future__ import annotations

from collections import deque

CONNECT_FAILURES = 3
"""Failed connections, or answers that did not come, in a row."""

ERRORS = 5
ERRORS_S = 10.0
"""So many answers with 5xx within so many seconds."""

OUT_FIRST_S = 5.0
OUT_MOST_S = 60.0
"""How long it is left alone; twice as long each time that the trial after it fails."""

SILENT_S = 5.0
"""A client that leaves after so long without a byte counts as a failure, if nobody else had an answer meanwhile."""

RETRY_SHARE = 0.1
RETRIES_SAVED = 10.0


class Health:
    """What an engine's answers say of it. ``out`` means that it is not asked unless nothing else is left; an engine
    that is not ``troubled`` is not. A ``silent`` one took requests and gave no answer: whoever tries it next would wait
    as well, so that it has to be :meth:`heard` of before. ``why`` is what it did last: ``failures``, ``silent`` or
    ``errors``."""

    __slots__ = ("_answered", "_errors", "_failures", "_out_s", "_trial", "silent", "troubled", "until", "why")

    def __init__(self) -> None:
        self._answered = 0.0
        self.silent = False
        self.why = ""
        self._failures = 0
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._out_s = 0.0
        self._trial = False
        self.troubled = False
        self.until = 0.0

    def out(self, now: float) -> bool:
        """Whether it is left alone: until its time is over, and then while one request tries it."""
        return self.troubled and (self._trial or self.silent or now < self.until)

    def asked(self) -> None:
        """A request goes to it. If it was out, that is the trial."""
        if self.troubled:
            self._trial = True

    def failed(self, now: float, *, silent: bool = False) -> None:
        """It could not be reached, or did not answer, or broke off. ``silent``: it took the request."""
        self._failures += 1
        self.silent = silent
        self.why = "silent" if silent else "failures"
        if self._failures >= CONNECT_FAILURES or self.troubled:
            self._put_out(now)

    def erred(self, now: float) -> None:
        """It answered with 5xx."""
        self._failures = 0
        self._errors.append(now)
        self.why = "errors"
        if self.troubled or (len(self._errors) == ERRORS and now - self._errors[0] <= ERRORS_S):
            self._put_out(now)

    def abandoned(self, asked: float, now: float) -> None:
        """A client left that had asked then and had no byte yet. That says nothing of an engine that answers others."""
        if now - asked >= SILENT_S and self._answered < asked:
            self.failed(now, silent=True)

    def heard(self) -> None:
        """It said something, though to no client: one of their requests may try it."""
        self.silent = False

    def worked(self, now: float) -> None:
        """It answered, and not with 5xx: a client's own mistake says that it is well."""
        self._failures = 0
        self._trial = self.silent = False
        self._answered = now
        if self.troubled:
            self.troubled = False
            self._out_s = 0.0
            self._errors.clear()

    def left(self) -> None:
        """The client of the trial left before there was an answer: somebody else has to try."""
        self._trial = False

    def _put_out(self, now: float) -> None:
        if now < self.until and not self._trial:
            return  # requests that were under way when it went out say nothing new
        self._out_s = min(2 * self._out_s, OUT_MOST_S) if self._out_s else OUT_FIRST_S
        self.troubled = True
        self.until = now + self._out_s
        self._trial = False


class RetryBudget:
    """At most a tenth of a model's requests are tried again: more would make a failure of all engines worse."""

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved = RETRIES_SAVED

    def request(self) -> None:
        """A request came in."""
        self._saved = min(RETRIES_SAVED, self._saved + RETRY_SHARE)

    def retry(self) -> bool:
        """Take one retry out of it, if there is one."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
