"""A call of a `handoff` makes another agent that of the turn and of the session, in the commit of its round."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, TurnContext, ask_user, handoff, tool
from perdure.agents import Agents
from perdure.database.engine import Moment, Statement
from perdure.models.protocol import ModelReply
from perdure.turns.lease.claim import Ran, Unequipped
from perdure.turns.sweep import sweep
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says, system_text

OVER: tuple[str, dict[str, Any]] = ("to_billing", {})


@tool(effect="pure")
def due() -> str:
    """Return the day."""
    return "Monday"


def _instructions(context: TurnContext) -> str:
    return f"You welcome {context.user_id}."


def equip(harness: Harness, to: Any = None) -> None:
    """Give the default agent a handoff to `to`."""
    billing = to or Agent("billing", lambda context: f"You bill {context.user_id}.", [due], max_steps=3)
    desk = Agent("desk", _instructions, [handoff(billing, name="to_billing")])
    harness.agents = Agents([desk])


def agents(harness: Harness) -> list[str]:
    """The agents of the turns, and that of the session."""
    turns = [row.agent for row in harness.sql("SELECT agent FROM turns ORDER BY turn_id")]
    return [*turns, *(row.agent for row in harness.sql("SELECT agent FROM sessions"))]


def test_the_next_model_call_is_the_other_agents(harness: Harness) -> None:
    """With its instructions, tools and limits. Queued messages and later ones are its own, too."""
    equip(harness)
    first = harness.send("My invoice?")
    harness.send("When is it due?")
    harness.script(calls(OVER), calls(("due", {})), says("On Monday."), calls(("due", {})), says("Monday."))
    harness.run(first.session_id)
    assert harness.turn(first.turn_id)["reply"]["text"] == "On Monday."
    systems = [system_text(request) for request in harness.model.requests]
    assert "You welcome ana." in systems[0]
    assert all("You bill ana." in system for system in systems[1:])
    assert [[each.name for each in request.tools] for request in harness.model.requests] == [
        ["to_billing"], ["due"], ["due"], ["due"], ["due"],
    ]  # fmt: skip
    harness.ask("Thanks.")
    assert agents(harness) == ["billing"] * 4
    assert "the agent 'billing' answers" in harness.lines(first.session_id)[2][1]
    harness.script(*[calls(("due", {}))] * 3)
    assert harness.ask("Again!")["error"]["code"] == "BUDGET_EXHAUSTED"


@pytest.mark.parametrize("adapted", [False, True], ids=["native", "adapted"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_leaves_either_agent_never_half(harness: Harness, moment: Moment, *, adapted: bool) -> None:
    """Before the commit, the handoff is called again by the first agent's next worker; after it, the other goes on."""
    equip(harness, PydanticAgent(name="billing", instructions="You bill people.") if adapted else None)
    sent = harness.send("My invoice?")
    harness.script(calls(OVER), says("On Monday."))
    with harness.crashing(moment, "turns.step_handing_off"):
        harness.run(sent.session_id)
    assert agents(harness) == (["desk"] * 2 if moment == "before" else ["billing"] * 2)
    harness.move(harness.settings.turn.lease_s + 31)
    assert sweep(harness.runtime) is not None
    harness.run(sent.session_id, alone=True)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"]["text"], turn["steps"]) == ("done", "On Monday.", 2)
    assert agents(harness) == ["billing"] * 2
    assert len(harness.model.requests) == 2


def test_the_first_handoff_of_a_reply_counts(harness: Harness) -> None:
    """Another of the same reply fails, and other calls of the reply run."""
    other = Agent("other", "You do not.")
    billing = Agent("billing", "You bill.")
    tools: list[Any] = [handoff(billing, name="to_billing"), handoff(other, name="to_other"), due]
    harness.agents = Agents([Agent("desk", "You welcome.", tools)])
    harness.script(calls(OVER, ("to_other", {}), ("due", {})), says("Here I am."))
    turn = harness.ask()
    assert agents(harness) == ["billing"] * 2
    results = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert (results[1].startswith("Error: not handed over"), results[2]) == (True, "Monday")
    statuses = harness.sql("SELECT status FROM tool_effects ORDER BY position")
    assert [row.status for row in statuses] == ["done", "failed", "done"]


def test_a_worker_without_the_other_agent_leaves_the_turn(harness: Harness) -> None:
    """As a deployment adds the agent, a worker that has it goes on after the commit."""
    equip(harness)
    sent = harness.send("My invoice?")
    del harness.agents._by_name["billing"]  # this worker lacks it
    harness.script(calls(OVER), says("On Monday."))
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "parked"
    equip(harness)
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_a_pinned_turn_is_pinned_to_the_agent_that_has_it_now(harness: Harness) -> None:
    """After a handoff, any worker with the same version of the other agent goes on, and one with another does not."""
    harness.set(pin_agents=True)
    equip(harness)
    sent = harness.send("My invoice?")
    harness.script(calls(OVER), says("On Monday."), says("On Tuesday."))
    with harness.crashing("after", "turns.step_handing_off"):
        harness.run(sent.session_id)
    harness.move(harness.settings.turn.lease_s * 2)
    equip(harness, Agent("billing", "You bill otherwise."))
    assert isinstance(harness.run(sent.session_id), Unequipped)
    equip(harness)
    assert harness.run(sent.session_id) == Ran(1)


def test_a_handoff_needs_approval_if_it_says_so(harness: Harness) -> None:
    """Until a person decides, the first agent has the turn. A denial leaves it there."""
    tools = [handoff(Agent("billing", "You bill."), name="to_billing", requires_approval=True)]
    harness.agents = Agents([Agent("desk", "You welcome.", tools)])
    reply: ModelReply = calls(OVER)
    harness.script(reply, says("On Monday."))
    turn = harness.ask()
    assert (turn["status"], agents(harness)) == ("waiting_approval", ["desk"] * 2)


SEND_SECOND = """
    WITH session AS (
        UPDATE sessions SET last_turn_seq = last_turn_seq + 1, unsettled = unsettled + 1 RETURNING session_id, agent
    ), turn AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, accepted_at)
        SELECT gen_random_uuid(), session_id, 2, 'ana', agent, 'http', 5, 'accepted', perdure_now()
        FROM session RETURNING turn_id
    )
    INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, accepted_at)
    SELECT 'ana', 'http', '2', turn_id, 1, 'second', perdure_now() FROM turn
"""


def test_a_message_that_is_accepted_while_the_commit_waits_is_the_other_agents(harness: Harness) -> None:
    """The commit waits for the lock of the session, and then sees the turn that was queued meanwhile."""
    equip(harness)
    held = threading.Event()
    accepted: list[Future[None]] = []

    def accept() -> None:
        with harness.runtime.database.transaction("test.accept") as transaction:
            transaction.run(Statement("test.lock_session", "SELECT session_id FROM sessions FOR NO KEY UPDATE"), {})
            held.set()
            until(
                lambda: harness.sql(
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                ),
                "the commit waits",
            )
            transaction.run(Statement("test.send_second", SEND_SECOND), {})

    def hold(moment: Moment, name: str) -> None:
        if (moment, name) == ("after", "turns.step") and not accepted:  # the commit of the call
            accepted.append(pool.submit(accept))
            assert held.wait(PATIENCE_S)

    harness.script(calls(OVER), says("On Monday."), says("Monday."))
    with ThreadPoolExecutor(1) as pool, harness.hooked(hold):
        harness.ask("first")
    accepted[0].result(PATIENCE_S)
    assert agents(harness) == ["billing"] * 3
    harness.check()


def test_the_answer_to_a_question_after_a_handoff(harness: Harness) -> None:
    """The client names the agent that it knows with each message. The other agent, which took over, has asked."""
    billing = Agent("billing", "You bill.", [ask_user(name="ask_number", description="Ask for a number.")])
    desk = Agent("desk", "You welcome.", [handoff(billing, name="to_billing")])
    harness.agents = Agents([desk, billing, Agent("other", "You help.")])
    harness.script(calls(OVER), calls(("ask_number", {"question": "Which invoice?"})), says("found"))
    sent = harness.send("my invoice", agent="desk")
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "parked"
    assert not harness.send("hello", agent="other").joined
    answer = harness.send("number 7", agent="desk")
    assert (answer.turn_id, answer.joined) == (sent.turn_id, True)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "found"
