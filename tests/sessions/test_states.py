"""The drawing of the states is current, and every change of state follows the table of transitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from perdure import tool
from perdure.channels.http.app import create_app
from perdure.cli import connecting
from perdure.cli.inspect.sessions import show
from perdure.database.engine import Database, Statement, as_json
from perdure.database.tables import SESSION_STATES
from perdure.errors import IllegalTransition
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.sessions import queries as sessions
from perdure.sessions.diagram import draw
from perdure.sessions.ending import Ended, request_end
from perdure.sessions.states import TRANSITIONS, State, Trigger, sql
from perdure.turns.calls.approvals import Decision, decide
from perdure.turns.lease import leave_queries
from perdure.turns.lease import queries as lease_queries
from perdure.turns.lease.keeper import Keeper
from perdure.turns.run import queries as run_queries
from tests.sessions.conftest import ender
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

BY_TRIGGER = {
    trigger: Statement(
        f"tests.{trigger.name.lower()}",
        f"UPDATE sessions SET state = {sql(trigger)} WHERE session_id = %(session_id)s RETURNING state",  # noqa: S608 (constants)
    )
    for trigger in Trigger
}

OWNED = {
    lease_queries.BEGIN_NEXT: Trigger.TURN_CLAIMED,
    leave_queries.SHUT_DOWN: Trigger.TURN_STOPPED,
    leave_queries.RELEASE: Trigger.TURN_STOPPED,
    sessions.SAVE_SUMMARY: Trigger.SUMMARY_SAVED,
    sessions.FINISH_ENDING: Trigger.CLEANED_UP,
}
"""The statements that the holder of a session's lease runs, each with its trigger."""


def test_the_drawing_is_current() -> None:
    """docs/sessions.md contains the drawing that `python -m perdure.sessions.diagram` prints."""
    assert draw() in (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()


def test_the_table_has_the_states_of_the_database() -> None:
    """The table of transitions has the states that the database allows.

    Each state except the first can be reached, and each state except the last can be left.
    """
    assert tuple(State) == SESSION_STATES
    ways = [(before, after) for (before, _), after in TRANSITIONS.items() if before is not after]
    assert {after for _, after in ways} == set(State) - {State.INITIALIZING}
    assert {before for before, _ in ways} == set(State) - {State.ENDED}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(triggers=st.lists(st.sampled_from(Trigger), max_size=12), begin=st.sampled_from(State))
def test_random_triggers_follow_the_table(harness: Harness, triggers: list[Trigger], begin: State) -> None:
    """Each trigger makes the table's transition, or fails with an error that names the state and the trigger."""
    session_id = harness.send(user_id=str(uuid4())).session_id
    state = begin
    _put(harness, session_id, state)
    for trigger in triggers:
        expected = TRANSITIONS.get((state, trigger))
        if expected is None:
            _refused(harness.database, BY_TRIGGER[trigger], {"session_id": session_id}, state, trigger)
        else:
            rows = harness.database.run(BY_TRIGGER[trigger], {"session_id": session_id})
            assert rows[0].state == expected
            state = expected
        assert harness.session(session_id).state == state


@pytest.mark.parametrize("statement", OWNED, ids=lambda each: each.name)
def test_the_statements_follow_the_table(harness: Harness, statement: Statement) -> None:
    """In every state, each statement of a lease's holder makes the table's transition, or fails and writes nothing."""
    session_id, turn_id, parameters = _held(harness)
    for state in State:
        _put(harness, session_id, state)
        before = (harness.session(session_id), harness.turn(turn_id))
        expected = TRANSITIONS.get((state, OWNED[statement]))
        if expected is None:
            _refused(harness.database, statement, parameters, state, OWNED[statement])
            assert (harness.session(session_id), harness.turn(turn_id)) == before
        else:
            assert harness.database.run(statement, parameters)
            assert harness.session(session_id).state == expected


@pytest.mark.parametrize("runs_tools", [True, False])
def test_a_step_calls_tools_only_while_thinking(harness: Harness, runs_tools: bool) -> None:
    """Tool calls change the state from `thinking` to `tool_executing`. The calls' results change the state back."""
    session_id, _, parameters = _held(harness)
    trigger = Trigger.TOOL_REQUESTED if runs_tools else Trigger.TOOL_RESULT
    step = {
        **parameters, "runs_tools": runs_tools, "messages": "[]", "added": 0, "intents": "[]", "results": "[]",
        "joins": not runs_tools, "max_chars": 100,
    }  # fmt: skip
    for state in State:
        _put(harness, session_id, state)
        expected = TRANSITIONS.get((state, trigger))
        if expected is None:
            _refused(harness.database, run_queries.STEP, step, state, trigger)
        else:
            assert harness.database.run(run_queries.STEP, step)
            step["tick"] += 1
            assert harness.session(session_id).state == expected


@pytest.mark.parametrize(("status", "trigger"), [("done", Trigger.RESPONSE_COMPLETE), ("failed", Trigger.TURN_STOPPED)])
def test_a_turn_settles_only_where_the_table_allows_it(harness: Harness, status: str, trigger: Trigger) -> None:
    """A turn settles with a reply only in the state `thinking`. A failed turn can settle in other states, too."""
    for state in State:
        session_id, turn_id, parameters = _held(harness, user_id=f"of {state}")
        _put(harness, session_id, state)
        settling = {**parameters, "status": status, "keep": False, "messages": "[]", "added": 0}
        if (state, trigger) in TRANSITIONS:
            harness.database.run(leave_queries.SETTLE, settling)
            assert harness.turn(turn_id)["status"] == status
        else:
            _refused(harness.database, leave_queries.SETTLE, settling, state, trigger)
            assert harness.turn(turn_id)["status"] == "running"


def test_a_state_is_visible_while_it_lasts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keeper: Keeper
) -> None:
    """While a session is in a state, HTTP and the CLI show that state."""
    monkeypatch.setattr(connecting, "opened", lambda: nullcontext((harness.runtime.settings, harness.database)))
    session_id = UUID(int=0)
    seen: list[tuple[str, str]] = []

    def look(*_: object) -> None:
        show(str(session_id), as_json=True)
        on_the_command_line = json.loads(capsys.readouterr().out)["state"]
        seen.append((client.get(f"/v1/sessions/{session_id}").json()["state"], on_the_command_line))

    def looking(reply: ModelReply) -> Callable[[ModelRequest, ModelCall], ModelReply]:
        def respond(_: ModelRequest, __: ModelCall) -> ModelReply:
            look()
            return reply

        return respond

    @tool(effect="pure")
    def peep() -> str:
        """Look."""
        look()
        return "seen"

    ask_first = tool(effect="pure", name="ask_first", requires_approval=True)(peep.function)
    harness.equip(peep, ask_first)
    replies = [looking(calls((name, {}))) for name in ("peep", "ask_first")]
    harness.script(*replies, looking(says("done")), looking(says("They looked.")))
    with TestClient(create_app(harness.runtime, lambda: True), base_url="http://127.0.0.1:8080") as client:
        sent = harness.send()
        session_id = sent.session_id
        look()
        harness.run(session_id)
        look()
        (pending,) = harness.turn(sent.turn_id)["pending_approvals"]
        decide(harness.runtime, sent.turn_id, Decision(call_id=pending["call_id"], decision="approve"))
        look()
        harness.run(session_id)
        request_end(harness.database, session_id, "enough")
        assert ender(harness, keeper, look).end(session_id) == Ended()
        look()
    states = ["active", "thinking", "tool_executing", "thinking", "waiting_approval", "thinking", "tool_executing",
              "thinking", "summarizing", "ending", "ended"]  # fmt: skip
    assert seen == [(state, state) for state in states]


def _held(harness: Harness, **given: Any) -> tuple[UUID, UUID, dict[str, Any]]:
    """Claim a session. Returns the session's id, the turn's id, and parameters for the lease holder's statements."""
    sent = harness.send(**given)
    claimed = harness.claimed(sent.session_id)
    parameters = {
        **claimed.fence.on(sent.session_id), "turn_id": sent.turn_id, "lease_s": 30.0, "fingerprints": "{}",
        "spent_s": 1.0, "forgiven": True, "tick": 0, "summary": "", "title": "", "key_topics": [], "extractive": True,
        "channel": "http", "steps": 1, "usage": as_json({}), "data": None, "error_code": None, "error_message": None,
        "replied": False, "woken": True,
        "delivery_id": sent.turn_id, "variables": None, "saved": False, "case_ids": [],
    }  # fmt: skip
    return sent.session_id, sent.turn_id, parameters


def _put(harness: Harness, session_id: UUID, state: State) -> None:
    harness.sql("UPDATE sessions SET state = %(state)s WHERE session_id = %(id)s", state=state, id=session_id)


def _refused(
    database: Database, statement: Statement, parameters: dict[str, Any], state: State, trigger: Trigger
) -> None:
    with pytest.raises(IllegalTransition) as refused:
        database.run(statement, parameters)
    assert refused.value.state == state
    assert refused.value.trigger.startswith(trigger)
