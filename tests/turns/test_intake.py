"""The fleet's intake: closed, no turn begins, whoever asks; opened, whatever waited is due."""

from __future__ import annotations

from perdure.turns import intake
from perdure.turns.intake import Unfinished
from perdure.turns.lease import NotNeeded
from perdure.turns.runner import Ran
from perdure.turns.sweep import sweep
from tests.turns.stage import Stage


def test_no_turn_begins_while_it_is_closed(stage: Stage) -> None:
    """The claim itself looks: a worker that has not heard of the drain begins nothing either."""
    intake.close(stage.database)
    accepted = stage.send()

    assert stage.run(accepted.session_id) == NotNeeded()
    assert stage.turn(accepted.turn_id)["status"] == "accepted"
    assert intake.unfinished(stage.database) == Unfinished(running=0, waiting=1, ending=0, held_back=0)

    intake.reopen(stage.database)
    assert stage.run(accepted.session_id) == Ran(1)


def test_what_runs_may_finish(stage: Stage) -> None:
    """A drain counts what is under way, and takes it from nobody."""
    accepted = stage.send()
    found, _ = stage.claimed(accepted.session_id)

    intake.close(stage.database)

    assert intake.running(stage.database) == [accepted.turn_id]
    assert intake.settled(stage.database, [accepted.turn_id]) == 0
    assert stage.session(accepted.session_id).token == found.token


def test_sweepers_wake_nothing_and_all_of_it_when_it_is_open_again(stage: Stage) -> None:
    """However often and however long ago a session was woken: nobody waits for a back-off that a drain caused."""
    accepted = stage.send()
    for _ in range(8):  # woken in vain, ever less often
        stage.move(400)
        sweep(stage.runtime)
    intake.close(stage.database)
    stage.waker.sessions.clear()
    stage.move(stage.settings.turn.sweep_s + 1)
    assert sweep(stage.runtime, turns=False) is not None
    assert stage.waker.sessions == []

    intake.reopen(stage.database)

    stage.move(stage.settings.turn.sweep_s + 1)
    sweep(stage.runtime)
    assert stage.waker.sessions == [accepted.session_id]


def test_closing_it_twice_is_closing_it(stage: Stage) -> None:
    """Two operators, or one who looks again."""
    for _ in range(2):
        intake.close(stage.database)
        assert intake.is_closed(stage.database)
    intake.reopen(stage.database)
    assert not intake.is_closed(stage.database)
