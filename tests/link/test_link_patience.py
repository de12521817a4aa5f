"""How long one end of the link waits: what is due, silence, half a message, and time in which this process stood still."""

from __future__ import annotations

import pytest

from llmgw.link.patience import LinkLimits, Patience, Ping, TooLate

LIMITS = LinkLimits(open_s=5, ping_s=6, silence_s=15, message_s=60)


def patient(*, opened: bool = True) -> Patience:
    made = Patience(0, LIMITS)
    if opened:
        made.came()
    return made


def test_what_is_due_and_does_not_come_is_too_much_time() -> None:
    made = patient(opened=False)
    assert (made.until(), made.tick(4.9)) == (5, None)
    assert made.tick(5) == TooLate("no HTTP/2 connection was set up within 5 s", excessive=True)
    made.expect(3, 4, "no answer")
    assert (made.expects, made.until()) == (True, 6), "a PING before it"
    made.heard(5)
    assert made.tick(7) == TooLate("no answer within 4 s", excessive=True)
    made.came()
    assert (made.expects, made.until()) == (False, 11)


def test_silence_is_asked_after_and_then_the_end_which_is_nobodys_excess() -> None:
    made = patient()
    assert made.tick(6) == Ping()
    made.pinged(6)
    assert (made.until(), made.tick(11.9)) == (12, None), "it has a while to answer"
    made.pinged(12)
    assert made.until() == 15
    assert made.tick(15) == TooLate("nothing was heard for 15 s", excessive=False)
    made.heard(14)
    assert made.until() == 20, "14 + 6: it answered"


def test_a_message_that_has_begun_must_become_whole_however_often_it_goes_on() -> None:
    made = patient()
    for now in range(0, 60, 5):
        made.heard(now)
        made.message(now, begun=True)
    made.pinged(58)
    assert made.until() == 60
    assert made.tick(60) == TooLate("a message was not whole within 60 s", excessive=True)
    made.message(60, begun=False)
    made.heard(60)
    assert made.until() == 66


@pytest.mark.parametrize("asleep_s", [1.5, 3600.0])
def test_who_stood_still_itself_blames_nobody(asleep_s: float) -> None:
    made = patient(opened=False)
    assert made.tick(5 + asleep_s) is None
    assert made.tick(5 + asleep_s + 0.9) is None, "what is due has a second to be read"
    late = made.tick(5 + asleep_s + 1)
    assert isinstance(late, TooLate)
    assert late.excessive

    made = patient()
    made.message(0, begun=True)
    assert made.tick(6 + asleep_s) is None
    assert made.until() == 12 + asleep_s, "silence and the message count from now"
    made.heard(60 + asleep_s)
    made.pinged(60 + asleep_s)
    assert made.tick(60 + asleep_s) is None
    assert isinstance(made.tick(66 + asleep_s), TooLate)
