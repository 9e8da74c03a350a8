"""The fleet's intake: closed, no turn begins, whoever asks; opened, whatever waited is due."""

from __future__ import annotations

from perdure.errors import Unavailable
from perdure.turns import drain
from perdure.turns.drain import Unfinished
from perdure.turns.lease.claim import NotNeeded
from perdure.turns.run.runner import Ran
from perdure.turns.sweep import sweep
from tests.turns.scripted import says
from tests.turns.stage import Stage


def test_no_turn_begins_while_it_is_closed(stage: Stage) -> None:
    """The claim itself looks: a worker that has not heard of the drain begins nothing either."""
    drain.close(stage.database)
    accepted = stage.send()

    assert stage.run(accepted.session_id) == NotNeeded()
    assert stage.turn(accepted.turn_id)["status"] == "accepted"
    assert drain.unfinished(stage.database) == Unfinished(running=0, waiting=1, ending=0, held_back=0)

    drain.reopen(stage.database)
    assert stage.run(accepted.session_id) == Ran(1)


def test_what_runs_may_finish(stage: Stage) -> None:
    """A drain counts what is under way, and takes it from nobody."""
    accepted = stage.send()
    found, _ = stage.claimed(accepted.session_id)

    drain.close(stage.database)

    assert drain.running(stage.database) == [accepted.turn_id]
    assert drain.settled(stage.database, [accepted.turn_id]) == 0
    assert stage.session(accepted.session_id).token == found.token


def test_sweepers_wake_nothing_and_all_of_it_when_it_is_open_again(stage: Stage) -> None:
    """However often and however long ago a session was woken: nobody waits for a back-off that a drain caused."""
    accepted = stage.send()
    for _ in range(8):  # woken in vain, ever less often
        stage.move(400)
        sweep(stage.runtime)
    drain.close(stage.database)
    stage.waker.sessions.clear()
    stage.move(stage.settings.turn.sweep_s + 1)
    assert sweep(stage.runtime, turns=False) is not None
    assert stage.waker.sessions == []

    drain.reopen(stage.database)

    stage.move(stage.settings.turn.sweep_s + 1)
    sweep(stage.runtime)
    assert stage.waker.sessions == [accepted.session_id]


def test_closing_it_twice_is_closing_it(stage: Stage) -> None:
    """Two operators, or one who looks again."""
    for _ in range(2):
        drain.close(stage.database)
        assert drain.is_closed(stage.database)
    drain.reopen(stage.database)
    assert not drain.is_closed(stage.database)


def test_the_next_turn_of_a_running_session_does_not_begin_either(stage: Stage) -> None:
    """The intake closes while the session's first turn runs: that one ends, the one behind it waits."""
    stage.script(says("the first"), says("the second"))
    first, second = stage.send("1"), stage.send("2")

    def close(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle"):
            drain.close(stage.database)

    with stage.hooked(close):
        assert stage.run(first.session_id) == Ran(1)
    waiting, row = stage.turn(second.turn_id), stage.session(first.session_id)
    assert (waiting["status"], waiting["attempts"], waiting["started_at"]) == ("accepted", 0, None)
    assert (row.state, row.lease_until, row.lease_owner, row.strikes, row.claims) == ("active", None, None, 0, 0)

    drain.reopen(stage.database)
    assert stage.run(first.session_id) == Ran(1)
    assert stage.turn(second.turn_id)["reply"]["text"] == "the second"


def test_a_turn_that_runs_ends_though_its_connection_breaks(stage: Stage) -> None:
    """The runner looks again which turn it has: closed or not, it is the one that runs."""
    first, second = stage.send("1"), stage.send("2")
    broken: list[str] = []

    def close_and_break(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle") and not broken:
            broken.append(name)
            drain.close(stage.database)
            raise Unavailable("The connection broke.")

    with stage.hooked(close_and_break):
        assert stage.run(first.session_id) == Ran(1)
    assert stage.turn(first.turn_id)["status"] == "done"
    assert stage.turn(second.turn_id)["status"] == "accepted"
