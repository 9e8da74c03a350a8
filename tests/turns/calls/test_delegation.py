"""A call of another agent: a session of its own, which its caller's turn waits for without a worker."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, ToolContext, agent_tool, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.database.engine import Moment
from perdure.errors import Conflict, NotFound, RateLimited
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions.ending import request_end
from perdure.sessions.forking import fork
from perdure.sessions.reading import list_sessions
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.awaited import probe_due, report
from perdure.turns.calls.children import CANCELLED
from perdure.turns.calls.result_values import ABANDONED
from perdure.turns.calls.waiting import list_waiting
from perdure.turns.cancel import cancel
from perdure.turns.costs import cost_of
from perdure.turns.sweep import sweep
from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, system_text

TIMEOUT_S = 600
TASK = "When was Rome founded?"
RESEARCH = ("research", {"task": TASK})
MODEL = "openai:gpt-5-mini"
"""A model with known prices. The harness calls none."""


@pytest.fixture
def delegating(harness: Harness) -> Harness:
    """A harness whose default agent asks another."""
    harness.calls = Broker()
    equip(harness)
    return harness


def equip(harness: Harness, searcher: Any = None, timeout_s: float = TIMEOUT_S, **limits: Any) -> None:
    """Give the default agent the tool `research`, which asks `searcher`."""
    research = agent_tool(searcher or Agent("searcher", "You search."), name="research", timeout_s=timeout_s)
    harness.agents = Agents([Agent("writer", "You write.", [research], **limits)])


def ask_and_wait(harness: Harness, *then: Any, **given: Any) -> tuple[dict[str, Any], UUID]:
    """Run the caller's turn until it waits for the other agent; returns the turn, and the id of the other's."""
    harness.script(calls(RESEARCH), *then)
    turn = harness.ask(**given)
    assert turn["status"] == "parked"
    return turn, UUID(turn["children"][0]["turn_id"])


def probe(harness: Harness) -> None:
    """Let a minute pass, and probe as each worker does."""
    harness.move(61)
    probe_due(harness.runtime, cancel)


def test_an_agent_answers_a_call_in_a_session_of_its_own(delegating: Harness) -> None:
    """The caller waits without a lease. The answer is the call's result, and its tokens are the caller's.

    The other's session has the user and the metadata, and ends with its turn: without summary, search and memories.
    """
    harness = delegating
    turn, child = ask_and_wait(harness, says("753 BC."), says("It is old."), metadata={"language": "de"})
    assert (turn["waiting_for"]["kind"], turn["waiting_for"]["name"]) == ("agent", "research")
    [listed] = turn["children"]
    assert (listed["call_id"], listed["tool"], listed["agent"], listed["status"]) == (
        "call_0", "research", "searcher", "accepted",
    )  # fmt: skip
    assert harness.session(UUID(turn["session_id"])).lease_until is None
    assert harness.waker.sessions[-1] == child
    harness.run(child)
    asked = harness.turn(child)
    assert (asked["status"], asked["parent_turn_id"], asked["metadata"]) == ("done", turn["turn_id"], turn["metadata"])
    assert harness.lines(child) == [("user", TASK), ("assistant", "753 BC.")]
    assert harness.waker.sessions[-1] == UUID(turn["session_id"])
    done = harness.resume(turn)
    assert (done["status"], done["reply"]["text"], done["attempts"], done["steps"]) == ("done", "It is old.", 1, 2)
    assert harness.results(turn) == ["753 BC."]
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"]) == (30, 9)
    row = harness.session(child)
    assert (row.user_id, row.end_requested_at is not None, row.routable) == ("ana", True, False)
    assert harness.waker.endings == [child]
    words = harness.sql("SELECT DISTINCT session_id FROM message_words")
    assert [each.session_id for each in words] == [UUID(turn["session_id"])]


def test_the_users_next_message_goes_on_in_the_conversation(delegating: Harness) -> None:
    """The other's session is in no list for the user, takes no message, is not forked, and counts as no message."""
    harness = delegating
    turn, child = ask_and_wait(harness)
    next_one = harness.send("And Athens?")
    assert next_one.session_id == UUID(turn["session_id"])
    for session_id in (child, str(child)):
        with pytest.raises(NotFound):
            harness.send("hello", session_id=session_id)
    listed = partial(list_sessions, harness.database, UserKey("ana"))
    assert [each["session_id"] for each in listed(delegated=False)] == [turn["session_id"]]
    assert {each["session_id"]: each["parent_turn_id"] for each in listed()} == {
        turn["session_id"]: None, str(child): turn["turn_id"],
    }  # fmt: skip
    with harness.database.transaction("test") as transaction, pytest.raises(Conflict):
        fork(transaction, harness.clock, child)
    guard = harness.settings.guard.model_copy(update={"per_minute": 3})
    harness.settings = harness.settings.model_copy(update={"guard": guard})
    harness.send("third")
    with pytest.raises(RateLimited):
        harness.send("fourth")


class Report(BaseModel):
    """What the searcher finds."""

    year: int


@pytest.mark.parametrize(
    ("searcher", "line", "result"),
    [
        (Agent("searcher", "You search.", output=Report), says('{"year": -753}'), '{"year": -753}'),
        (PydanticAgent(name="searcher", instructions="You search."), says("753 BC."), "753 BC."),
        (PydanticAgent(name="searcher", output_type=Report), calls(("final_result", {"year": -753})), '{"year": -753}'),
        (
            Agent("searcher", "You search."),
            RuntimeError("no library"),
            "Error: I tried this 5 times without getting anywhere, so I gave up.",
        ),
    ],
    ids=["output", "adapted", "adapted output", "failing"],
)
def test_the_answer_is_the_result(delegating: Harness, searcher: Any, line: Any, result: str) -> None:
    """The data of an agent with an output, the text of another, or the message of its failure, as a tool error."""
    harness = delegating
    equip(harness, searcher)
    turn, child = ask_and_wait(harness, *([line] * 5 if isinstance(line, Exception) else [line]), says("It is old."))
    for _ in range(6):
        harness.run(child)
        harness.move(1_000)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == [result]


@pytest.mark.parametrize("how", ["cancelled", "ended", "too late"])
def test_a_call_that_is_not_awaited_any_more_is_cancelled(delegating: Harness, how: str) -> None:
    """A cancelled caller, an ended conversation and the end of the call's time reach the other agent, and those below.

    The other agent waits for one of its own, so that two levels are reached.
    """
    harness = delegating
    below = agent_tool(Agent("reader", "You read."), name="read", timeout_s=10 * TIMEOUT_S)
    equip(harness, Agent("searcher", "You search.", [below]))
    turn, child = ask_and_wait(harness, calls(("read", {"task": "Read."})))
    harness.run(child)
    grandchild = UUID(harness.turn(child)["children"][0]["turn_id"])
    harness.script(says("It is old."))
    if how == "cancelled":
        cancel(harness.runtime, UUID(turn["turn_id"]))
    elif how == "ended":
        request_end(harness.database, UUID(turn["session_id"]), "over")
    else:
        harness.move(TIMEOUT_S + 1)
    ended = harness.resume(turn)
    assert ended["status"] == ("cancelled" if how == "cancelled" else "done")
    assert harness.results(turn)[0] == ABANDONED if how != "cancelled" else True
    probe(harness)
    assert harness.turn(child)["status"] == "cancelled"
    probe(harness)
    assert harness.turn(grandchild)["status"] == "cancelled"
    assert harness.sql("SELECT 1 FROM tool_effects WHERE probe_at IS NOT NULL") == []


def test_the_cancellation_of_the_other_agent_is_the_result(delegating: Harness) -> None:
    """An operator may cancel the other's turn alone: before it has begun, or while it waits."""
    harness = delegating
    turn, child = ask_and_wait(harness)
    cancel(harness.runtime, child)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == [f"Error: {CANCELLED}"]


def test_a_call_that_waits_for_a_person_is_listed_and_decided(delegating: Harness) -> None:
    """The caller waits on, while a person decides about a call of the other agent.

    The receiver of the caller's reply gets the request, but not the other's reply. A reminder of the other is one
    of the conversation.
    """

    @tool(effect="pure", requires_approval=True)
    def dig(context: ToolContext) -> str:
        """Dig."""
        assert context.reminders is not None
        context.reminders.add("Dig again.", None, "0 9 * * *", None)
        return "a coin"

    harness = delegating
    reply_url = "http://127.0.0.1:9/reply"
    harness.settings = harness.settings.model_copy(update={"reply_urls": ("127.0.0.0/8",)})
    equip(harness, Agent("searcher", "You search.", [dig]))
    asked = {"reply_to": {"url": reply_url}, "conversation": "rome"}
    turn, child = ask_and_wait(harness, calls(("dig", {})), says("A coin."), says("It is old."), **asked)
    harness.run(child)
    [waiting] = list_waiting(harness.database, user=UserKey("ana"))
    assert (waiting.body["turn_id"], waiting.body["tool"]) == (str(child), "dig")
    [delivery] = harness.sql("SELECT delivery_id, turn_id, target FROM deliveries")
    assert (delivery.turn_id, delivery.target) == (child, {"url": reply_url, "approval": True})
    assert harness.waker.deliveries == [delivery.delivery_id]
    probe(harness)
    assert harness.resume(turn)["status"] == "parked"
    decide(harness.runtime, child, parse_decision({"call_id": "call_0", "decision": "approve"}))
    harness.run(child)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == ["A coin."]
    assert [row.turn_id for row in harness.sql("SELECT turn_id FROM deliveries ORDER BY created_at")] == [
        child, UUID(turn["turn_id"]),
    ]  # fmt: skip
    [reminder] = harness.sql("SELECT agent, conversation, channel FROM reminders")
    assert tuple(reminder) == ("writer", "rome", "http")


@pytest.mark.parametrize("limits", [{"max_tokens": 20}, {"max_cost": 0.000_015}])
def test_what_the_other_used_counts_against_the_callers_limit(delegating: Harness, limits: dict[str, Any]) -> None:
    """The caller's model is not called again. Its own call alone is within the limit: 15 tokens, $0.0000125."""
    harness = delegating
    equip(harness, Agent("searcher", "You search.", model=MODEL), model=MODEL, **limits)
    turn, child = ask_and_wait(harness, says("753 BC."))
    harness.run(child)
    ended = harness.resume(turn)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert (ended["usage"]["input_tokens"], ended["usage"]["output_tokens"]) == (20, 7)
    cost = cost_of(harness.database, UUID(turn["turn_id"]), harness.settings, harness.agents)
    assert cost == Decimal("0.000019")


@tool(effect="pure", name="dig")
def _dig() -> str:
    """Dig."""
    return "sand"


@pytest.mark.parametrize("limits", [{"max_tokens": 45}, {"max_cost": 0.000_037}])
def test_a_child_has_no_more_than_its_caller_has_left(delegating: Harness, limits: dict[str, Any]) -> None:
    """It stops before its next model call, though its own agent has no limit, and so does its sibling."""
    harness = delegating
    searcher = Agent("searcher", "You search.", [_dig], model=MODEL)
    equip(harness, searcher, model=MODEL, **limits)
    harness.script(calls(RESEARCH, RESEARCH), *[calls(("dig", {}))] * 2, says("never"))
    turn = harness.ask("Rome?")
    first, second = (UUID(each["turn_id"]) for each in turn["children"])
    harness.run(first)
    ended = harness.turn(first)
    assert (ended["status"], ended["error"]["code"], ended["steps"]) == ("failed", "BUDGET_EXHAUSTED", 2)
    assert "of writer" in ended["error"]["message"]
    harness.run(second)
    assert (harness.turn(second)["status"], harness.turn(second)["steps"]) == ("failed", 0)
    ended = harness.resume(turn)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert len(harness.model.requests) == 3


def test_a_grandchild_has_no_more_than_the_first_caller_has_left(delegating: Harness) -> None:
    """The limit counts through an agent in between that has none. Without a limit, nothing stops the child."""
    harness = delegating
    last = Agent("digger", "You dig.", [_dig])
    middle = Agent("searcher", "You search.", [agent_tool(last, name="research")])
    for limit, replied in ((45, False), (None, True)):
        top = Agent("writer", "You write.", [agent_tool(middle, name="research")], max_tokens=limit)
        harness.agents = Agents([top, middle, last])
        found = [calls(RESEARCH), calls(RESEARCH), calls(("dig", {}))]
        harness.script(*found, says("A coin."), says("It was a coin."), says("It is old."))
        turn = harness.ask("Rome?", user_id=f"user {limit}")
        child = UUID(turn["children"][0]["turn_id"])
        harness.run(child)
        grandchild = UUID(harness.turn(child)["children"][0]["turn_id"])
        harness.run(grandchild)
        assert (harness.turn(grandchild)["status"] == "done") == replied
        harness.run(child)
        assert (harness.resume(turn)["status"] == "done") == replied


def test_delegation_has_a_limit_of_depth(delegating: Harness) -> None:
    """An agent that asks itself is refused below the limit: its model reads why."""
    harness = delegating
    harness.agents = Agents([Agent("writer", "You write.", [agent_tool("writer", name="research")])])
    harness.set(delegation_depth=2)
    turn, child = ask_and_wait(harness, calls(RESEARCH), calls(RESEARCH), says("deep"), says("middle"), says("top"))
    harness.run(child)
    deepest = UUID(harness.turn(child)["children"][0]["turn_id"])
    harness.run(deepest)
    assert "at most 2 times in a chain" in harness.lines(deepest)[2][1]
    harness.run(child)
    assert harness.resume(turn)["reply"]["text"] == "top"
    assert len(harness.sql("SELECT 1 FROM sessions")) == 3


def test_children_take_none_of_their_users_places(delegating: Harness) -> None:
    """With one place per user, a child runs before a turn of the user, and another one after it."""
    harness = delegating
    harness.set(user_concurrency=1)
    harness.script(calls(RESEARCH, RESEARCH))
    turn = harness.ask()
    first, second = (UUID(each["turn_id"]) for each in turn["children"])
    other = harness.send("hello", conversation="another")
    for session_id in (first, other.session_id, second):
        harness.claimed(session_id)


def test_erasing_the_user_erases_the_other_session(delegating: Harness) -> None:
    """No row of it remains, and a worker that runs it writes nothing more."""
    harness = delegating
    _, child = ask_and_wait(harness)
    tenure = harness.claimed(child)
    harness.runtime.eraser.erase(UserKey("ana"))
    assert harness.counts() == dict.fromkeys(harness.counts(), 0)
    assert tenure.fence.token > 0
    report(harness.runtime, child)  # the call does not exist any more


class _Both:
    """Plays both agents: the writer asks once, and repeats what it was told."""

    name = "scripted"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        del call
        last = request.messages[-1]
        if "You search." in system_text(request):
            return says("753 BC.")
        return says(f"I read: {last.content}") if last.role is Role.TOOL else calls(RESEARCH)


_PARENT = ("turns.step", "turns.delegate", "turns.wait_calls", "turns.finish_task", "turns.settle")


def _drive(harness: Harness, session_id: UUID) -> None:
    """Do what workers do until no turn is left: run what is due, sweep and probe, as time passes."""
    for _ in range(30):
        for row in harness.sql("SELECT session_id FROM sessions WHERE unsettled > 0 ORDER BY session_id"):
            harness.run(row.session_id, alone=True)
        if harness.session(session_id).unsettled == 0:
            return
        harness.move(harness.settings.turn.lease_s + 10)
        sweep(harness.runtime)
        probe_due(harness.runtime, cancel)
    raise AssertionError("the turn does not end")


@pytest.mark.long
@pytest.mark.parametrize("adapted", [False, True], ids=["native", "adapted"])
def test_a_kill_at_any_commit_neither_loses_nor_doubles_an_answer(delegating: Harness, *, adapted: bool) -> None:
    """The process dies before or after each commit of both turns. The agent is asked once and answers once."""
    harness = delegating
    harness.any_model = _Both()
    searcher = PydanticAgent(name="searcher", instructions="You search.") if adapted else None
    equip(harness, searcher, timeout_s=100_000)  # so that only the sweeper's probe finds an answer
    seen: Counter[str] = Counter()

    def observe(moment: Moment, name: str) -> None:
        seen[name] += moment == "before"

    with harness.hooked(observe):
        _drive(harness, harness.send("How old?", user_id="first").session_id)
    assert set(_PARENT) <= set(seen)
    moments: tuple[Moment, ...] = ("before", "after")
    places = [
        (moment, name, nth)
        for name, count in seen.items()
        if name.startswith(("turns.", "sweep.")) and name not in {"turns.accept", "turns.enqueue"}
        for nth in range(1, count + 1)
        for moment in moments
    ]
    for number, (moment, name, nth) in enumerate(places):
        accepted = harness.send("How old?", user_id=f"user {number}")
        with harness.crashing(moment, name, nth):
            _drive(harness, accepted.session_id)
        _drive(harness, accepted.session_id)
        turn, place = harness.turn(accepted.turn_id), f"{moment} {name} {nth}"
        assert (turn["status"], turn["reply"]["text"]) == ("done", "I read: 753 BC."), place
        assert [role for role, _ in harness.lines(accepted.session_id)] == ["user", "assistant", "tool", "assistant"]
        [child] = turn["children"]
        assert child["status"] == "done", place
        assert harness.lines(UUID(child["turn_id"])) == [("user", TASK), ("assistant", "753 BC.")], place
        assert turn["usage"]["input_tokens"] == 30, place


def test_no_message_joins_a_turn_whose_tokens_the_answer_uses_up(delegating: Harness) -> None:
    """The commit that takes the answer in also takes in the tokens of the other agent, which end the turn."""
    harness = delegating
    equip(harness, max_tokens=20)
    turn, child = ask_and_wait(harness, says("753 BC."), says("answer to the second"))
    second = harness.send("second", on_busy="steer")
    harness.run(child)
    assert harness.resume(turn)["status"] == "failed"
    assert harness.turn(second.turn_id)["reply"]["text"] == "answer to the second"
    harness.check()


def test_a_child_that_is_cancelled_before_it_begins_ends(delegating: Harness) -> None:
    """Its session ends with its turn, as if a worker had settled the turn."""
    harness = delegating
    turn, child = ask_and_wait(harness)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    probe(harness)
    assert harness.turn(child)["status"] == "cancelled"
    assert harness.session(child).end_requested_at is not None
    assert harness.waker.endings == [child]


def test_a_cancelled_turn_counts_the_tokens_of_the_answer(delegating: Harness) -> None:
    """The other agent has answered, and the turn is cancelled before the answer is committed with a step."""
    harness = delegating
    turn, child = ask_and_wait(harness, says("753 BC."))
    harness.run(child)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    done = harness.resume(turn)
    assert (done["status"], harness.results(turn)) == ("cancelled", ["753 BC."])
    answered = harness.turn(child)["usage"]
    assert done["usage"]["input_tokens"] == 10 + answered["input_tokens"]
    assert cost_of(harness.database, child, harness.settings, harness.agents) is None
    harness.check()
