"""`perdure pause`: messages are accepted, and their turns wait until the pause ends."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, agent_tool
from perdure.access.tenants import UserKey, user_key
from perdure.agents import Agents
from perdure.observe.readings import Source
from perdure.observe.status import explain
from perdure.turns import pauses
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import Queued, Ran
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

ANN, BOB = user_key("acme", "ann"), UserKey("bob")
ANYBODY: dict[str, Any] = {"tenant": None, "user": None, "agent": None}


def _swept(harness: Harness) -> None:
    """Run the sweeper, and each session that it wakes."""
    harness.waker.sessions.clear()
    harness.move(harness.settings.turn.sweep_s + 1)
    sweep(harness.runtime)
    for each in harness.waker.sessions:
        harness.run(each)


@pytest.mark.parametrize(
    ("paused", "waits"),
    [
        ({"user": ANN}, {"ann, assistant", "ann, clerk"}),
        ({"tenant": "acme"}, {"ann, assistant", "ann, clerk"}),
        ({"agent": "clerk"}, {"ann, clerk", "bob, clerk"}),
        ({"user": ANN, "agent": "clerk"}, {"ann, clerk"}),
        ({"tenant": "bolt"}, set()),
        ({"tenant": "acme", "user": UserKey("bob")}, {"bob, assistant", "bob, clerk"}),
    ],
)
def test_what_is_paused_waits_and_the_rest_runs(harness: Harness, paused: dict[str, Any], waits: set[str]) -> None:
    """A user's key decides the tenant. After the end of the pause, the sweeper admits what has waited."""
    harness.agents = Agents([Agent("assistant", "You help."), Agent("clerk", "You file.")])
    given = {**ANYBODY, **paused}
    pauses.pause(harness.database, **given)
    pauses.pause(harness.database, **given)
    sent = {}
    for name, key in (("ann", ANN), ("bob", BOB)):
        for agent in ("assistant", "clerk"):
            sent[f"{name}, {agent}"] = harness.send(user_id=key, agent=agent, conversation=agent)
    harness.script(*[says("yes")] * 4)
    ran = {name: harness.run(each.session_id) for name, each in sent.items()}
    assert {name for name, outcome in ran.items() if outcome == Queued()} == waits
    _swept(harness)
    assert {name for name, each in sent.items() if harness.turn(each.turn_id)["status"] == "accepted"} == waits
    assert pauses.count(harness.database, **given) == len(waits)
    assert pauses.resume(harness.database, **given)
    assert not pauses.resume(harness.database, **given)
    _swept(harness)
    assert {harness.turn(each.turn_id)["status"] for each in sent.values()} == {"done"}


def test_a_running_turn_continues_and_the_next_one_waits(harness: Harness) -> None:
    """A session that is held begins no further turn."""
    first, second = harness.send("one"), harness.send("two")

    def pause_then_answer(*_: Any) -> Any:
        pauses.pause(harness.database, **{**ANYBODY, "user": UserKey("ana")})
        return says("yes")

    harness.script(pause_then_answer)
    assert harness.run(first.session_id) == Ran(1)
    assert [harness.turn(each.turn_id)["status"] for each in (first, second)] == ["done", "accepted"]
    assert harness.run(first.session_id) == Queued()
    source = Source(harness.database, harness.clock)
    harness.move(100)
    assert [explain(row, source.read()).reason for row in source.stuck(60, 10)] == [
        "paused (`perdure pause` lists the pauses, and `perdure resume` ends one)"
    ]


def test_a_pause_of_others_lets_the_next_turn_of_a_held_session_begin(harness: Harness) -> None:
    """Only a pause of the session's own user, tenant or agent keeps it."""
    harness.agents = Agents([Agent("assistant", "You help."), Agent("clerk", "You file.")])
    others: tuple[dict[str, Any], ...] = ({"user": ANN}, {"tenant": "acme"}, {"agent": "clerk"})
    for number, paused in enumerate((*others, {"agent": "assistant"})):
        given = {**ANYBODY, **paused}
        for _ in range(2):
            sent = harness.send(user_id=f"user {number}")

        def pause_then_answer(*_: Any, given: dict[str, Any] = given) -> Any:
            pauses.pause(harness.database, **given)
            return says("yes")

        harness.script(pause_then_answer)
        assert harness.run(sent.session_id) == Ran(2 if paused in others else 1), paused
        pauses.resume(harness.database, **given)


def test_a_paused_turn_can_be_cancelled(harness: Harness) -> None:
    """One that has not begun ends at once, and one that has begun is settled by the worker that claims it."""
    pauses.pause(harness.database, **{**ANYBODY, "agent": "assistant"})
    sent = harness.send()
    assert harness.run(sent.session_id) == Queued()
    cancel(harness.runtime, sent.turn_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"


def test_an_agent_that_another_one_asks_is_paused_too(harness: Harness) -> None:
    """An agent that misbehaves must stop, whoever asks it."""
    clerk = Agent("clerk", "You file.")
    harness.agents = Agents([Agent("boss", "You help.", [agent_tool(clerk, name="ask")]), clerk])
    pauses.pause(harness.database, **{**ANYBODY, "agent": "clerk"})
    harness.script(calls(("ask", {"task": "file"})), says("filed"), says("done"))
    sent = harness.send(agent="boss")
    harness.run(sent.session_id)
    (child,) = harness.sql("SELECT session_id FROM sessions WHERE depth = 1")
    assert harness.run(child.session_id) == Queued()
    pauses.resume(harness.database, **{**ANYBODY, "agent": "clerk"})
    for _ in range(3):
        _swept(harness)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"


def test_a_crash_under_a_pause_neither_loses_nor_runs_the_turn(harness: Harness) -> None:
    """The turn of a worker that died waits; it continues after the pause."""
    harness.script(says("yes"))
    sent = harness.send()
    with harness.crashing("before", "turns.settle"):
        harness.run(sent.session_id)
    pauses.pause(harness.database, **{**ANYBODY, "user": UserKey("ana")})
    harness.move(harness.settings.turn.lease_s + 1)
    assert harness.run(sent.session_id) == Queued()
    pauses.resume(harness.database, **{**ANYBODY, "user": UserKey("ana")})
    _swept(harness)
    assert harness.turn(sent.turn_id)["status"] == "done"
