from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.agent.ending import CLEAR_S, RANK_STOP_S, STACKS_S, remaining
from llmgw.agent.events import (
    Crippled,
    DrainAsked,
    Ended,
    Exposed,
    Gone,
    KeepStacks,
    Kill,
    KillRemains,
    Observation,
    Probed,
    Progressed,
    Read,
    Remains,
    StacksKept,
    StopAsked,
    Terminate,
    Tick,
    Worked,
)
from llmgw.agent.lifecycle import READ_STEP, step
from llmgw.agent.shard import NEXT, adopted, begin
from llmgw.scheduler.state import Exit, ShardState
from llmgw.settings.catalog import Limits

LIMITS = Limits(start_s=10, load_s=100, hang_s=50, drain_s=5, stop_s=3)
UP = Probed(healthy=True, listed=False, said="")
STACKS = "; where it stood is in stacks.txt beside its log"
LISTED = Probed(healthy=True, listed=True, said="")
DOWN = Probed(healthy=False, listed=False, said="nothing answers on port 1")


def play(*told: tuple[float, Observation]) -> tuple:
    shard, actions = begin("m", LIMITS, 0), ()
    for at, observation in told:
        shard, actions = step(shard, observation, "m", LIMITS, at)
    return shard, actions


def test_a_life() -> None:
    assert play((1, DOWN))[0].state is ShardState.STARTING
    loading, _ = play((1, Progressed("loading weights, file 1 of 4", 0.25)))
    assert (loading.state, loading.progress, loading.reason) == (
        ShardState.LOADING,
        0.25,
        "loading weights, file 1 of 4",
    )
    assert play((1, UP))[0].state is ShardState.LOADING, "health alone is not ready"
    ready, _ = play((1, UP), (2, LISTED))
    assert (ready.state, ready.since, ready.deadline) == (ShardState.READY, 2, None)
    draining, actions = play((1, LISTED), (2, DrainAsked("scaled down")))
    assert (draining.state, draining.reason, actions) == (ShardState.DRAINING, "scaled down", ())
    stopping, actions = play((1, LISTED), (2, DrainAsked("x")), (3, StopAsked("enough", 3)))
    assert (stopping.state, stopping.deadline, actions) == (ShardState.STOPPING, 6, (Terminate(),))
    stopped, _ = play((1, LISTED), (3, StopAsked("enough", 3)), (4, Ended(Exit(0))))
    assert (stopped.state, stopped.reason) == (ShardState.STOPPED, "enough; exit code 0")


def test_sigkill_after_the_grace_and_again_each_second() -> None:
    shard, actions = play((1, LISTED), (2, StopAsked("x", 3)), (4.9, Tick()))
    assert actions == ()
    shard, actions = step(shard, Tick(), "m", LIMITS, 5.0)
    assert actions == (Kill(),)
    assert step(shard, Tick(), "m", LIMITS, 5.5)[1] == ()
    assert step(shard, Tick(), "m", LIMITS, 6.0)[1] == (Kill(),)


def test_a_second_stop_can_only_hurry() -> None:
    shard, actions = play((1, LISTED), (2, StopAsked("x", 30)), (3, StopAsked("now", 1)))
    assert (shard.deadline, actions) == (4, ())
    assert step(shard, StopAsked("slowly", 60), "m", LIMITS, 3)[0].deadline == 4


def test_an_end_that_nobody_asked_for_is_a_failure_whatever_its_code() -> None:
    shard, _ = play((1, LISTED), (2, Ended(Exit(0))))
    assert shard.state is ShardState.FAILED
    assert shard.reason == "the engine ended without being asked while ready: exit code 0"
    assert play((1, Ended(Exit(signal=9))))[0].reason.endswith("while starting: killed by signal 9")
    told, _ = play((1, Ended(Exit(1), last="ValueError: no such model")))
    assert told.reason.endswith("exit code 1; its last line: ValueError: no such model")
    unseen, _ = play((1, Ended(Exit(), error="nope cannot be started: No such file or directory")))
    assert unseen.reason == "nope cannot be started: No such file or directory"


def test_once_its_first_process_is_gone_it_serves_nobody_though_its_workers_take_their_time() -> None:
    gone, actions = play((1, LISTED), (2, Gone()))
    assert (gone.state, gone.since, actions) == (ShardState.STOPPING, 2, ())
    assert gone.reason == "the engine ended without being asked while ready"
    for later in (LISTED, Tick(), StopAsked("an earlier start", 60), DrainAsked("x"), Gone()):
        assert step(gone, later, "m", LIMITS, 50) == (gone, ())
    assert step(gone, Tick(), "m", LIMITS, 62)[1] == (Kill(),)
    failed, _ = step(gone, Ended(Exit(0)), "m", LIMITS, 5)
    assert (failed.state, failed.since) == (ShardState.FAILED, 5)
    assert failed.reason == "the engine ended without being asked while ready: exit code 0"
    stopped, _ = play((1, LISTED), (2, StopAsked("enough", 3)), (3, Gone()), (4, Ended(Exit(0))))
    assert (stopped.state, stopped.reason) == (ShardState.STOPPED, "enough; exit code 0")


def test_limits_name_what_they_waited_for() -> None:
    shard, actions = play((10, Tick()))
    assert actions == (KeepStacks(),)
    failed, _ = step(shard, Ended(Exit(signal=15)), "m", LIMITS, 11)
    assert failed.state is ShardState.FAILED
    assert failed.reason.startswith("starting for 10 s, waited for an answer or a line of progress")
    late, _ = play((1, UP), (101, Tick()), (102, Ended(Exit(0))))
    assert late.reason == (
        "stood still for 100 s at: /health answers, the model is not listed yet (loading for 100 s, "
        f"waited for the model to be listed){STACKS}"
    )


def test_what_moves_is_not_ended_and_what_stands_still_is() -> None:
    files = [(n * 90.0, Progressed(f"loading weights, file {n} of 9", n / 9)) for n in range(1, 10)]
    shard, actions = play(*files, (900, Tick()))
    assert (shard.state, actions) == (ShardState.LOADING, ())
    more = [(900.0 + n * 90, Progressed("compiling", n / 10)) for n in range(4)]
    shard, actions = play(*files, *more, (1260, Tick()))
    assert (shard.state, actions) == (ShardState.LOADING, ())
    shard, actions = play(*files, *more, (1271, Tick()), (1272, Ended(Exit(0))))
    assert shard.reason == (
        f"stood still for 100 s at: compiling (loading for 1181 s, waited for the model to be listed){STACKS}"
    )


def test_the_same_line_again_is_standing_still() -> None:
    same = [(float(n * 10), Progressed("loading weights, file 3 of 9", 0.33)) for n in range(1, 10)]
    assert play(*same, (109, Tick()))[1] == ()
    assert play(*same, (110, Tick()))[1] == (KeepStacks(),)


def test_going_round_in_circles_is_standing_still() -> None:
    circle = [(float(n * 10), Progressed(("loading weights", "compiling")[n % 2], None)) for n in range(1, 40)]
    shard, now = begin("m", LIMITS, 0.0), 0.0
    for now, observation in circle:
        shard, _ = step(shard, observation, "m", LIMITS, now)
        shard, actions = step(shard, Tick(), "m", LIMITS, now)
        if actions:
            break
    assert (shard.state, now) == (ShardState.STOPPING, 120)
    assert shard.reason.startswith("stood still for 100 s at: ")


def test_a_ready_engine_with_requests_and_no_token_hangs_though_it_answers() -> None:
    story: list[tuple[float, Observation]] = [(1, LISTED), (2, Worked(3, 100.0)), (30, Worked(3, 140.0)), (31, LISTED)]
    alive, actions = play(*story, (60, Worked(3, 140.0)), (79.9, Worked(3, 140.0)))
    assert (alive.state, actions) == (ShardState.READY, ())
    hung, actions = play(*story, (60, Worked(3, 140.0)), (80, Worked(2, 140.0)))
    assert actions == (KeepStacks(),), "before it is ended: afterwards nobody can tell where it stood"
    said = f"hung: 2 requests run and no token came for 50 s{STACKS}"
    assert (hung.state, hung.reason) == (ShardState.STOPPING, said)
    failed, _ = step(hung, Ended(Exit(0)), "m", LIMITS, 81)
    assert (failed.state, failed.reason) == (ShardState.FAILED, said)


def test_an_idle_engine_a_working_one_and_a_silent_one_do_not_hang() -> None:
    idle = [(float(t), Worked(0, 5.0)) for t in range(2, 500, 2)]
    working = [(float(t), Worked(1, float(t))) for t in range(2, 500, 2)]
    silent: list[tuple[float, Observation]] = [(2.0, Worked(1, 5.0)), (490.0, Tick())]
    restarted_counter = [(2.0, Worked(1, 900.0)), (40.0, Worked(1, 3.0)), (80.0, Worked(1, 3.0))]
    for story in (idle, working, silent, restarted_counter):
        assert play((1, LISTED), *story)[0].state is ShardState.READY
    burst = [(2.0, Worked(1, 5.0)), (40.0, Worked(0, 5.0)), (60.0, Worked(1, 5.0)), (100.0, Worked(1, 5.0))]
    assert play((1, LISTED), *burst)[0].state is ShardState.READY, "a request that just came is not the one from before"
    loading, _ = play((1, UP), (2, Worked(1, 5.0)), (90, Worked(1, 5.0)))
    assert loading.state is ShardState.LOADING


def test_what_an_engine_works_is_no_news() -> None:
    ready, _ = play((1, LISTED))
    assert step(ready, Worked(3, 100.0), "m", LIMITS, 2)[0] == ready


WORKER = "pid 812 VLLM::Worker_TP1"
HOLDS = f"{WORKER} holds 71 GiB on gpu-3"


def test_an_engine_that_hangs_is_ended_after_its_stacks_were_kept_or_took_too_long() -> None:
    hung, _ = play((1, UP), (101, Tick()))
    assert step(hung, Tick(), "m", LIMITS, 102)[1] == ()
    for observation, at in ((StacksKept(), 103.0), (Tick(), 101 + STACKS_S), (StopAsked("now", 1), 103.0)):
        ending, actions = step(hung, observation, "m", LIMITS, at)
        assert actions == (Terminate(),)
        assert step(ending, StacksKept(), "m", LIMITS, at)[1] == (), "and no second time"
        assert ending.deadline == at + (1 if isinstance(observation, StopAsked) else LIMITS.stop_s)
        assert step(ending, Tick(), "m", LIMITS, ending.deadline)[1] == (Kill(),)
        failed, _ = step(ending, Ended(Exit(0)), "m", LIMITS, 110)
        assert failed.reason.startswith("stood still for 100 s")


def test_after_a_stop_nothing_of_it_is_alive_or_holds_memory() -> None:
    asked: list[tuple[float, Observation]] = [(1, LISTED), (2, StopAsked("enough", 3))]
    end = Ended(Exit(0))
    waiting, actions = play(*asked, (3, Remains(end)))
    assert (waiting.state, waiting.reason, actions) == (ShardState.STOPPING, "enough; exit code 0", ())
    assert waiting.next == "stopped once its devices were read again, failed if that takes more than 60 s"
    waiting, actions = play(*asked, (3, Remains(end, (WORKER,))))
    assert actions == (KillRemains(),)
    assert waiting.reason == f"{WORKER} still runs; enough; exit code 0"
    assert step(waiting, StopAsked("again", 0), "m", LIMITS, 4) == (waiting, ())
    waiting, actions = step(waiting, Remains(end, (), (HOLDS,)), "m", LIMITS, 5)
    assert (waiting.reason, actions) == (f"{HOLDS}; enough; exit code 0", ())
    assert waiting.next == "stopped once nothing of it is left, failed if that takes more than 60 s"
    assert step(waiting, Tick(), "m", LIMITS, 60)[0] == waiting
    stopped, _ = step(waiting, end, "m", LIMITS, 6)
    assert (stopped.state, stopped.reason, stopped.since) == (ShardState.STOPPED, "enough; exit code 0", 6)


def test_what_is_left_for_too_long_is_said_and_its_shard_failed() -> None:
    told = Remains(Ended(Exit(0)), (WORKER,), (HOLDS,))
    for last in (Tick(), told):
        shard, actions = play((1, LISTED), (2, StopAsked("enough", 3)), (3, told), (30, told), (3 + CLEAR_S, last))
        assert (shard.state, actions) == (ShardState.FAILED, ())
        assert shard.reason == f"enough; exit code 0; {HOLDS}, 60 s after its end"
    unread, _ = play((1, LISTED), (2, StopAsked("enough", 3)), (3, Remains(Ended(Exit(0)))), (3 + CLEAR_S, Tick()))
    assert unread.state is ShardState.STOPPED
    assert unread.reason == "enough; exit code 0; its devices could not be read again since"


def test_a_crash_is_not_told_as_the_end_before_its_workers_are_gone() -> None:
    crash = Ended(Exit(signal=9), last="boom")
    shard, actions = play((1, LISTED), (2, Remains(crash, (WORKER,))))
    assert (shard.state, shard.since, actions) == (ShardState.STOPPING, 2, (KillRemains(),))
    assert shard.reason.endswith("while ready: killed by signal 9; its last line: boom")
    failed, _ = step(shard, crash, "m", LIMITS, 3)
    assert failed.state is ShardState.FAILED
    assert failed.reason == "the engine ended without being asked while ready: killed by signal 9; its last line: boom"
    past, _ = step(remaining(failed, 10), Ended(Exit()), "m", LIMITS, 11)
    assert (past.reason, past.exit) == (failed.reason, failed.exit), "what ended without an agent, too"


def test_reading_weights_is_getting_on_and_a_busy_loop_is_not() -> None:
    gib = 1024**3
    reads: list[tuple[float, Observation]] = [(9.0 * n, Read(n * gib)) for n in range(1, 20)]
    shard, actions = play(*reads, (180, Tick()))
    assert (shard.state, actions) == (ShardState.STARTING, ())
    assert shard.reason == "read 19.0 GiB of weights so far"
    stuck, actions = play(*reads, *((171.0 + n, Read(19 * gib + n)) for n in range(10)), (181, Tick()))
    assert actions == (KeepStacks(),)
    assert stuck.reason.startswith(
        "starting for 181 s, waited for an answer or a line of progress; last: read 19.0 GiB of weights so far"
    )
    up: list[tuple[float, Observation]] = [(1, UP), (90, Read(gib))]
    assert play(*up, (189, Tick()))[0].state is ShardState.LOADING
    assert play(*up, (190, Tick()))[0].state is ShardState.STOPPING
    told, _ = play((1, Progressed("loading weights, file 1 of 4", 0.25)), (50, Read(gib)), (149, Tick()))
    assert (told.state, told.reason) == (ShardState.LOADING, "loading weights, file 1 of 4"), "how far it got is better"


def test_workers_that_come_and_go_do_not_read_for_ever() -> None:
    again: list[tuple[float, Observation]] = [
        (1, UP), *((n * 10.0, Read(READ_STEP * (1 + n % 3) - 1)) for n in range(1, 40))
    ]  # fmt: skip
    assert play(*again)[0].deadline == 20 + LIMITS.load_s
    late = adopted(ShardState.LOADING, "m", LIMITS, 100, 5)
    late, _ = step(late, Read(9 * READ_STEP), "m", LIMITS, 102)
    assert late.deadline == 100 + LIMITS.start_s, "what was read before nobody saw it is no news"
    assert step(late, Read(10 * READ_STEP), "m", LIMITS, 104)[0].deadline == 104 + LIMITS.start_s


def test_an_engine_that_anybody_can_reach_is_ended() -> None:
    shard, actions = play((1, LISTED), (2, Exposed("its API listens on 0.0.0.0:1", "look for --host")))
    assert (shard.state, actions) == (ShardState.STOPPING, (Terminate(),))
    failed, _ = step(shard, Ended(Exit(0)), "m", LIMITS, 3)
    assert (failed.state, failed.reason) == (ShardState.FAILED, "its API listens on 0.0.0.0:1")
    assert (failed.remedy, failed.final) == ("look for --host", True)
    assert play((1, UP), (2, Exposed("x", "y")))[0].state is ShardState.LOADING


def test_an_engine_that_lost_what_it_cannot_do_without_is_ended_and_may_be_started_again() -> None:
    shard, actions = play((1, LISTED), (2, Crippled("pid 10 ended")))
    assert (shard.state, shard.reason, actions) == (ShardState.STOPPING, "pid 10 ended", (Terminate(),))
    assert step(shard, Crippled("pid 11 ended"), "m", LIMITS, 3) == (shard, ())
    failed, _ = step(shard, Ended(Exit(0)), "m", LIMITS, 4)
    assert (failed.state, failed.reason, failed.final) == (ShardState.FAILED, "pid 10 ended", False)


def test_what_cannot_be_killed_is_said() -> None:
    shard, _ = play((1, LISTED), (2, StopAsked("x", 3)), (30, Ended(Exit(0), left=(812,))))
    assert (shard.state, shard.reason) == (ShardState.FAILED, "x; pids 812 cannot be killed")


def test_a_ready_shard_whose_health_fails_says_so_and_recovers() -> None:
    sick, _ = play((1, LISTED), (2, DOWN))
    assert (sick.state, sick.reason) == (
        ShardState.READY,
        "was ready, but /health fails now: nothing answers on port 1",
    )
    assert step(sick, LISTED, "m", LIMITS, 3)[0].reason == "/v1/models lists m"


def test_adoption_keeps_what_serves_in_service() -> None:
    assert adopted(ShardState.READY, "m", LIMITS, 100, 5).since == 5
    assert adopted(ShardState.LOADING, "m", LIMITS, 100, 5).state is ShardState.STARTING
    ending = adopted(ShardState.STOPPING, "m", LIMITS, 100, 5)
    assert (ending.state, ending.since) == (ShardState.STOPPING, 5)
    assert step(ending, Probed(True, True, ""), "m", LIMITS, 100) == (ending, ())
    ending, told = step(ending, Tick(), "m", LIMITS, 100)
    assert (told, ending.deadline) == ((Terminate(),), 100 + LIMITS.stop_s)
    assert step(ending, Tick(), "m", LIMITS, 100 + LIMITS.stop_s)[1] == (Kill(),)


observations = st.one_of(
    st.builds(Probed, st.booleans(), st.booleans(), st.just("said")),
    st.builds(Progressed, st.just("phase"), st.none() | st.floats(0, 1)),
    st.builds(Ended, st.builds(Exit, st.none() | st.integers(0, 255)), st.sampled_from(["", "cannot be started"])),
    st.builds(DrainAsked, st.just("drain")),
    st.builds(Worked, st.integers(0, 3), st.floats(0, 9)),
    st.builds(Read, st.integers(0, 9 * READ_STEP)),
    st.just(Exposed("seen by all", "hide it")),
    st.just(StacksKept()),
    st.just(Gone()),
    st.just(Crippled("pid 10 ended")),
    st.builds(
        Remains, st.builds(Ended, st.just(Exit(1))), st.sampled_from([(), ("pid 8 x",)]), st.sampled_from([(), ("8",)])
    ),
    st.builds(StopAsked, st.just("stop"), st.floats(0, 50)),
    st.just(Tick()),
)


@given(st.lists(st.tuples(st.floats(0, 30), observations), max_size=30))
@settings(max_examples=300)
def test_any_story_stays_in_the_table_and_comes_to_an_end(story: list[tuple[float, Observation]]) -> None:
    shard, now = begin("m", LIMITS, 0.0), 0.0
    for after, observation in story:
        now += after
        before = shard
        shard, actions = step(shard, observation, "m", LIMITS, now)
        assert shard.state is before.state or shard.state in NEXT[before.state]
        assert shard.reason
        assert shard.state.ended or shard.next or shard.state is ShardState.READY
        if before.state.ended:
            assert (shard, actions) == (before, ())
    if shard.state in (ShardState.STARTING, ShardState.LOADING, ShardState.STOPPING):
        seen = []
        for _ in range(5):
            now += 200
            shard, actions = step(shard, Tick(), "m", LIMITS, now)
            seen += actions
        assert Kill() in seen or shard.state.ended, "time alone ends what never gets ready"


def test_a_rank_above_0_is_told_by_its_log_and_has_no_limits_of_its_own() -> None:
    def after(*told: tuple[float, Observation]) -> tuple:
        shard, actions = begin("m", LIMITS, 0, rank=1), ()
        for at, observation in told:
            shard, actions = step(shard, observation, "m", LIMITS, at)
        return shard, actions

    assert after((10_000, Tick()))[0].state is ShardState.STARTING
    waiting, actions = after((1, Progressed("waiting for rank 0", None)), (10_000, Tick()))
    assert (waiting.state, waiting.since, waiting.reason, actions) == (ShardState.LOADING, 1, "waiting for rank 0", ())
    loaded, _ = after((1, Progressed("x", None)), (2, Progressed("weights loaded", None, loaded=True)))
    assert (loaded.state, loaded.since, loaded.rank) == (ShardState.READY, 2, 1)
    assert (
        after((1, Progressed("w", None, loaded=True)), (2, Progressed("compiling", None)))[0].state is ShardState.READY
    )
    assert adopted(ShardState.LOADING, "m", LIMITS, 5, 1, rank=1).deadline is None
    ended, _ = after((1, Progressed("w", None, loaded=True)), (2, Ended(Exit(0))))
    assert ended.state is ShardState.FAILED


def test_the_end_is_told_when_it_came_not_when_all_was_cleared() -> None:
    """Over several nodes the rank that went wrong first is the one to blame."""
    own = Ended(Exit(1), at=5.0)
    assert play((1, LISTED), (6, Gone()), (7, Remains(own)), (20, own))[0].ended_at == 5.0
    assert play((1, LISTED), (6, Gone()), (20, Ended(Exit())))[0].ended_at == 6, "its shim is gone: nobody saw it"
    assert play((1, LISTED), (20, Ended(Exit())))[0].ended_at == 20
    crippled = play((1, LISTED), (6, Crippled("a worker is gone")), (9, Ended(Exit(0), at=8.0)))[0]
    assert crippled.ended_at == 6, "it went wrong before it was ended"
    assert play((1, LISTED), (6, StopAsked("x", 3)), (9, Ended(Exit(0), at=8.0)))[0].ended_at == 8.0


def test_a_rank_above_0_is_not_waited_for_long_and_it_is_said_when_it_did_not_listen() -> None:
    """It serves nobody; some engines' never end by SIGTERM."""
    for doing in (StopAsked("enough", 30), Crippled("a worker is gone")):
        ready, _ = step(begin("m", LIMITS, 0, 1), Progressed("loaded", 1.0, loaded=True), "m", LIMITS, 1)
        draining, _ = step(ready, DrainAsked("scaled down"), "m", LIMITS, 1)
        for shard in (ready, draining):
            limits = evolve(LIMITS, stop_s=30)
            stopping, actions = step(shard, doing, "m", limits, 2)
            assert (stopping.deadline, actions) == (2 + RANK_STOP_S, (Terminate(),))
            assert stopping.next == "SIGTERM was sent; SIGKILL in 5 s"
            _, actions = step(stopping, Tick(), "m", limits, 2 + RANK_STOP_S)
            assert actions == (Kill(),)
    stopped, _ = play((1, LISTED), (2, StopAsked("enough", 3)), (5, Tick()), (6, Ended(Exit(None, 9))))
    assert stopped.reason == "enough; it did not end by SIGTERM, killed by signal 9"
    hurried, _ = step(begin("m", LIMITS, 0, 1), StopAsked("enough", 1), "m", LIMITS, 2)
    assert hurried.deadline == 3, "less is asked for"


def test_an_engine_that_answers_nothing_for_its_time_hangs_unless_it_works() -> None:
    """Stopped, or stuck where it answers: it has no metrics then that could say so."""
    for state in ((), ((2, DrainAsked("scaled down")),)):
        shard, _ = play((1, LISTED), *state, (3, DOWN), (52.9, DOWN))
        assert not shard.state.ended
        assert shard.state is not ShardState.STOPPING
        hung, actions = step(shard, DOWN, "m", LIMITS, 53)
        assert (hung.state, actions) == (ShardState.STOPPING, (KeepStacks(),))
        assert hung.reason == (
            f"hung: /health fails for 50 s and nothing else shows that it gets on: {DOWN.said}{STACKS}"
        )
        assert step(step(shard, LISTED, "m", LIMITS, 52.9)[0], DOWN, "m", LIMITS, 60)[1] == ()
        busy, _ = step(shard, Worked(1, 7.0), "m", LIMITS, 52.9)
        assert step(busy, DOWN, "m", LIMITS, 60)[1] == (), "it works, and its /health is slow"
        same, _ = step(step(busy, DOWN, "m", LIMITS, 60)[0], Worked(1, 7.0), "m", LIMITS, 61)
        assert step(same, DOWN, "m", LIMITS, 110)[1] == (KeepStacks(),)
