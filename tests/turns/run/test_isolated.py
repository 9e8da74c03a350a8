"""When a worker kills a child process that runs a turn, and how the turn then ends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from perdure import tool
from perdure.database.fencing import Fence
from perdure.errors import DeadlineExceeded
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Usage
from perdure.sessions.ending import request_end
from perdure.turns.cancel import cancel
from perdure.turns.lease.tenure import GRACE_S
from perdure.turns.outcome import Failed
from perdure.turns.run import loop
from perdure.turns.run.child_watch import IDLE_S, LOST_S, Overdue, Standing, Watch, look
from perdure.turns.run.loop import Runner
from perdure.turns.run.verdict import out_of_time
from tests.turns.harness import Crash, Harness
from tests.turns.scripted import UNREPORTED, calls, says

FENCE = Fence(3, UUID(int=3))
TURN = UUID(int=7)
HELD = Standing(FENCE, "host:1 alone", TURN, 4, 100.0, 300.0, is_silent=True, cancelled=False)
UNTIL = 200.0 + GRACE_S
"""The time at which `HELD`, first seen at time 0, is killed: the turn's remaining 200 s plus the grace period."""


def seen(*looks: tuple[Standing | None, float]) -> Overdue | None:
    """Pass each `(standing, now)` to one `Watch`; returns the last decision. All earlier decisions must be `None`."""
    watch = Watch("host:1 alone", 0)
    *before, (standing, now) = looks
    assert [watch.see(*each) for each in before] == [None] * len(before)
    return watch.see(standing, now)


def test_a_silent_process_is_killed_when_its_turn_is_cancelled() -> None:
    """The process of a cancelled turn is killed only if the process does not renew its lease."""
    standing = replace(HELD, cancelled=True)
    assert seen((replace(standing, is_silent=False), 0), (replace(standing, is_silent=False), 10_000)) is None
    assert seen((HELD, 0), (standing, 1)) is not None


def test_the_time_limit_counts_from_the_last_commit() -> None:
    """A turn's elapsed time is its run time at the last commit plus the time since the watch first saw that commit."""
    assert seen((HELD, 0), (HELD, UNTIL - 1)) is None
    assert seen((HELD, 0), (HELD, UNTIL)) is not None
    later = replace(HELD, tick=5, spent_s=150.0)
    assert seen((HELD, 0), (later, 50), (later, UNTIL)) is not None
    assert seen((HELD, 0), (later, 60), (later, UNTIL)) is None
    following = replace(HELD, turn_id=UUID(int=8), spent_s=0)
    assert seen((HELD, 0), (following, UNTIL - 1), (following, UNTIL)) is None


def test_a_process_that_lost_its_session_is_killed_soon() -> None:
    """A process is killed `LOST_S` seconds after its session is erased or claimed by another runner."""
    taken = replace(HELD, fence=Fence(4, uuid4()), owner="host:2 alone")
    for lost in (None, taken):
        assert seen((HELD, 0), (lost, 1), (lost, LOST_S)) is None
        overdue = seen((HELD, 0), (lost, 1), (lost, 1 + LOST_S))
        assert overdue is not None
        assert overdue.ending is None, "there is nothing to settle"


def test_a_process_that_claims_its_session_again_is_not_killed(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the broker is unavailable, the process claims its own session again for the next turn, under a new fence."""
    monkeypatch.setattr(loop, "_SLICE_S", 0.0)
    first, _ = harness.send("first"), harness.send("second")
    harness.waker.away = True
    watch = Watch("host:1 alone", 0)
    fences: list[Fence] = []
    decisions: list[Overdue | None] = []

    def answer(_request: ModelRequest, _call: ModelCall) -> ModelReply:
        standing = look(harness.runtime, [first.session_id])[first.session_id]
        fences.append(standing.fence)
        decisions.extend(watch.see(standing, len(fences) + later) for later in (0, LOST_S))
        return says("done")

    harness.script(answer, answer)
    Runner(harness.runtime, "host:1 alone").run(first.session_id, alone=True)

    assert len(set(fences)) == 2, "each turn ran under its own claim"
    assert decisions == [None] * 4


def test_a_process_whose_session_was_erased_before_it_was_seen_is_killed_soon() -> None:
    """If the session does not exist at the watch's first look, the process is killed after `LOST_S` seconds."""
    assert seen((None, LOST_S - 1)) is None
    assert seen((None, LOST_S)) is not None


def test_a_process_has_a_minute_to_begin_and_to_end() -> None:
    """A process that holds no lease may be starting or flushing, so it is killed only after a minute."""
    other = replace(HELD, owner=None)
    assert seen((other, 1), (other, IDLE_S - 1)) is None
    assert seen((other, IDLE_S)) is not None
    assert seen((HELD, 100), (other, 101), (other, 100 + IDLE_S)) is None
    assert seen((HELD, 100), (other, 101), (other, 101 + IDLE_S)) is not None


def test_a_process_is_silent_when_it_does_not_renew_its_lease(harness: Harness) -> None:
    """A process is silent if its last renewal is older than the heartbeat interval plus the grace period."""
    sent = harness.send()
    harness.claimed(sent.session_id)
    turn = harness.settings.turn
    harness.move(turn.heartbeat_s + GRACE_S - 1)
    assert not look(harness.runtime, [sent.session_id])[sent.session_id].is_silent
    harness.move(2)
    standing = look(harness.runtime, [sent.session_id, uuid4()])
    assert standing.keys() == {sent.session_id}
    assert standing[sent.session_id].is_silent
    assert standing[sent.session_id].turn_id == sent.turn_id
    assert standing[sent.session_id].limit_s == turn.timeout_s


def test_a_requested_end_kills_no_silent_process(harness: Harness) -> None:
    """A silent process may run until its turn's time limit, even if the end of its session is requested."""
    sent = harness.send()
    harness.claimed(sent.session_id)
    request_end(harness.database, sent.session_id, "requested")
    harness.move(harness.settings.turn.heartbeat_s + GRACE_S + 1)
    standing = look(harness.runtime, [sent.session_id])[sent.session_id]
    assert standing.is_silent
    assert standing.owner is not None
    watch = Watch(standing.owner, 0)

    assert watch.see(standing, 0) is None
    overdue = watch.see(standing, standing.limit_s + GRACE_S)
    assert overdue is not None, "the time limit still applies"


def test_the_limit_is_the_agents_own(harness: Harness) -> None:
    """An agent's `timeout_s` replaces the default time limit of a turn."""
    harness.equip(timeout_s=7)
    sent = harness.send()
    harness.claimed(sent.session_id)
    assert look(harness.runtime, [sent.session_id])[sent.session_id].limit_s == 7


def killed(harness: Harness, session_id: UUID, fence: Fence, turn_id: UUID) -> bool:
    """Settle the turn of a killed process as timed out; returns `False` if the turn was not settled."""
    return Runner(harness.runtime, "parent").settle_killed(session_id, fence, turn_id, Failed(out_of_time(300)))


def test_a_turn_whose_process_was_killed_fails_and_the_next_one_runs(harness: Harness) -> None:
    """If a turn's process is killed at the time limit, the turn fails and the session's next turn runs."""
    first, second = harness.send("first"), harness.send("second")
    claim = harness.claimed(first.session_id)
    harness.move(301)

    assert killed(harness, first.session_id, claim.fence, first.turn_id)

    turn = harness.turn(first.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", DeadlineExceeded.code)
    row = harness.session(first.session_id)
    assert (row.lease_until, row.strikes, row.claims, row.spent_s, row.unsettled) == (None, 0, 0, 0, 1)
    assert first.session_id in harness.waker.sessions
    harness.run(first.session_id)
    assert harness.turn(second.turn_id)["status"] == "done"


@pytest.mark.parametrize(
    ("usages", "expected"),
    [
        ([None], None),
        ([Usage(3, 1), None], {**UNREPORTED, "input_tokens": 3, "output_tokens": 1}),
        ([], {**UNREPORTED, "input_tokens": 0, "output_tokens": 0}),
    ],
)
def test_the_usage_of_a_turn_whose_process_was_killed(
    harness: Harness, usages: list[Usage | None], expected: dict[str, int] | None
) -> None:
    """The usage is the sum of what was reported, and `null` if there are steps and none of them reported it."""
    harness.equip(look_up)
    asked = [replace(calls(("look_up", {})), usage=usage) for usage in usages]

    def dies(*_: object) -> ModelReply:
        raise Crash

    harness.script(*asked, dies)
    sent = harness.send("first")
    with suppress(Crash):
        harness.run(sent.session_id)
    harness.move(301)
    claim = harness.claimed(sent.session_id)

    assert killed(harness, sent.session_id, claim.fence, sent.turn_id)

    assert harness.turn(sent.turn_id)["usage"] == expected


@tool(effect="pure")
def look_up() -> str:
    """Look something up."""
    return "found"


def test_a_cancelled_turn_whose_process_was_killed_is_cancelled(harness: Harness) -> None:
    """If a cancelled turn's process is killed at the time limit, the turn is settled as cancelled, not as failed."""
    sent = harness.send()
    claim = harness.claimed(sent.session_id)
    cancel(harness.runtime, sent.turn_id)

    assert killed(harness, sent.session_id, claim.fence, sent.turn_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"


def test_a_turn_that_another_runner_claimed_is_not_settled(harness: Harness) -> None:
    """If another runner claims the turn before the parent process settles the turn, the parent changes nothing."""
    sent = harness.send()
    stale = harness.claimed(sent.session_id)
    harness.move(harness.settings.turn.lease_s + 10)
    harness.claimed(sent.session_id)

    assert not killed(harness, sent.session_id, stale.fence, sent.turn_id)
    assert harness.turn(sent.turn_id)["status"] == "running"


def test_a_turn_settled_before_the_kill_stays_settled(harness: Harness) -> None:
    """If the killed process had begun the session's next turn, the parent parks that turn without a strike."""
    first, second = harness.send("first"), harness.send("second")
    claim = harness.claimed(first.session_id)
    Runner(harness.runtime, "parent").settle_killed(
        first.session_id, claim.fence, first.turn_id, Failed(out_of_time(300))
    )
    claim = harness.claimed(first.session_id)

    assert not killed(harness, first.session_id, claim.fence, first.turn_id)
    row = harness.session(first.session_id)
    assert (row.lease_until, row.strikes) == (None, 0)
    assert harness.turn(second.turn_id)["status"] == "parked"


def test_a_session_without_a_next_turn_is_released_after_the_kill(harness: Harness) -> None:
    """The killed process had settled the turn: the parent finds none, and leaves no lease."""
    sent = harness.send()
    claim = harness.claimed(sent.session_id)
    assert killed(harness, sent.session_id, claim.fence, sent.turn_id)
    assert not killed(harness, sent.session_id, claim.fence, sent.turn_id)
    assert harness.session(sent.session_id).lease_until is None
