"""What this release cannot read: the turn is given up after its attempts, and the session goes on."""

from __future__ import annotations

from uuid import UUID

import pytest

from perdure import ToolContext, tool
from perdure.database.engine import Statement, as_json
from perdure.errors import Unavailable
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.run.runner import Ran
from perdure.turns.sweep import sweep
from tests.turns.scripted import calls, says
from tests.turns.stage import Stage

SWEEPS_S = (5, 10, 20, 40)
"""Seconds between two attempts; the last one is followed by the give-up in the sweeper's next round."""


_TOO_MANY_ARGUMENTS = Statement("tests.too_many", f"SELECT concat({', '.join(['1'] * 101)})")
"""Refused with SQLSTATE 54023, an OperationalError of the driver's."""


@tool(effect="pure")
def count(context: ToolContext) -> str:
    """Count."""
    with context.working_variables as variables:
        variables["n"] = variables.get("n", 0) + 1
    return "counted"


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _with_open_calls(stage: Stage) -> Accepted:
    """A turn whose runner died when two calls had ended and their results were recorded."""
    stage.equip(count, look)
    stage.script(calls(("count", {}), ("look", {})))
    sent = stage.send("count")
    with stage.crashing("before", "turns.step", 2):
        stage.run(sent.session_id)
    stage.move(31)
    return sent


def _held(stage: Stage) -> Accepted:
    sent = stage.send("held")
    stage.sql("""UPDATE turns SET held = '{"verdict": "of another release"}'""")
    return sent


def _unreadable_effect(stage: Stage) -> Accepted:
    sent = _with_open_calls(stage)
    stage.sql("""UPDATE tool_effects SET variables = '{"n": 1}'""")
    return sent


def _unreadable_calls(stage: Stage) -> Accepted:
    sent = _with_open_calls(stage)
    stage.sql(
        """UPDATE messages SET tool_calls = '[{"id": "call_0"}, {"id": "call_1"}]' WHERE tool_calls IS NOT NULL"""
    )
    return sent


SPOILT = {"a held ending": _held, "a call's variables": _unreadable_effect, "the calls": _unreadable_calls}


def _make_readable(stage: Stage) -> None:
    calls = [{"id": f"call_{number}", "name": name, "arguments": "{}"} for number, name in enumerate(("count", "look"))]
    stage.sql("UPDATE messages SET tool_calls = %(calls)s WHERE tool_calls IS NOT NULL", calls=as_json(calls))


def _woken(stage: Stage, session_id: UUID) -> bool:
    stage.waker.sessions.clear()
    stage.sql("DELETE FROM sweeps")  # which sweeper's round it is does not matter here
    sweep(stage.runtime)
    return session_id in stage.waker.sessions


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_turn_with_an_unreadable_row_is_given_up_and_the_next_one_answered(stage: Stage, spoil: object) -> None:
    """Each attempt is a strike, they come later and later, and giving up reads none of the rows."""
    assert callable(spoil)
    sent: Accepted = spoil(stage)
    left = stage.settings.turn.max_attempts - stage.session(sent.session_id).strikes
    behind = stage.send("and then?")
    for number in range(left):
        assert stage.run(sent.session_id, alone=True) == Ran(0)
        assert stage.turn(sent.turn_id)["status"] == "parked"
        strikes = stage.session(sent.session_id).strikes
        assert strikes == stage.settings.turn.max_attempts - left + number + 1
        if strikes < stage.settings.turn.max_attempts:
            stage.waker.sessions.clear()
            stage.send("are you there?")
            assert stage.waker.sessions == [], "a message does not shorten the back-off"
            cancel(stage.runtime, stage.sql("SELECT turn_id FROM turns ORDER BY seq DESC LIMIT 1")[0].turn_id)
            stage.move(SWEEPS_S[strikes - 1] - 1)
            assert not _woken(stage, sent.session_id)
            stage.move(2)
        assert _woken(stage, sent.session_id)
    stage.script(says("here I am"))
    asked = len(stage.model.requests)
    assert stage.run(sent.session_id) == Ran(2)
    turn = stage.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert f"{stage.settings.turn.max_attempts} times" in turn["reply"]["text"]
    assert stage.turn(behind.turn_id)["reply"]["text"] == "here I am"
    assert len(stage.model.requests) == asked + 1
    if spoil is not _held:
        _make_readable(stage)  # for the check that a provider accepts it: each call has its one result
        results = stage.sql("SELECT content FROM messages WHERE role = 'tool' ORDER BY seq")
        assert [row.content for row in results] == ["counted", "seen"]


def test_an_unreadable_turn_that_is_cancelled_ends_without_a_reply(stage: Stage) -> None:
    """Whoever cancels gets what he asked for, once the attempts are used up."""
    sent = _unreadable_effect(stage)
    cancel(stage.runtime, sent.turn_id)
    for _ in range(stage.settings.turn.max_attempts - 1):  # the first one died
        assert stage.run(sent.session_id, alone=True) == Ran(0)
    assert stage.run(sent.session_id) == Ran(1)
    turn = stage.turn(sent.turn_id)
    assert (turn["status"], turn["reply"]) == ("cancelled", None)


def test_an_unreadable_turn_can_be_interrupted(stage: Stage) -> None:
    """The message that interrupts is accepted, and the calls of the turn before it are closed."""
    sent = _unreadable_calls(stage)
    stage.script(says("of course"))
    interrupting = stage.send("stop that", on_busy="interrupt")
    assert stage.turn(sent.turn_id)["status"] == "cancelled"
    assert stage.run(sent.session_id) == Ran(1)
    assert stage.turn(interrupting.turn_id)["reply"]["text"] == "of course"
    _make_readable(stage)


def test_a_turn_that_is_over_and_unreadable_is_left_out_of_the_prompt(stage: Stage) -> None:
    """One row must not fail all the turns that have it in their window."""
    stage.equip(count, look)
    stage.script(calls(("look", {})), says("looked"))
    stage.ask("look")
    stage.sql("UPDATE messages SET usage = '7' WHERE usage IS NOT NULL")
    stage.script(says("fine"))
    assert stage.ask("how are you?")["reply"]["text"] == "fine"
    prompt = [message.content for message in stage.model.requests[-1].messages[1:]]
    assert prompt == ["how are you?"]


def test_a_held_ending_that_this_release_reads_is_settled_when_its_turn_is_given_up(stage: Stage) -> None:
    """The reply is committed: no error of the snapshot store's takes it back."""
    stage.script(says("unheard"))
    sent = stage.send("hello")
    with stage.crashing("before", "turns.settle"):
        stage.run(sent.session_id)
    found = stage.session(sent.session_id)
    held = {
        "status": "done", "messages": [_record(1, "user", "hello"), _record(2, "assistant", "held")], "replied": True,
        "steps": 1, "usage": {}, "error_code": None, "error_message": None, "variables": None, "case_ids": [],
    }  # fmt: skip
    stage.sql("UPDATE turns SET held = %(held)s", held=as_json(held))
    stage.sql("UPDATE sessions SET strikes = 5")
    stage.move(31)
    assert found.unsettled == 1
    assert stage.run(sent.session_id) == Ran(1)
    assert stage.turn(sent.turn_id)["reply"]["text"] == "held"


def _record(position: int, role: str, content: str) -> dict[str, object]:
    return {"position": position, "role": role, "content": content, "token_count": 1}


def test_a_statement_that_the_database_can_never_run_is_a_strike(stage: Stage) -> None:
    """An error that no waiting mends is no outage: the turn is not tried for ever under one lease."""
    sent = stage.send()

    def too_much(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle"):
            stage.database.run(_TOO_MANY_ARGUMENTS, {})

    with stage.hooked(too_much):
        assert stage.run(sent.session_id) == Ran(0)
    assert stage.session(sent.session_id).strikes == 1
    assert stage.turn(sent.turn_id)["status"] == "parked"


def test_what_fails_after_the_commit_is_no_strike(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is settled; the next one of the session runs under the same lease."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("perdure.turns.run.runner.remember", broken)
    sent = [stage.send("1"), stage.send("2")]
    assert stage.run(sent[0].session_id) == Ran(2)
    assert stage.session(sent[0].session_id).token == 1


def test_a_database_that_never_answers_one_statement_is_a_strike(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found again each time, so it is no outage: the thread is not kept for ever."""
    sent = stage.send()
    loads: list[int] = []

    def refused(*_: object, **__: object) -> None:
        loads.append(1)
        raise Unavailable("The disk under that table cannot be read.")

    monkeypatch.setattr("perdure.turns.run.runner.Transcript.load", refused)
    monkeypatch.setattr("perdure.turns.run.runner.time.sleep", stage.move)
    assert stage.run(sent.session_id) == Ran(0)
    assert 1 < len(loads) < 20
    row = stage.session(sent.session_id)
    assert (stage.turn(sent.turn_id)["status"], row.strikes, row.lease_until) == ("parked", 1, None)
