"""While a call waits for approval, no call of the same model reply runs, and no worker holds the session's lease."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from perdure import tool
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.sessions.ending import request_end
from perdure.turns.calls.approvals import DENIED, ENDED, EXPIRED, decide, parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import NotNeeded, Ran
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

_ran: list[tuple[str, Any]] = []


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    _ran.append(("pay", amount))
    return f"paid {amount}"


@tool(requires_approval=lambda arguments: arguments["amount"] > 100)
def lend(amount: int) -> str:
    """Lend an amount."""
    _ran.append(("lend", amount))
    return f"lent {amount}"


@tool(effect="pure")
def look() -> str:
    """Return `seen`."""
    _ran.append(("look", None))
    return "seen"


@pytest.fixture(autouse=True)
def equipped(harness: Harness) -> None:
    """Give the agent the three tools, and clear the record of calls."""
    _ran.clear()
    harness.equip(pay, lend, look)


def _waiting(harness: Harness, *wanted: tuple[str, dict[str, Any]], **given: Any) -> dict[str, Any]:
    """Run a turn in which the model makes the calls `wanted`, until the turn waits for approval."""
    harness.script(calls(*(wanted or (("pay", {"amount": 5}),))), says("done"))
    turn = harness.ask(**given)
    assert turn["status"] == "waiting_approval"
    return turn


def _decide(harness: Harness, turn: dict[str, Any], call_id: str, decision: str, **given: Any) -> None:
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": call_id, "decision": decision, **given}))


def _effects(harness: Harness) -> list[tuple[str, str]]:
    return [
        tuple(row) for row in harness.sql("SELECT status, arguments FROM tool_effects ORDER BY message_seq, position")
    ]


def test_the_calls_of_the_last_permitted_step_are_decided_and_run(harness: Harness) -> None:
    """The limit ends the turn before its next step, and not before the calls of this one."""
    harness.equip(pay, max_steps=1)
    turn = _waiting(harness)
    _decide(harness, turn, turn["pending_approvals"][0]["call_id"], "approve")
    assert harness.resume(turn)["error"]["code"] == "BUDGET_EXHAUSTED"
    assert _ran == [("pay", 5)]


def test_a_waiting_turn_holds_no_lease_and_costs_no_attempt(harness: Harness) -> None:
    """Neither a wake-up nor the sweeper resumes a waiting turn. An approval resumes it, without a new attempt."""
    turn = _waiting(harness)
    [pending] = turn["pending_approvals"]
    assert (pending["call_id"], pending["tool"], pending["arguments"]) == ("call_0", "pay", {"amount": 5})
    row = harness.session(UUID(turn["session_id"]))
    assert (row.state, row.lease_until, row.strikes, row.claims, turn["attempts"]) == (
        "waiting_approval",
        None,
        0,
        0,
        1,
    )
    assert isinstance(harness.run(row.session_id), NotNeeded)
    harness.move(harness.settings.turn.sweep_s * 100)
    swept = sweep(harness.runtime)
    assert swept is not None
    assert swept.sessions == 0
    assert _ran == []

    _decide(harness, turn, "call_0", "approve")
    assert harness.waker.sessions[-1] == row.session_id
    assert harness.session(row.session_id).state == "thinking"
    done = harness.resume(turn)
    assert (done["status"], done["attempts"], done["pending_approvals"]) == ("done", 1, [])
    assert _ran == [("pay", 5)]
    assert harness.results(turn) == ["paid 5"]


def test_a_predicate_decides_which_calls_wait(harness: Harness) -> None:
    """A call waits for approval if the tool's `requires_approval` predicate returns true or raises."""
    harness.script(calls(("lend", {"amount": 100})), says("lent"))
    assert harness.ask()["status"] == "done"
    assert _waiting(harness, ("lend", {"amount": 101}))["pending_approvals"][0]["tool"] == "lend"

    @tool(requires_approval=lambda arguments: arguments["no such"])
    def odd(amount: int) -> str:
        """Return the amount."""
        return str(amount)

    assert odd.needs_approval({"amount": 1})


def test_no_call_of_a_reply_begins_before_all_are_decided(harness: Harness) -> None:
    """After the last decision, all valid calls run, except the denied ones. The results keep the calls' order."""
    turn = _waiting(harness, ("look", {}), ("pay", {"amount": 1}), ("nobody", {}), ("pay", {"amount": 2}))
    assert [each["call_id"] for each in turn["pending_approvals"]] == ["call_1", "call_3"]
    _decide(harness, turn, "call_3", "deny")
    assert isinstance(harness.run(UUID(turn["session_id"])), NotNeeded)
    assert [each["call_id"] for each in harness.turn(UUID(turn["turn_id"]))["pending_approvals"]] == ["call_1"]
    assert _ran == []
    _decide(harness, turn, "call_1", "approve")
    assert harness.resume(turn)["status"] == "done"
    assert sorted(_ran, key=str) == [("look", None), ("pay", 1)]
    seen, paid, unknown, denied = harness.results(turn)
    assert (seen, paid, denied) == ("seen", "paid 1", DENIED)
    assert "no tool 'nobody'" in unknown
    assert [status for status, _ in _effects(harness)] == ["done", "done", "denied"]


def test_a_tool_that_appears_while_a_call_waits_is_not_run_for_it(harness: Harness) -> None:
    """A call of an unknown tool does not run, even if a deploy adds the tool while another call waits for approval."""

    @tool(effect="pure")
    def nobody() -> str:
        """Return a text."""
        _ran.append(("nobody", None))
        return "here now"

    turn = _waiting(harness, ("nobody", {}), ("pay", {"amount": 1}))
    harness.equip(pay, lend, look, nobody)
    _decide(harness, turn, "call_1", "approve")
    assert harness.resume(turn)["status"] == "done"
    assert _ran == [("pay", 1)]
    missing, paid = harness.results(turn)
    assert (missing, paid) == ("Error: this call was not run.", "paid 1")


def test_an_approved_call_runs_with_the_edited_arguments(harness: Harness) -> None:
    """Arguments that an approver edits are validated, stored in the call's row and shown to the model."""
    turn = _waiting(harness)
    with pytest.raises(InvalidRequest, match="amount"):
        _decide(harness, turn, "call_0", "approve", arguments={"amount": "much"})
    with pytest.raises(InvalidRequest, match="arguments"):
        _decide(harness, turn, "call_0", "deny", arguments={"amount": 1})
    _decide(harness, turn, "call_0", "approve", arguments={"amount": 3})
    assert harness.resume(turn)["status"] == "done"
    assert _ran == [("pay", 3)]
    assert _effects(harness) == [("done", '{"amount":3}')]
    [result] = harness.results(turn)
    assert '{"amount":3}' in result
    assert result.endswith("paid 3")


def test_each_call_is_decided_once_and_by_its_own_id(harness: Harness) -> None:
    """If the model reuses a call id in a turn, a second decision on the first call does not decide the later call."""
    harness.script(calls(("pay", {"amount": 1})), calls(("pay", {"amount": 2})), says("done"))
    turn = harness.ask()
    with pytest.raises(NotFound, match="call"):
        _decide(harness, turn, "call_9", "approve")
    with pytest.raises(NotFound, match="turn"):
        _decide(harness, {"turn_id": turn["session_id"]}, "call_0", "approve")
    _decide(harness, turn, "call_0", "approve")
    with pytest.raises(Conflict, match="decided"):
        _decide(harness, turn, "call_0", "deny")
    second = harness.resume(turn)
    [pending] = second["pending_approvals"]
    assert pending["call_id"] != "call_0"
    with pytest.raises(Conflict, match="decided"):
        _decide(harness, turn, "call_0", "approve")
    _decide(harness, turn, pending["call_id"], "deny")
    assert harness.resume(turn)["status"] == "done"
    assert _ran == [("pay", 1)]


def test_each_approved_call_has_its_own_time_limit(harness: Harness) -> None:
    """It begins with the call."""
    limits = {"first": 5, "second": 700}
    harness.equip(*(tool(requires_approval=True, name=name, timeout_s=limits[name])(_acted) for name in limits))
    turn = _waiting(harness, *((name, {}) for name in limits))
    harness.move(60)
    for call_id in ("call_0", "call_1"):
        _decide(harness, turn, call_id, "approve")
    with harness.crashing("after", "turns.begin_approved"):
        harness.resume(turn)
    rows = harness.sql("SELECT tool, extract(epoch FROM decide_at - intended_at)::int AS limit_s FROM tool_effects")
    assert {row.tool: row.limit_s for row in rows} == limits


def _acted() -> str:
    """Act."""
    return "acted"


def test_one_of_two_concurrent_decisions_on_a_call_counts(harness: Harness) -> None:
    """Each call accepts one decision. Only the decision on the turn's last undecided call publishes a wake-up."""
    turn = _waiting(harness, ("pay", {"amount": 1}), ("pay", {"amount": 2}))
    harness.waker.sessions.clear()
    found = side_by_side(
        *(
            lambda call_id=call_id, decision=decision: _decide(harness, turn, call_id, decision)
            for call_id in ("call_0", "call_1")
            for decision in ("approve", "deny")
        )
    )
    assert sum(each is None for each in found) == 2
    assert sum(isinstance(each, Conflict) for each in found) == 2
    assert len(harness.waker.sessions) == 1
    assert harness.resume(turn)["status"] == "done"


def test_a_call_that_is_not_approved_in_time_is_denied(harness: Harness) -> None:
    """At expiry the sweeper wakes the turn, and the model reads the denial. A late approval is a conflict.

    It does not matter to the turn that a call of another turn can still be decided.
    """
    turn = _waiting(harness, ("look", {}), ("pay", {"amount": 1}))
    harness.move(60)
    later = _waiting(harness, user_id="bob")
    harness.move(harness.settings.approval.expires_s - 59)
    assert harness.turn(UUID(turn["turn_id"]))["pending_approvals"] == []
    with pytest.raises(Conflict, match="has expired"):
        _decide(harness, turn, "call_1", "approve")
    harness.waker.sessions.clear()
    sweep(harness.runtime)
    assert harness.waker.sessions == [UUID(turn["session_id"])]
    done = harness.resume(turn)
    assert (done["status"], done["attempts"]) == ("done", 1)
    assert harness.results(turn) == ["seen", EXPIRED]
    assert len(harness.turn(UUID(later["turn_id"]))["pending_approvals"]) == 1


@pytest.mark.parametrize(("moment", "commit"), [("after", "turns.step"), ("before", "turns.wait_approval"),
                                                ("after", "turns.wait_approval")])  # fmt: skip
def test_a_crash_before_the_wait_repeats_no_call(harness: Harness, moment: Any, commit: str) -> None:
    """If a worker crashes before the wait, the next worker waits for approval without calling the model again."""
    harness.script(calls(("pay", {"amount": 5}), ("look", {})), says("done"))
    sent = harness.send()
    with harness.crashing(moment, commit):
        harness.run(sent.session_id)
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], _ran) == ("waiting_approval", [])
    _decide(harness, turn, "call_0", "approve")
    with harness.crashing("after", "turns.begin_approved"):
        harness.run(sent.session_id)
    harness.move(harness.settings.turn.lease_s + harness.settings.turn.tool_timeout_s + 1)
    harness.run(sent.session_id, alone=True)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert _ran == [("look", None)]  # `pay` is unsafe and may have begun before the second crash: it is not run
    assert len(harness.model.requests) == 2


def test_a_wait_survives_a_runner_that_drains(harness: Harness) -> None:
    """If a worker begins to drain after it commits a call, the call waits for approval, and runs after the approval."""
    harness.script(calls(("pay", {"amount": 5})), says("done"))
    sent = harness.send()
    runner = Runner(harness.runtime, "leaving")
    keeper = runner.keeper
    with harness.hooked(lambda at, name: keeper.begin_shutdown() if (at, name) == ("after", "turns.step") else None):
        runner.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] in {"parked", "waiting_approval"}
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert turn["status"] == "waiting_approval"
    _decide(harness, turn, "call_0", "approve")
    assert harness.resume(turn)["reply"]["text"] == "done"


def test_cancelling_a_waiting_turn(harness: Harness) -> None:
    """Cancelling needs no worker. One commit denies the waiting call and settles the turn. Then the next turn runs."""
    turn = _waiting(harness, ("pay", {"amount": 5}), ("look", {}), reply_to={"url": "https://a.example"})
    behind = harness.send("next")
    assert isinstance(harness.run(behind.session_id), NotNeeded)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    cancelled = harness.turn(UUID(turn["turn_id"]))
    assert (cancelled["status"], cancelled["pending_approvals"]) == ("cancelled", [])
    assert [status for status, _ in _effects(harness)] == ["denied", "failed"]
    assert len(harness.waker.deliveries) == 2  # the request for approval, and the end
    with pytest.raises(Conflict):
        _decide(harness, turn, "call_0", "approve")
    assert harness.run(behind.session_id) == Ran(1)
    assert _ran == []


def test_interrupting_a_waiting_turn(harness: Harness) -> None:
    """Accepting an interrupting message cancels the waiting turn. Then the message's own turn runs."""
    turn = _waiting(harness)
    sent = harness.send("never mind", on_busy="interrupt")
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    harness.script(says("fine"))
    assert harness.run(sent.session_id) == Ran(1)
    assert _ran == []


def test_a_requested_end_denies_waiting_calls(harness: Harness) -> None:
    """If the session's end is requested, the waiting call is denied. The turn finishes before the session ends."""
    turn = _waiting(harness)
    session_id = UUID(turn["session_id"])
    assert not request_end(harness.database, session_id, "enough").may_end
    assert harness.turn(UUID(turn["turn_id"]))["pending_approvals"] == []
    with pytest.raises(Conflict, match="no longer waits"):
        _decide(harness, turn, "call_0", "approve")
    harness.waker.sessions.clear()
    sweep(harness.runtime)
    assert harness.waker.sessions == [session_id]
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == [ENDED]
    assert harness.waker.endings == [session_id]
    assert _ran == []


def test_an_end_or_a_cancellation_requested_first_prevents_the_wait(harness: Harness) -> None:
    """If the session's end or the turn's cancellation is requested before the wait starts, the turn does not wait."""
    for interfere in ("end", "cancel"):
        harness.script(calls(("pay", {"amount": 5})), says("done"))
        sent = harness.send(user_id=interfere)
        session_id, turn_id = sent.session_id, sent.turn_id

        def request_before_the_wait(at: str, name: str) -> None:
            if (at, name) == ("after", "turns.begin_approved"):
                harness.database.observe = None
                if interfere == "end":  # noqa: B023 (called within this round)
                    request_end(harness.database, session_id, "enough")  # noqa: B023
                else:
                    cancel(harness.runtime, turn_id)  # noqa: B023

        with harness.hooked(request_before_the_wait):
            harness.run(session_id)
        assert harness.turn(turn_id)["status"] == ("done" if interfere == "end" else "cancelled")
    assert _ran == []


def test_a_clock_set_back_does_not_keep_a_turn_waiting_for_ever(harness: Harness) -> None:
    """After the clock is set back by a day, the turn still waits and can be approved."""
    harness.move(86_400)
    turn = _waiting(harness)
    harness.move(-86_400)
    harness.waker.sessions.clear()
    sweep(harness.runtime)
    harness.run(UUID(turn["session_id"]))
    again = harness.turn(UUID(turn["turn_id"]))
    assert again["status"] == "waiting_approval"
    _decide(harness, turn, "call_0", "approve")
    assert harness.resume(turn)["status"] == "done"


def test_a_malformed_decision_is_rejected() -> None:
    """The error message names the invalid field."""
    for given in ({}, {"call_id": "", "decision": "approve"}, {"call_id": "a", "decision": "maybe"},
                  {"call_id": "a", "decision": "approve", "arguments": [1]},
                  {"call_id": 1, "decision": "deny"}):  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"call_id|decision|arguments"):
            parse_decision(given)
