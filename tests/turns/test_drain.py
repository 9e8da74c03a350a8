"""While the intake is closed (`perdure drain`), no worker begins a turn. When it opens, all waiting turns are due."""

from __future__ import annotations

import pytest

from perdure.errors import Unavailable
from perdure.sessions import queries
from perdure.sessions.ending import request_ends
from perdure.turns import drain
from perdure.turns.drain import Unfinished
from perdure.turns.lease.claim import NotNeeded, Ran
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.scripted import says


def test_no_turn_begins_while_the_intake_is_closed(harness: Harness) -> None:
    """The claim statement checks the intake, so even a worker that is unaware of the drain begins no turn."""
    drain.begin(harness.database)
    accepted = harness.send()

    assert harness.run(accepted.session_id) == NotNeeded()
    assert harness.turn(accepted.turn_id)["status"] == "accepted"
    assert drain.unfinished(harness.database) == Unfinished(running=0, waiting=1, ending=0, held_back=0)

    drain.end(harness.database)
    assert harness.run(accepted.session_id) == Ran(1)


def test_running_turns_may_finish(harness: Harness) -> None:
    """A drain reports running turns and leaves them to their workers."""
    accepted = harness.send()
    found = harness.claimed(accepted.session_id)

    drain.begin(harness.database)

    assert drain.running(harness.database) == [accepted.turn_id]
    assert drain.settled(harness.database, [accepted.turn_id]) == 0
    assert harness.session(accepted.session_id).token == found.token


def test_sweepers_wake_no_session_while_the_intake_is_closed(harness: Harness) -> None:
    """A drain stops wake-ups. Its end resets the back-off of wake-ups, so the next sweep wakes the session."""
    accepted = harness.send()
    for _ in range(8):  # each unclaimed wake-up lengthens the back-off
        harness.move(400)
        sweep(harness.runtime)
    drain.begin(harness.database)
    harness.waker.sessions.clear()
    harness.move(harness.settings.turn.sweep_s + 1)
    assert sweep(harness.runtime, turns=False) is not None
    assert harness.waker.sessions == []

    drain.end(harness.database)

    harness.move(harness.settings.turn.sweep_s + 1)
    sweep(harness.runtime)
    assert harness.waker.sessions == [accepted.session_id]


def test_closing_the_intake_twice_needs_one_opening(harness: Harness) -> None:
    """If the intake is closed twice, one opening is enough."""
    for _ in range(2):
        drain.begin(harness.database)
        assert drain.is_active(harness.database)
    drain.end(harness.database)
    assert not drain.is_active(harness.database)


def test_the_next_turn_of_a_running_session_does_not_begin_either(harness: Harness) -> None:
    """If the intake closes while the session's first turn runs, that turn ends and the second one waits."""
    harness.script(says("the first"), says("the second"))
    first, second = harness.send("1"), harness.send("2")

    def close(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle"):
            drain.begin(harness.database)

    with harness.hooked(close):
        assert harness.run(first.session_id) == Ran(1)
    waiting, row = harness.turn(second.turn_id), harness.session(first.session_id)
    assert (waiting["status"], waiting["attempts"], waiting["started_at"]) == ("accepted", 0, None)
    assert (row.state, row.lease_until, row.lease_owner, row.strikes, row.claims) == ("active", None, None, 0, 0)

    drain.end(harness.database)
    assert harness.run(first.session_id) == Ran(1)
    assert harness.turn(second.turn_id)["reply"]["text"] == "the second"


def test_a_running_turn_ends_despite_a_lost_connection(harness: Harness) -> None:
    """After a lost connection, a runner finishes its current turn although the intake is closed."""
    first, second = harness.send("1"), harness.send("2")
    broken: list[str] = []

    def close_and_break(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle") and not broken:
            broken.append(name)
            drain.begin(harness.database)
            raise Unavailable("The connection broke.")

    with harness.hooked(close_and_break):
        assert harness.run(first.session_id) == Ran(1)
    assert harness.turn(first.turn_id)["status"] == "done"
    assert harness.turn(second.turn_id)["status"] == "accepted"


def test_the_intake_opens_and_sessions_end_a_page_at_a_time(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """No statement changes more sessions than a page has, and each session is reached, whatever the last page holds."""
    monkeypatch.setattr(drain, "_PAGE", 2)
    accepted = [harness.send(user=f"u{number}").session_id for number in range(5)]
    harness.database.run(queries.REQUEST_END, {"session_ids": accepted[:1], "reason": "r"})
    drain.begin(harness.database)
    ran: list[str] = []
    with harness.hooked(lambda moment, name: ran.append(name) if moment == "before" else None):
        drain.end(harness.database)
    assert ran == ["drain.open", "drain.hasten", "drain.hasten", "drain.hasten"]
    assert [harness.session(each).woken_at for each in accepted] == [None] * 5

    pages = list(drain.live_sessions(harness.database))
    assert (sorted(each for page in pages for each in page), [len(page) for page in pages]) == (
        sorted(accepted),
        [2, 2, 1],
    )
    assert {each.session_id for page in pages for each in request_ends(harness.database, page, "drain")} == {*accepted}
    assert [harness.session(each).end_reason for each in accepted] == ["r", *["drain"] * 4]
