"""If this release cannot parse a turn's rows, the turn fails after its last attempt, and the session continues."""

from __future__ import annotations

from uuid import UUID

import pytest

from perdure import ToolContext, tool
from perdure.database.engine import Statement, as_json
from perdure.errors import Unavailable
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease.claim import Ran
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, spoken

SWEEPS_S = (5, 10, 20, 40)
"""The pauses in seconds between a turn's attempts."""


_TOO_MANY_ARGUMENTS = Statement("tests.too_many", f"SELECT concat({', '.join(['1'] * 101)})")
"""PostgreSQL rejects this statement with SQLSTATE 54023, and the driver raises an `OperationalError`."""


@tool(effect="pure")
def count(context: ToolContext) -> str:
    """Add one to the variable `n`."""
    with context.working_variables as variables:
        variables["n"] = variables.get("n", 0) + 1
    return "counted"


@tool(effect="pure")
def look() -> str:
    """Return `seen`."""
    return "seen"


def _with_open_calls(harness: Harness) -> Accepted:
    """A turn whose runner died after recording two tool results and before committing the next step."""
    harness.equip(count, look)
    harness.script(calls(("count", {}), ("look", {})))
    sent = harness.send("count")
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(31)
    return sent


def _held(harness: Harness) -> Accepted:
    sent = harness.send("held")
    harness.sql("""UPDATE turns SET unsaved = '{"verdict": "of another release"}'""")
    return sent


def _unreadable_effect(harness: Harness) -> Accepted:
    sent = _with_open_calls(harness)
    harness.sql("""UPDATE tool_effects SET variables = '{"n": 1}'""")
    return sent


def _unreadable_calls(harness: Harness) -> Accepted:
    sent = _with_open_calls(harness)
    harness.sql(
        """UPDATE messages SET tool_calls = '[{"id": "call_0"}, {"id": "call_1"}]' WHERE tool_calls IS NOT NULL"""
    )
    return sent


SPOILT = {"a held ending": _held, "a call's variables": _unreadable_effect, "the calls": _unreadable_calls}


def _make_readable(harness: Harness) -> None:
    calls = [{"id": f"call_{number}", "name": name, "arguments": "{}"} for number, name in enumerate(("count", "look"))]
    harness.sql("UPDATE messages SET tool_calls = %(calls)s WHERE tool_calls IS NOT NULL", calls=as_json(calls))


def _woken(harness: Harness, session_id: UUID) -> bool:
    harness.waker.sessions.clear()
    harness.sql("DELETE FROM sweeps")  # the next round is due at once
    sweep(harness.runtime)
    return session_id in harness.waker.sessions


@pytest.mark.long
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_turn_with_an_unreadable_row_fails_and_the_next_one_is_answered(harness: Harness, spoil: object) -> None:
    """Each attempt counts as failed, and the pauses between attempts grow. After the last attempt, the turn fails."""
    assert callable(spoil)
    sent: Accepted = spoil(harness)
    left = harness.settings.turn.max_attempts - harness.session(sent.session_id).strikes
    behind = harness.send("and then?")
    for number in range(left):
        assert harness.run(sent.session_id, alone=True) == Ran(0)
        assert harness.turn(sent.turn_id)["status"] == "parked"
        strikes = harness.session(sent.session_id).strikes
        assert strikes == harness.settings.turn.max_attempts - left + number + 1
        if strikes < harness.settings.turn.max_attempts:
            harness.waker.sessions.clear()
            harness.send("are you there?")
            assert harness.waker.sessions == [], "a message does not shorten the back-off"
            cancel(harness.runtime, harness.sql("SELECT turn_id FROM turns ORDER BY seq DESC LIMIT 1")[0].turn_id)
            harness.move(SWEEPS_S[strikes - 1] - 1)
            assert not _woken(harness, sent.session_id)
            harness.move(2)
        assert _woken(harness, sent.session_id)
    harness.script(says("here I am"))
    requests_before = len(harness.model.requests)
    assert harness.run(sent.session_id) == Ran(2)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert f"{harness.settings.turn.max_attempts} times" in turn["reply"]["text"]
    assert harness.turn(behind.turn_id)["reply"]["text"] == "here I am"
    assert len(harness.model.requests) == requests_before + 1
    if spoil is not _held:
        _make_readable(harness)  # the harness checks the transcript after the test
        results = harness.sql("SELECT content FROM messages WHERE role = 'tool' ORDER BY seq")
        assert [row.content for row in results] == ["counted", "seen"]


def test_an_unreadable_turn_that_is_cancelled_ends_without_a_reply(harness: Harness) -> None:
    """The cancellation takes effect after the turn's last attempt."""
    sent = _unreadable_effect(harness)
    cancel(harness.runtime, sent.turn_id)
    for _ in range(harness.settings.turn.max_attempts - 1):  # the crash was the first attempt
        assert harness.run(sent.session_id, alone=True) == Ran(0)
    assert harness.run(sent.session_id) == Ran(1)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"]) == ("cancelled", None)


def test_an_unreadable_turn_can_be_interrupted(harness: Harness) -> None:
    """A message that interrupts an unreadable turn is accepted and answered. The unreadable turn is cancelled."""
    sent = _unreadable_calls(harness)
    harness.script(says("of course"))
    interrupting = harness.send("stop that", on_busy="interrupt")
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(interrupting.turn_id)["reply"]["text"] == "of course"
    _make_readable(harness)


def test_a_settled_unreadable_turn_is_left_out_of_the_prompt(harness: Harness) -> None:
    """If a row of a settled turn cannot be parsed, later prompts omit that turn, and later turns succeed."""
    harness.equip(count, look)
    harness.script(calls(("look", {})), says("looked"))
    harness.ask("look")
    harness.sql("UPDATE messages SET usage = '7' WHERE usage IS NOT NULL")
    harness.script(says("fine"))
    assert harness.ask("how are you?")["reply"]["text"] == "fine"
    prompt = [message.content for message in spoken(harness.model.requests[-1])]
    assert prompt == ["how are you?"]


def test_a_readable_held_ending_is_settled_after_the_last_attempt(harness: Harness) -> None:
    """If `turns.unsaved` contains a turn's reply, the turn is settled with that reply after its last attempt."""
    harness.script(says("unheard"))
    sent = harness.send("hello")
    with harness.crashing("before", "turns.settle"):
        harness.run(sent.session_id)
    found = harness.session(sent.session_id)
    held = {
        "status": "done", "messages": [_record(1, "user", "hello"), _record(2, "assistant", "held")], "replied": True,
        "steps": 1, "usage": {}, "error_code": None, "error_message": None, "variables": None, "case_ids": [],
    }  # fmt: skip
    harness.sql("UPDATE turns SET unsaved = %(held)s", held=as_json(held))
    harness.sql("UPDATE sessions SET strikes = 5")
    harness.move(31)
    assert found.unsettled == 1
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "held"


def _record(position: int, role: str, content: str) -> dict[str, object]:
    return {"position": position, "role": role, "content": content, "token_count": 1}


def test_a_statement_that_the_database_can_never_run_is_a_strike(harness: Harness) -> None:
    """If a statement can never succeed, the runner parks the turn, and the attempt counts as failed."""
    sent = harness.send()

    def too_much(moment: str, name: str) -> None:
        if (moment, name) == ("before", "turns.settle"):
            harness.database.run(_TOO_MANY_ARGUMENTS, {})

    with harness.hooked(too_much):
        assert harness.run(sent.session_id) == Ran(0)
    assert harness.session(sent.session_id).strikes == 1
    assert harness.turn(sent.turn_id)["status"] == "parked"


def test_an_error_after_the_commit_is_no_strike(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an error occurs after a turn is settled, the session's next turn runs under the same lease."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("perdure.turns.run.leave.remember", broken)
    sent = [harness.send("1"), harness.send("2")]
    assert harness.run(sent[0].session_id) == Ran(2)
    assert harness.session(sent[0].session_id).token == 1


def test_a_database_that_never_answers_one_statement_is_a_strike(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only one statement keeps failing, the runner stops retrying, and the attempt counts as failed."""
    sent = harness.send()
    loads: list[int] = []

    def refused(*_: object, **__: object) -> None:
        loads.append(1)
        raise Unavailable("The disk under that table cannot be read.")

    monkeypatch.setattr("perdure.turns.run.loop.first_read.load", refused)
    monkeypatch.setattr("perdure.turns.run.commit.time.sleep", harness.move)
    assert harness.run(sent.session_id) == Ran(0)
    assert 1 < len(loads) < 20
    row = harness.session(sent.session_id)
    assert (harness.turn(sent.turn_id)["status"], row.strikes, row.lease_until) == ("parked", 1, None)
