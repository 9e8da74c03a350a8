"""What an agent that another one asks needs from a person: it is shown in the turn that asked, and answered there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from uuid import UUID

import pytest

from perdure import Agent, agent_tool, ask_user, external_tool, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.database.engine import Moment
from perdure.errors import Conflict, Forbidden, NotFound
from perdure.sessions.ending import request_end
from perdure.turns import outbox
from perdure.turns.calls.approvals import Decider, decide, parse_decision
from perdure.turns.calls.asked import UNSEEN
from perdure.turns.calls.awaited import probe_due
from perdure.turns.calls.outside import answer, parse_result
from perdure.turns.cancel import cancel
from tests.turns.broker import Broker
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

RESEARCH = ("research", {"task": "When was Rome founded?"})
READ = ("read", {"task": "Read it."})
WHICH = ("ask_which", {"question": "Which Rome?"})
which = ask_user(Literal["Italy", "Georgia"], name="ask_which")
ANA = Decider.user(UserKey("ana"))


def _dig() -> str:
    """Dig."""
    return "sand"


dig = tool(effect="pure", requires_approval=True, name="dig")(_dig)


@pytest.fixture
def asking(harness: Harness) -> Harness:
    """A harness whose default agent asks another, which may ask the user and a third one."""
    harness.calls = Broker()
    equip(harness, [which])
    return harness


def equip(harness: Harness, tools: list[Any], timeout_s: float = 600) -> None:
    """Give `tools` to the agent that is asked, and to one below it."""
    reader = Agent("reader", "You read.", tools)
    searcher = Agent("searcher", "You search.", [*tools, agent_tool(reader, name="read")])
    research = agent_tool(searcher, name="research", timeout_s=timeout_s)
    harness.agents = Agents([Agent("writer", "You write.", [research, which])])


def begin(harness: Harness, *lines: Any, **given: Any) -> tuple[dict[str, Any], UUID]:
    """Run a turn until the agent that it asks waits; returns the turn, and the id of the other's."""
    harness.script(calls(RESEARCH), *lines)
    turn = harness.ask("How old is Rome?", **given)
    child = UUID(turn["children"][-1]["turn_id"])
    harness.run(child)
    return harness.turn(UUID(turn["turn_id"])), child


def test_the_users_next_message_answers_the_question_of_an_agent_below(asking: Harness) -> None:
    """It is shown as if the turn itself had asked. The message begins no turn: its row belongs to the user's turn."""
    harness = asking
    turn, child = begin(harness, calls(WHICH), says("753 BC."), says("It is old."), metadata={"kept": 1})
    waiting = turn["waiting_for"]
    assert turn["status"] == "parked"
    assert {name: waiting[name] for name in ("kind", "name", "question", "asked", "problem", "turn_id", "agent")} == {
        "kind": "user", "name": "ask_which", "question": "Which Rome?", "asked": 1, "problem": None,
        "turn_id": str(child), "agent": "searcher",
    }  # fmt: skip
    sent = harness.send("Italy!", message_id="2", metadata={"page": "/a"})
    assert (str(sent.turn_id), str(sent.session_id), sent.joined) == (turn["turn_id"], turn["session_id"], True)
    assert harness.waker.sessions[-1] == child
    assert harness.turn(sent.turn_id)["waiting_for"]["kind"] == "agent"
    again = harness.send("Italy!", message_id="2", metadata={"page": "/a"})
    assert (again.turn_id, again.duplicate) == (sent.turn_id, True)
    harness.run(child)
    assert harness.lines(child)[2] == ("tool", "Italy")
    done = harness.resume(turn)
    assert (done["status"], done["reply"]["text"], harness.results(turn)) == ("done", "It is old.", ["753 BC."])
    assert done["metadata"] == harness.turn(child)["metadata"] == {"kept": 1, "page": "/a"}
    rows = harness.sql("SELECT turn_id, position FROM inbox WHERE position > 0 ORDER BY position")
    assert [(row.turn_id, row.position) for row in rows] == [(sent.turn_id, 1), (sent.turn_id, 2)]
    harness.check()
    harness.runtime.eraser.erase(UserKey("ana"))
    assert set(harness.counts().values()) == {0}


def test_an_answer_that_does_not_fit_is_asked_for_again(asking: Harness) -> None:
    """The sentence is shown in the user's turn; the question is delivered each time to the receiver of its reply."""
    harness = asking
    given = {"reply_to": {"url": "https://a.example"}}
    turn, child = begin(harness, calls(WHICH), says("753 BC."), says("It is old."), **given)
    bodies: list[str] = []

    class Carrier:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            del target, message_id
            bodies.append(body.decode())

    outbox.deliver(harness.database, {"url": Carrier()}, harness.waker.deliveries[-1])
    harness.send("France")
    harness.run(child)
    waiting = harness.turn(UUID(turn["turn_id"]))["waiting_for"]
    assert (waiting["asked"], waiting["problem"]) == (2, "Please answer with one of: Italy, Georgia.")
    outbox.deliver(harness.database, {"url": Carrier()}, harness.waker.deliveries[-1])
    assert len(bodies) == 2
    assert all("Which Rome?" in body and turn["turn_id"] in body for body in bodies)
    harness.send("Georgia")
    harness.run(child)
    assert harness.lines(child)[2] == ("tool", "Georgia")
    assert harness.resume(turn)["status"] == "done"


def test_a_cancelled_agent_asks_nothing(asking: Harness) -> None:
    """From the request on: a message is the next turn's, and the user's turn does not show the question any more."""
    harness = asking
    turn, child = begin(harness, calls(WHICH), says("It is old."), says("next"))
    cancel(harness.runtime, child)
    assert harness.turn(UUID(turn["turn_id"]))["waiting_for"] is None
    assert str(harness.send("Italy").turn_id) != turn["turn_id"]


def test_a_question_two_levels_below(asking: Harness) -> None:
    """Each turn above shows it. The answer wakes the turn that asks."""
    harness = asking
    turn, child = begin(harness, calls(READ), calls(WHICH), says("read"), says("found"), says("It is old."))
    grandchild = UUID(harness.turn(child)["children"][0]["turn_id"])
    harness.run(grandchild)
    for each in (UUID(turn["turn_id"]), child):
        assert harness.turn(each)["waiting_for"]["turn_id"] == str(grandchild)
    assert str(harness.send("Italy").turn_id) == turn["turn_id"]
    assert harness.waker.sessions[-1] == grandchild
    harness.run(grandchild)
    harness.run(child)
    assert harness.resume(turn)["reply"]["text"] == "It is old."
    assert harness.lines(grandchild)[2] == ("tool", "Italy")
    harness.check()


def test_the_user_answers_the_questions_of_two_agents_and_of_the_turn_one_after_the_other(asking: Harness) -> None:
    """The turn's own first, then the one that was asked first; while one is judged, the next message is the next's."""
    harness = asking
    harness.script(calls(RESEARCH, RESEARCH, WHICH), calls(WHICH), calls(WHICH), says("a"), says("b"), says("done"))
    turn = harness.ask("How old are both?")
    first, second = (UUID(each["turn_id"]) for each in turn["children"])
    harness.run(second)
    harness.move(1)
    harness.run(first)
    asked = []
    for text in ("Georgia", "Italy", "Georgia"):
        asked.append(harness.turn(UUID(turn["turn_id"]))["waiting_for"].get("turn_id"))
        assert str(harness.send(text).turn_id) == turn["turn_id"]
    assert asked == [None, str(second), str(first)]
    assert str(harness.send("and now?").turn_id) != turn["turn_id"]
    for each in (first, second):
        harness.run(each)
    assert [harness.lines(each)[2][1] for each in (first, second)] == ["Georgia", "Italy"]
    assert harness.resume(turn)["status"] == "done"
    assert harness.results(turn) == ["a", "b", "Georgia"]
    harness.check()


def test_the_answer_as_a_value(asking: Harness) -> None:
    """`waiting_for.call_id` names the call in requests about the user's turn, though both have a `call_0`."""
    harness = asking
    turn, child = begin(harness, calls(WHICH), says("753 BC."), says("It is old."))
    turn_id, call_id = UUID(turn["turn_id"]), turn["waiting_for"]["call_id"]
    with pytest.raises(Conflict):
        answer(harness.runtime, turn_id, parse_result({"call_id": "call_0", "result": "Italy"}))
    answer(harness.runtime, turn_id, parse_result({"call_id": call_id, "result": "Italy"}))
    harness.run(child)
    assert harness.lines(child)[2] == ("tool", "Italy")
    with pytest.raises(NotFound):  # of another turn
        answer(
            harness.runtime, harness.send("x", user_id="ben").turn_id, parse_result({"call_id": call_id, "error": "n"})
        )


def test_calls_that_a_client_runs_are_listed_above(asking: Harness) -> None:
    """A page that follows the user's turn runs them, and brings the result to this turn."""
    harness = asking
    equip(harness, [external_tool("scan", "Scan.")])
    turn, child = begin(harness, calls(("scan", {})), says("753 BC."), says("It is old."))
    [pending] = turn["pending_calls"]
    assert (pending["tool"], pending["turn_id"], turn["waiting_for"]["kind"]) == ("scan", str(child), "agent")
    answer(harness.runtime, UUID(turn["turn_id"]), parse_result({"call_id": pending["call_id"], "result": 7}))
    harness.run(child)
    assert harness.lines(child)[2] == ("tool", "7")
    assert harness.turn(UUID(turn["turn_id"]))["pending_calls"] == []


def test_an_approval_is_decided_in_the_turn_above(asking: Harness) -> None:
    """It is listed there with a name of its own, and so is the decision, also when the other agent has answered."""
    harness = asking
    equip(harness, [dig])
    turn, child = begin(harness, calls(READ, ("dig", {})), says("753 BC."), says("It is old."))
    turn_id = UUID(turn["turn_id"])
    [pending] = turn["pending_approvals"]
    assert (turn["status"], pending["tool"], pending["turn_id"], pending["agent"]) == (
        "parked", "dig", str(child), "searcher",
    )  # fmt: skip
    with pytest.raises(Conflict):
        decide(harness.runtime, turn_id, parse_decision({"call_id": "call_0", "decision": "approve"}), ANA)
    decide(harness.runtime, turn_id, parse_decision({"call_id": pending["call_id"], "decision": "deny"}), ANA)
    assert harness.waker.sessions[-1] == child
    assert harness.turn(turn_id)["pending_approvals"] == []
    harness.run(child)
    harness.script(says("read"), says("753 BC."), says("It is old."))
    harness.run(UUID(harness.turn(child)["children"][0]["turn_id"]))
    harness.run(child)
    done = harness.resume(turn)
    [decision] = done["decisions"]
    assert (done["status"], decision["call_id"], decision["decision"], decision["decided_by"]) == (
        "done", pending["call_id"], "deny", "user:ana",
    )  # fmt: skip
    harness.check()


def test_staffs_approval_of_an_agent_below(asking: Harness) -> None:
    """The user of the turn cannot give it, whichever turn the request names."""
    harness = asking
    equip(harness, [tool(effect="pure", requires_approval=True, approver="staff", name="dig")(_dig)])
    turn, child = begin(harness, calls(("dig", {})), says("753 BC."), says("It is old."))
    [pending] = turn["pending_approvals"]
    for turn_id, call_id in ((UUID(turn["turn_id"]), pending["call_id"]), (child, "call_0")):
        with pytest.raises(Forbidden):
            decide(harness.runtime, turn_id, parse_decision({"call_id": call_id, "decision": "approve"}), ANA)


def _cancelled(harness: Harness, turn: dict[str, Any]) -> None:
    cancel(harness.runtime, UUID(turn["turn_id"]))


def _late(harness: Harness, turn: dict[str, Any]) -> None:
    del turn
    harness.move(601)


def _ended(harness: Harness, turn: dict[str, Any]) -> None:
    request_end(harness.database, UUID(turn["session_id"]), "over")


@pytest.mark.parametrize("end", [_cancelled, _late, _ended])
def test_a_question_for_which_no_turn_waits_takes_no_message(
    asking: Harness, end: Callable[[Harness, dict[str, Any]], None]
) -> None:
    """The message begins a turn, also before a worker cancels the agent that asked."""
    harness = asking
    turn, child = begin(harness, calls(WHICH))
    end(harness, turn)
    waiting = harness.turn(UUID(turn["turn_id"]))["waiting_for"]
    assert waiting is None or waiting["kind"] == "agent" or end is _ended
    sent = harness.send("Italy")
    assert str(sent.turn_id) != turn["turn_id"]
    harness.script(says("It is old."), says("Italy is a country."))
    harness.resume(turn)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    harness.move(61)
    probe_due(harness.runtime, cancel)
    assert harness.turn(child)["status"] == "cancelled"
    harness.check()


@pytest.mark.parametrize(
    "other", [{"channel": "telegram"}, {"agent": "searcher"}, {"user_id": "ben"}, {"on_busy": "interrupt"}]
)
def test_other_messages_are_no_answers(asking: Harness, other: dict[str, Any]) -> None:
    """As for a question of the turn itself."""
    harness = asking
    turn, child = begin(harness, calls(WHICH))
    assert str(harness.send("Italy", **other).turn_id) != turn["turn_id"]
    assert harness.turn(child)["waiting_for"]["kind"] == "user"


def test_two_messages_at_once_are_one_answer_and_one_message(asking: Harness) -> None:
    """The lock of the conversation's row serializes them."""
    harness = asking
    turn, child = begin(harness, calls(WHICH), says("753 BC."), says("old"), says("next"))
    found = side_by_side(lambda: harness.send("Italy"), lambda: harness.send("Georgia"))
    assert sorted(str(each.turn_id) == turn["turn_id"] for each in found) == [False, True]
    harness.run(child)
    harness.resume(turn)
    assert harness.sql("SELECT count(*) FROM turns WHERE status <> 'done'")[0][0] == 0
    harness.check()


@pytest.mark.parametrize("after", ["turns.claim", "turns.close_question"])
def test_a_message_while_the_question_is_closed(asking: Harness, after: str) -> None:
    """A worker closes a question without an answer: the message is the answer, or begins a turn, and is not lost."""
    harness = asking
    equip(harness, [ask_user(name="ask_which", timeout_s=60)])
    turn, child = begin(harness, calls(WHICH))
    harness.script(*[says("done") for _ in range(4)])
    harness.move(61)
    sent: list[Any] = []

    def answer_late(at: Moment, name: str) -> None:
        if (at, name) == ("after", after) and not sent:
            sent.append(None)
            sent.append(harness.send("Italy"))

    with harness.hooked(answer_late):
        harness.run(child)
    is_answer = after == "turns.claim"
    assert (str(sent[1].turn_id) == turn["turn_id"]) == is_answer
    assert harness.lines(child)[2] == ("tool", "Italy" if is_answer else "Error: The user has not answered.")
    harness.resume(turn)
    assert harness.turn(sent[1].turn_id)["status"] == "done"
    harness.check()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "name", ["turns.delegate", "turns.wait_calls", "turns.accept", "turns.refuse_answer", "turns.step", "turns.settle"]
)
def test_a_crash_at_each_commit(asking: Harness, moment: Moment, name: str) -> None:
    """A crash of either turn loses no answer and asks none twice: the first answer does not fit."""
    harness = asking
    sent = harness.send("How old is Rome?", reply_to={"url": "https://a.example"})
    lines = {"writer": [calls(RESEARCH), says("It is old.")], "searcher": [calls(WHICH), says("753 BC.")]}
    answers = ["France", "Italy"]

    def run(session_id: UUID, agent: str) -> None:
        said = harness.sql("SELECT FROM messages WHERE role = 'assistant' AND session_id = %(id)s", id=session_id)
        harness.script(*lines[agent][len(said) :])
        harness.run(session_id)

    def go() -> None:
        for _ in range(3):
            run(sent.session_id, "writer")
            for child in harness.turn(sent.turn_id).get("children", ()):
                run(UUID(child["turn_id"]), "searcher")
            waiting = harness.turn(sent.turn_id)["waiting_for"]
            if answers and waiting is not None and waiting["kind"] == "user":
                harness.send(answers[0], message_id=answers[0])
                answers.pop(0)
        run(sent.session_id, "writer")

    with harness.crashing(moment, name):
        go()
    for _ in range(2):
        harness.move(61)
        go()
        probe_due(harness.runtime, cancel)
    turn = harness.resume({"session_id": str(sent.session_id), "turn_id": str(sent.turn_id)})
    assert (turn["status"], turn["reply"]["text"], answers) == ("done", "It is old.", [])
    [child] = turn["children"]
    assert harness.lines(UUID(child["turn_id"]))[2] == ("tool", "Italy")
    rows = harness.sql("SELECT message_id FROM inbox WHERE turn_id = %(id)s ORDER BY position", id=sent.turn_id)
    assert [row.message_id for row in rows][1:] == ["France", "Italy"]
    harness.check()


def test_nobody_is_asked_over_openais_endpoints(asking: Harness) -> None:
    """Its clients get a question as the end of an answer: the model below reads at once that nobody can answer."""
    harness = asking
    turn, child = begin(harness, calls(WHICH), says("Which Rome?"), says("Which Rome?"), channel="openai")
    assert harness.lines(child)[2] == ("tool", f"Error: {UNSEEN}")
    assert harness.resume(turn)["reply"]["text"] == "Which Rome?"


@pytest.mark.parametrize("end", [_cancelled, _late, _ended])
@pytest.mark.parametrize("needs", ["dig", "scan"])
@pytest.mark.parametrize("by_child", [False, True])
def test_what_no_turn_waits_for_is_refused(asking: Harness, end: Any, needs: str, by_child: bool) -> None:
    """A decision or a result for an agent's call is refused, also before a worker cancels the agent.

    The turn that asked the agent no longer waits for it. `by_child`: the request names the agent's own turn.
    """
    harness = asking
    equip(harness, [dig, external_tool("scan", "Scan.")])
    turn, child = begin(harness, calls((needs, {})))
    [pending] = turn["pending_approvals"] + turn["pending_calls"]
    end(harness, turn)
    harness.script(says("over"))
    harness.resume(turn)
    assert harness.turn(child)["settled_at"] is None
    turn_id, call_id = (child, "call_0") if by_child else (UUID(turn["turn_id"]), pending["call_id"])
    approved = parse_decision({"call_id": call_id, "decision": "approve"})
    brought = parse_result({"call_id": call_id, "result": "sand"})
    give = partial(decide, decision=approved, by=ANA) if needs == "dig" else partial(answer, given=brought)
    with pytest.raises(Conflict):
        give(harness.runtime, turn_id)


def _needed(harness: Harness, turn: dict[str, Any]) -> list[tuple[str, str]]:
    """What the turn shows of the agents below it that a person may answer, each with its `call_id`."""
    shown = harness.turn(UUID(turn["turn_id"]))
    waiting = shown["waiting_for"]
    asked = [("which", waiting["call_id"])] if waiting is not None and waiting["kind"] == "user" else []
    lists = {"dig": shown["pending_approvals"], "scan": shown["pending_calls"]}
    return asked + [(name, each["call_id"]) for name, found in lists.items() for each in found]


def _give(harness: Harness, turn: dict[str, Any], needs: str, call_id: str) -> bool:
    """Give what an agent below the turn needs; returns whether it was taken."""
    turn_id = UUID(turn["turn_id"])
    try:
        if needs == "which":
            return harness.send("Italy").turn_id == turn_id
        if needs == "dig":
            decide(harness.runtime, turn_id, parse_decision({"call_id": call_id, "decision": "approve"}), ANA)
        else:
            answer(harness.runtime, turn_id, parse_result({"call_id": call_id, "result": 7}))
    except Conflict:
        return False
    return True


@pytest.mark.parametrize("end", [_cancelled, _ended])
@pytest.mark.parametrize("needs", ["which", "dig", "scan"])
def test_a_running_turn_between_that_is_to_stop_takes_no_answers(
    asking: Harness, monkeypatch: pytest.MonkeyPatch, end: Any, needs: str
) -> None:
    """Its agent's question is not shown any more, and the user's message is the next turn's, while its tool still runs.

    When the tool has ended, no turn reads what the agent answers.
    """
    harness = asking
    seen: list[Any] = []

    def _slow() -> str:
        """Take a while."""
        [grandchild] = harness.sql("SELECT session_id FROM sessions WHERE depth = 2")
        with monkeypatch.context() as patched:
            patched.setattr(harness.model, "lines", [calls(call)])
            harness.run(grandchild.session_id)
        [before] = _needed(harness, turn)
        end(harness, {"turn_id": str(child), "session_id": str(child)})
        seen.extend([before, _needed(harness, turn), _give(harness, turn, *before)])
        return "done"

    equip(harness, [which, dig, external_tool("scan", "Scan."), tool(effect="pure", name="slow")(_slow)])
    call = {"which": WHICH, "dig": ("dig", {}), "scan": ("scan", {})}[needs]
    harness.script(calls(RESEARCH))
    turn = harness.ask("How old is Rome?")
    child = UUID(turn["children"][0]["turn_id"])
    harness.script(calls(READ, ("slow", {})), says("753 BC."))
    harness.run(child)
    assert seen == [(needs, seen[0][1]), [], False]


@pytest.mark.parametrize("needs", ["which", "dig"])
def test_an_agent_whose_session_is_to_end_asks_nothing(asking: Harness, needs: str) -> None:
    """Neither its question nor its approval is shown any more, nor taken, before a worker ends the wait."""
    harness = asking
    equip(harness, [which, dig])
    turn, child = begin(harness, calls(WHICH if needs == "which" else ("dig", {})))
    [before] = _needed(harness, turn)
    request_end(harness.database, child, "over")
    assert (_needed(harness, turn), _give(harness, turn, *before)) == ([], False)
