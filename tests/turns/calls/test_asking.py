"""`ask_user`: a question parks the turn, and the user's next message that fits is the result of the call."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from perdure import (
    Agent,
    Allow,
    Refuse,
    Replace,
    SleepUntil,
    TurnContext,
    Usage,
    Verdict,
    ask_user,
    celery_tool,
    external_tool,
    guard,
    sleep_until,
    tool,
)
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.database.engine import Moment, Statement
from perdure.errors import Conflict, SettingsError, ToolError
from perdure.models.prices import cost
from perdure.sessions.ending import request_end
from perdure.tools.awaited.asking import AskUser, Misfit
from perdure.turns import outbox
from perdure.turns.calls.outside import answer, parse_result
from perdure.turns.calls.result_values import _UNKNOWN
from perdure.turns.cancel import cancel
from perdure.turns.costs import cost_of
from perdure.turns.lease.claim import NotNeeded
from tests.turns.awaiting import end_task, export
from tests.turns.broker import Broker
from tests.turns.harness import Harness, side_by_side
from tests.turns.scripted import calls, says

QUESTION = {"question": "Which size?"}
MODEL = "openai:gpt-5-mini"
"""A model with known prices. The harness calls none."""

CHAT = {"channel": "telegram", "place": {"chat": "1"}, "asker": "ana"}


class Size(Enum):
    """Sizes of a cup."""

    SMALL = "small"
    LARGE = "large"


class Address(BaseModel):
    """An address."""

    street: str
    postal_code: int = Field(alias="postal_code")
    country: str = "France"


size = ask_user(Size, name="ask_size")


def _ask(harness: Harness, *tools: Any, **given: Any) -> dict[str, Any]:
    """Run a turn whose model asks for a size, until it waits for the user."""
    harness.equip(*(tools or (size,)))
    harness.script(calls(("ask_size", QUESTION)), says("done"))
    turn = harness.ask("tea, please", **given)
    assert turn["status"] == "parked"
    return turn


def test_the_next_message_is_the_answer(harness: Harness) -> None:
    """It begins no turn: its value is the result of the call, and its row in the inbox belongs to the turn."""
    turn = _ask(harness)
    waiting = turn["waiting_for"]
    assert {name: waiting[name] for name in ("kind", "name", "question", "asked", "problem", "call_id")} == {
        "kind": "user", "name": "ask_size", "question": "Which size?", "asked": 1, "problem": None,
        "call_id": "call_0",
    }  # fmt: skip
    assert harness.session(UUID(turn["session_id"])).lease_until is None
    sent = harness.send("Large!", message_id="2")
    assert (str(sent.turn_id), sent.status, sent.duplicate) == (turn["turn_id"], "parked", False)
    assert harness.waker.sessions[-1] == sent.session_id
    assert harness.turn(sent.turn_id)["waiting_for"] is None
    again = harness.send("Large!", message_id="2")
    assert (again.turn_id, again.duplicate) == (sent.turn_id, True)
    with pytest.raises(Conflict):
        harness.send("Small", message_id="2")
    done = harness.resume(turn)
    assert (done["status"], done["attempts"], harness.results()) == ("done", 1, ["large"])
    assert harness.lines(sent.session_id) == [
        ("user", "tea, please"), ("assistant", ""), ("tool", "large"), ("assistant", "done"),
    ]  # fmt: skip
    rows = harness.sql("SELECT message_id, turn_id, position FROM inbox ORDER BY position")
    assert [(row.turn_id, row.position) for row in rows] == [(sent.turn_id, 1), (sent.turn_id, 2)]
    harness.check()
    assert harness.ask("next")["status"] == "done"


_PARIS = '{"street": "Rue X", "postal_code": 75001, "country": "France"}'


class Strict(BaseModel):
    """A type that converts nothing."""

    model_config = ConfigDict(strict=True)
    day: date
    count: int


class Split(BaseModel):
    """A type whose validator fails for anything but a text."""

    tags: Annotated[list[str], BeforeValidator(lambda value: value.split(","))]


_STRICT = '{"day": "2026-03-01", "count": 3}'

READINGS: list[tuple[Any, Any, str | None]] = [
    (str, " as they wrote it ", "as they wrote it"),
    (str, '{"a": 1}', '{"a": 1}'),
    (bool, "Yes", "true"),
    (bool, "no", "false"),
    (bool, "perhaps", None),
    (int, "12", "12"),
    (int, "a dozen", None),
    (float, " 2.5 ", "2.5"),
    (date, "2026-03-01", "2026-03-01"),
    (Literal["S", "M"], "s", "S"),
    (Literal[1, 2], "2", "2"),
    (Literal[1, 2], "3", None),
    (Size, "LARGE.", "large"),
    (list[int], "[1, 2]", "[1, 2]"),
    (
        Address,
        '{"street": "Rue X", "postal_code": 75001}',
        _PARIS,
    ),
    (Address, "Street: Rue X\npostal code: 75001", _PARIS),
    (Address, "Rue X, Paris", None),
    (Address, "street: Rue X", None),
    (bool, "Yes.", "true"),
    (bool, "NO!", "false"),
    (int, "5.", "5"),
    (date, "2026-03-01.", "2026-03-01"),
    (str, "Yes.", "Yes."),
    (float, "inf", None),
    (float, "nan", None),
    (Strict, "day: 2026-03-01\ncount: 3", _STRICT),
    (Strict, '{"day": "2026-03-01", "count": 3}', _STRICT),
    (Annotated[bool, Field(strict=True)], "yes", "true"),
    (Split, '{"tags": ["a"]}', None),
    (Split, "tags: a,b", '{"tags": ["a", "b"]}'),
]


@pytest.mark.parametrize(("kind", "text", "value"), READINGS)
def test_what_a_text_means(kind: Any, text: str, value: str | None) -> None:
    """A text is read in the obvious way; what does not fit is refused with a sentence for the user."""
    asks = ask_user(kind)
    if value is not None:
        assert asks.read(text, is_text=True) == value
        return
    with pytest.raises(Misfit) as refused:
        asks.read(text, is_text=True)
    assert str(refused.value).startswith(("Please ", "This answer cannot be used"))
    assert "\n" not in str(refused.value)


def test_the_sentences_say_what_is_missing() -> None:
    """They name the choices, the kind of the value, or the members."""
    said = {}
    for kind in (Size, bool, int, Address):
        with pytest.raises(Misfit) as refused:
            ask_user(kind).read("street: Rue X" if kind is Address else "?", is_text=True)
        said[kind] = str(refused.value)
    assert said[Size] == "Please answer with one of: small, large."
    assert said[bool] == "Please answer yes or no."
    assert said[int] == "Please answer with a number."
    assert "postal_code" in said[Address]
    assert "street" not in said[Address]


def test_a_json_answer_is_judged_as_json() -> None:
    """The sentence names what is wrong in the answer, and not that a line is missing."""
    for given, is_text in (
        ('{"street": "Rue X", "postal_code": "no"}', True),
        ('Here: {"street": "Rue X", "postal_code": "no"}', True),
        ({"street": "Rue X", "postal_code": "no"}, False),
    ):
        with pytest.raises(Misfit, match=r"postal_code: must be a valid integer") as refused:
            ask_user(Address).read(given, is_text=is_text)
        assert "street" not in str(refused.value)


def test_a_json_value_is_read_as_strictly_as_the_type_says() -> None:
    """A program that answers knows the types of JSON."""
    asks = ask_user(Strict)
    assert asks.read({"day": "2026-03-01", "count": 3}, is_text=False) == _STRICT
    with pytest.raises(Misfit, match="count"):
        asks.read({"day": "2026-03-01", "count": "3"}, is_text=False)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "two words"}, {"description": " "}, {"timeout_s": 0}, {"tries": 0}, {"tries": 11}, {"answer": lambda: 1}],
)
def test_a_wrong_declaration(wrong: dict[str, Any]) -> None:
    """A wrong value is refused when the tool is made, with the value's name."""
    with pytest.raises(SettingsError, match="output" if "answer" in wrong else next(iter(wrong))):
        ask_user(**{"answer": str, **wrong})


def test_an_answer_that_does_not_fit_is_asked_for_again(harness: Harness) -> None:
    """The user is told what is missing; after three such answers, the model reads what the user said."""
    turn = _ask(harness, reply_to={"url": "https://a.example"})
    deliveries = [harness.sql("SELECT * FROM deliveries")[0]]
    for number, text in enumerate(("huge", "tiny"), start=2):
        harness.send(text)
        turn = harness.resume(turn)
        assert turn["status"] == "parked"
        waiting = turn["waiting_for"]
        assert (waiting["asked"], waiting["problem"]) == (number, "Please answer with one of: small, large.")
        deliveries.append(harness.sql("SELECT * FROM deliveries")[0])
    assert len({row.delivery_id for row in deliveries}) == 3
    assert all(row.status == "pending" and row.target["question"] for row in deliveries)
    assert harness.waker.deliveries[-3:] == [row.delivery_id for row in deliveries]
    harness.send("gigantic")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["Error: The user's answers do not fit. They said: huge; tiny; gigantic"]
    assert harness.sql("SELECT status FROM tool_effects")[0].status == "failed"
    assert harness.sql("SELECT count(*) FROM turns")[0][0] == 1
    harness.check()


def test_a_question_is_delivered(harness: Harness) -> None:
    """The receiver gets the turn with its question; a question that is answered is not sent any more."""

    class Carrier:
        def __init__(self) -> None:
            self.bodies: list[Any] = []

        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            del target, message_id
            self.bodies.append(body.decode())

    turn = _ask(harness, reply_to={"url": "https://a.example"})
    carrier = Carrier()
    outbox.deliver(harness.database, {"url": carrier}, harness.waker.deliveries[-1])
    assert "Which size?" in carrier.bodies[0]
    harness.send("huge")
    turn = harness.resume(turn)
    harness.send("small")
    outbox.deliver(harness.database, {"url": carrier}, harness.waker.deliveries[-1])
    assert len(carrier.bodies) == 1
    harness.resume(turn)
    outbox.deliver(harness.database, {"url": carrier}, harness.waker.deliveries[-1])
    assert '"text": "done"' in carrier.bodies[1]


CRASHES: list[tuple[Moment, str, int]] = [
    (moment, name, 1)
    for name in ("turns.wait_calls", "turns.accept", "turns.refuse_answer", "turns.step", "turns.settle")
    for moment in ("before", "after")
]


@pytest.mark.parametrize(("moment", "name", "nth"), CRASHES)
def test_a_crash_at_each_commit(harness: Harness, moment: Moment, name: str, nth: int) -> None:
    """A crash loses no answer and asks no answer twice: the question is asked twice because the first does not fit."""
    harness.equip(size)
    lines = [calls(("ask_size", QUESTION)), says("done")]
    sent = harness.send("tea, please", reply_to={"url": "https://a.example"})
    session_id, answers = sent.session_id, ["huge", "large"]

    def go() -> None:
        said = harness.sql("SELECT count(*) FROM messages WHERE role = 'assistant'")[0][0]
        harness.script(*lines[said:])
        harness.run(session_id)
        while answers and harness.turn(sent.turn_id)["waiting_for"] is not None:
            harness.send(answers[0], message_id=answers[0])
            answers.pop(0)
            harness.run(session_id)

    with harness.crashing(moment, name, nth):
        go()
    harness.move(31)
    go()
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], harness.results(), answers) == ("done", ["large"], [])
    assert [row.message_id for row in harness.sql("SELECT message_id FROM inbox ORDER BY position")][1:] == [
        "huge",
        "large",
    ]
    assert len(harness.model.requests) <= 3
    harness.check()


def _late(harness: Harness, turn: dict[str, Any]) -> str:
    harness.move(3_601)
    return "Error: The user has not answered."


def _ended(harness: Harness, turn: dict[str, Any]) -> str:
    request_end(harness.database, UUID(turn["session_id"]), "over")
    return "The conversation ended before the user answered."


@pytest.mark.parametrize("end", [_late, _ended])
def test_a_question_without_an_answer(harness: Harness, end: Callable[[Harness, dict[str, Any]], str]) -> None:
    """At the time limit, or when the session ends, the model reads that there is no answer."""
    turn = _ask(harness)
    expected = end(harness, turn)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == [expected]
    harness.check()


@pytest.mark.parametrize("end", [_late, _ended])
@pytest.mark.parametrize("given", [{"result": "small"}, {"error": "I will not say."}])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_value_that_comes_too_late_is_refused(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Harness, dict[str, Any]], str],
    given: dict[str, str],
    meanwhile: bool,
) -> None:
    """No caller is told that an answer is recorded that the model does not read.

    `meanwhile`: a worker closes the question after the request has read that it waits.
    """
    turn = _ask(harness)
    expected = end(harness, turn)
    run = harness.database.run

    def running(statement: Statement, *given: Any, **options: Any) -> Any:
        rows = run(statement, *given, **options)
        if statement.name == "turns.find_call":
            harness.resume(turn)
        return rows

    if meanwhile:
        monkeypatch.setattr(harness.database, "run", running)
    else:
        harness.resume(turn)
    with pytest.raises(Conflict):
        answer(harness.runtime, UUID(turn["turn_id"]), parse_result({"call_id": "call_0", **given}))
    assert harness.results() == [expected]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_when_a_question_is_closed(harness: Harness, moment: Moment) -> None:
    """The successor reads that there is no answer."""
    turn = _ask(harness)
    harness.move(3_601)
    with harness.crashing(moment, "turns.close_question"):
        harness.resume(turn)
    harness.move(31)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["Error: The user has not answered."]
    harness.check()


def test_an_answer_in_time_counts_even_if_it_is_read_late(harness: Harness) -> None:
    """The answer was accepted before the time limit, and no worker claimed the turn until after it."""
    turn = _ask(harness)
    harness.send("small")
    harness.move(3_601)
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["small"]


@pytest.mark.parametrize("end", [_late, _ended])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_message_at_the_time_limit_is_an_answer_or_a_turn(
    harness: Harness, moment: Moment, end: Callable[[Harness, dict[str, Any]], str]
) -> None:
    """A worker has read that there is no answer, and has not committed the result yet: no message is lost."""
    turn = _ask(harness)
    end(harness, turn)
    sent: list[Any] = []

    def answer_late(at: Moment, name: str) -> None:
        if (at, name) == (moment, "turns.step") and not sent:
            sent.append(None)
            sent.append(harness.send("small"))

    with harness.hooked(answer_late):
        harness.resume(turn)
    harness.run(sent[1].session_id)
    assert str(sent[1].turn_id) != turn["turn_id"]
    assert harness.turn(sent[1].turn_id)["status"] == "done"
    assert "small" in [message.content for request in harness.model.requests for message in request.messages]
    harness.check()


def test_an_answer_before_the_question_is_closed_counts(harness: Harness) -> None:
    """It is accepted after a worker has read that there is none, and before it closes the question."""
    turn = _ask(harness)
    harness.move(3_601)
    sent: list[Any] = []

    def answer_late(at: Moment, name: str) -> None:
        if (at, name) == ("after", "turns.claim") and not sent:
            sent.append(None)
            sent.append(harness.send("small"))

    with harness.hooked(answer_late):
        assert harness.resume(turn)["status"] == "done"
    assert str(sent[1].turn_id) == turn["turn_id"]
    assert harness.results() == ["small"]
    harness.check()


def test_input_guards_judge_answers(harness: Harness) -> None:
    """They replace what the model reads, also of answers that do not fit, or fail the turn."""
    seen: list[str] = []

    def no_cards(text: str, turn: TurnContext) -> Verdict:
        del turn
        seen.append(text)
        return Refuse("No.") if "bomb" in text else Replace(text.replace("1234", "[card]"))

    @guard(parallel=True)
    def counting(text: str, turn: TurnContext) -> Verdict:
        del text, turn
        return Allow(usage=Usage(100, 10))

    def ask(*said: Any, **given: Any) -> dict[str, Any]:
        harness.agents = Agents(
            [Agent("assistant", "You help.", [ask_user(name="ask_size", **given)], input_guards=[no_cards, counting])]
        )
        harness.script(calls(("ask_size", QUESTION)), says("done"))
        turn = harness.ask("tea, please")
        for each in said:
            if isinstance(each, str):
                harness.send(each)
            else:
                given_result = parse_result({"call_id": "call_0", "result": each})
                answer(harness.runtime, UUID(turn["turn_id"]), given_result)
            turn = harness.resume(turn)
        return turn

    turn = ask("my card is 1234")
    assert (turn["status"], harness.results()) == ("done", ["my card is [card]"])
    assert seen == ["tea, please", "my card is 1234"]
    assert turn["usage"]["input_tokens"] == 20 + 200
    assert ask({"card": "1234"}, answer=dict[str, str])["status"] == "done"
    assert harness.results()[1] == '{"card": "[card]"}'
    ask("1234", "12345", answer=int, tries=2)
    assert harness.results()[2] == "Error: The user's answers do not fit. They said: [card]; [card]5"
    turn = ask("a bomb")
    assert (turn["status"], turn["error"]["message"]) == ("failed", "No.")
    assert not any("bomb" in message["content"] for message in harness.messages(UUID(turn["session_id"])))
    harness.check()


def test_the_metadata_of_an_answer_is_added(harness: Harness) -> None:
    """As that of any message that joins a turn."""
    turn = _ask(harness, metadata={"kept": 1, "page": "/a"})
    harness.send("small", metadata={"page": "/b"})
    assert harness.resume(turn)["metadata"] == {"kept": 1, "page": "/b"}


def test_cancelling_closes_the_question(harness: Harness) -> None:
    """A later message begins a turn."""
    turn = _ask(harness)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    assert harness.results() == [_UNKNOWN["user"]]
    assert harness.ask("large")["turn_id"] != turn["turn_id"]
    harness.check()


OTHERS: dict[str, dict[str, Any]] = {
    "another channel": {"channel": "telegram"},
    "another agent": {"agent": "other"},
    "another user": {"user_id": "ben"},
    "an interruption": {"on_busy": "interrupt"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_messages_are_no_answers(harness: Harness, other: str) -> None:
    """The answer comes from the same user, over the turn's channel, and to its agent. An interruption interrupts."""
    turn = _ask(harness)
    sent = harness.send("small", **OTHERS[other])
    assert str(sent.turn_id) != turn["turn_id"]
    status = "cancelled" if other == "an interruption" else "parked"
    assert harness.turn(UUID(turn["turn_id"]))["status"] == status
    harness.check()


@pytest.mark.parametrize("on_busy", ["enqueue", "reject", "merge", "steer"])
def test_an_answer_is_none_of_the_messages_that_find_a_busy_session(harness: Harness, on_busy: str) -> None:
    """Whatever `on_busy` says, the user's message is the answer. The next message is no answer any more."""
    turn = _ask(harness)
    assert str(harness.send("small", on_busy=on_busy).turn_id) == turn["turn_id"]
    following = harness.send("and a cake")
    assert str(following.turn_id) != turn["turn_id"]
    harness.run(following.session_id)
    assert harness.results() == ["small"]
    assert harness.turn(following.turn_id)["status"] == "done"
    harness.check()


def test_a_turn_waits_for_its_own_users_answer(harness: Harness) -> None:
    """It does not matter that another user has answered, and that no worker has read this answer yet."""
    other = _ask(harness, user_id="bob")
    harness.send("small", user_id="bob")
    turn = _ask(harness)
    assert isinstance(harness.run(UUID(turn["session_id"])), NotNeeded)
    assert harness.resume(other)["status"] == "done"
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "parked"


def test_two_questions_and_a_task_of_one_reply(harness: Harness) -> None:
    """The user answers the questions in their order, while a task runs; each result enters the transcript once."""
    harness.calls = broker = Broker()
    harness.equip(size, ask_user(bool, name="ask_milk"), export, tool(effect="pure", name="look")(_look))
    harness.script(
        calls(
            ("ask_milk", {"question": "Milk?"}),
            ("reports_export", {"year": 2025}),
            ("ask_size", QUESTION),
            ("look", {}),
        ),
        says("done"),
    )
    turn = harness.ask("tea, please", reply_to={"url": "https://a.example"})
    assert turn["waiting_for"]["question"] == "Milk?"
    harness.send("yes")
    turn = harness.resume(turn)
    assert turn["waiting_for"]["question"] == "Which size?"
    assert len(set(harness.waker.deliveries)) == 2
    harness.send("small")
    turn = harness.resume(turn)
    assert turn["waiting_for"]["kind"] == "task"
    end_task(harness, broker.sent[0], "made")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["true", "made", "small", "seen"]
    harness.check()


def _look() -> str:
    """Look."""
    return "seen"


def test_the_answer_may_come_before_the_turn_is_parked(harness: Harness) -> None:
    """A user who reads the call in the stream may answer at once: the turn goes on without being parked."""
    harness.equip(size)
    harness.script(calls(("ask_size", QUESTION)), says("done"))
    sent: list[Any] = []

    def answer_early(moment: Moment, name: str) -> None:
        if (moment, name) == ("after", "turns.step") and not sent:
            sent.append(None)
            sent.append(harness.send("small"))

    with harness.hooked(answer_early):
        turn = harness.ask("tea, please")
    assert (turn["status"], harness.results()) == ("done", ["small"])
    assert str(sent[1].turn_id) == turn["turn_id"]
    harness.check()


def test_two_messages_at_once_are_one_answer_and_one_message(harness: Harness) -> None:
    """The lock of the session's row serializes them."""
    turn = _ask(harness)
    found = side_by_side(lambda: harness.send("small"), lambda: harness.send("large"))
    assert sorted(str(each.turn_id) == turn["turn_id"] for each in found) == [False, True]
    assert harness.resume(turn)["status"] == "done"
    assert len(harness.results()) == 1
    harness.check()


def test_the_answer_as_a_value(harness: Harness) -> None:
    """`POST /v1/turns/{id}/results` brings a value, which is judged alike; an error fails the call."""
    turn = _ask(harness)
    turn_id = UUID(turn["turn_id"])
    for value in ("huge", "large", "small"):
        answer(harness.runtime, turn_id, parse_result({"call_id": "call_0", "result": value}))
        if value == "huge":
            turn = harness.resume(turn)
            assert turn["waiting_for"]["asked"] == 2
    assert harness.resume(turn)["status"] == "done"
    assert harness.results() == ["large"], "the first result counts"
    turn = _ask(harness)
    answer(harness.runtime, UUID(turn["turn_id"]), parse_result({"call_id": "call_0", "error": "I will not say."}))
    assert harness.resume(turn)["status"] == "done"
    assert harness.results()[1] == "Error: I will not say."
    harness.check()


def test_approval_beside_a_question(harness: Harness) -> None:
    """While a person can decide about a call of the reply, nothing is asked, and a message is an ordinary one."""
    harness.equip(size, tool(requires_approval=True, name="pay")(_look))
    harness.script(calls(("ask_size", QUESTION), ("pay", {})), says("done"))
    turn = harness.ask("tea, please")
    assert (turn["status"], turn["waiting_for"]) == ("waiting_approval", None)
    assert str(harness.send("hm").turn_id) != turn["turn_id"]
    harness.move(3_601)
    turn = harness.resume(turn)
    assert turn["waiting_for"]["question"] == "Which size?"
    harness.send("small")
    assert harness.resume(turn)["status"] == "done"
    assert harness.results()[0] == "small"
    harness.check()


def test_the_types_own_code_may_fail(harness: Harness) -> None:
    """An error of a validator refuses the answer; the turn is not struck."""

    class Broken(BaseModel):
        """Broken."""

        name: str

        @field_validator("name")
        @classmethod
        def check(cls, value: str) -> str:
            """Fail."""
            raise LookupError(value)

    turn = _ask(harness, ask_user(Broken, name="ask_size"))
    harness.send("name: x")
    turn = harness.resume(turn)
    assert (turn["status"], turn["attempts"], turn["waiting_for"]["asked"]) == ("parked", 1, 2)


def test_erasure_covers_the_answer(harness: Harness) -> None:
    """No row keeps what the user said."""
    turn = _ask(harness)
    harness.send("a secret word")
    turn = harness.resume(turn)
    harness.runtime.eraser.erase(UserKey("ana"))
    assert set(harness.counts().values()) == {0}


def test_arguments_are_checked() -> None:
    """The model's arguments are one question of a bounded length."""
    asks = ask_user()
    assert isinstance(asks, AskUser)
    assert asks.parse('{"question": "Why?"}') == {"question": "Why?"}
    for wrong in (
        "{}",
        '{"question": ""}',
        '{"question": 1}',
        '{"question": "a", "b": 1}',
        '{"question": "%s"}' % ("x" * 2_001),
    ):
        with pytest.raises(ToolError, match="Not asked"):
            asks.parse(wrong)


@pytest.mark.parametrize("wrong", ["{", "[]", "{}", '{"%s": 1}', '{"%s": " "}', '{"%s": "a", "b": 1}', '{"%s": NaN}'])
@pytest.mark.parametrize(
    ("asks", "member", "outcome"), [(size, "question", "Not asked"), (sleep_until, "moment", "Not waited")]
)
def test_one_text_is_expected(asks: AskUser | SleepUntil, member: str, outcome: str, wrong: str) -> None:
    """What a question and a timer refuse names the member and the schema, for the model."""
    with pytest.raises(ToolError, match=f"(?s)^{outcome}: .*{member}"):
        asks.parse(wrong.replace("%s", member))


@tool(effect="pure", name="ask_size")
def _other(question: str) -> str:
    """Answer a question."""
    return question


@pytest.mark.parametrize("other", [_other, celery_tool("sizes.ask", effect="pure", timeout_s=9, name="ask_size")])
def test_a_question_whose_tool_is_another_one_now(harness: Harness, other: Any) -> None:
    """A new release may have another tool of this name. The call fails, with a reason; no task is sent."""
    harness.calls = broker = Broker()
    turn = _ask(harness)
    harness.equip(other)
    harness.send("small")
    assert harness.resume(turn)["status"] == "done"
    [result] = harness.results()
    assert result == "Error: ask_size no longer asks the user."
    assert broker.sent == []
    harness.check()


def test_a_call_of_a_client_whose_tool_is_a_task_now(harness: Harness) -> None:
    """The client was asked for the result. No task is sent for the same call."""
    harness.calls = broker = Broker()
    harness.equip(size, external_tool(name="scan", description="Scan."))
    harness.script(calls(("scan", {}), ("ask_size", QUESTION)), says("done"))
    turn = harness.ask("tea, please")
    harness.equip(size, celery_tool("codes.scan", effect="pure", timeout_s=9, name="scan", description="Scan."))
    harness.send("small")
    assert harness.resume(turn)["waiting_for"]["kind"] == "client"
    assert broker.sent == []


def _charging(text: str, turn: TurnContext) -> Verdict:
    del turn
    used = Usage(100, 10)
    return Refuse("No.", usage=used) if "bomb" in text else Allow(usage=used)


LAST_ANSWERS = {"fits": ("small", 3), "is one too many": ("vast", 5), "is refused": ("a bomb", 3)}


@pytest.mark.parametrize(("last", "judged"), LAST_ANSWERS.values(), ids=LAST_ANSWERS)
def test_guards_of_refused_answers_are_counted(harness: Harness, last: str, judged: int) -> None:
    """The tokens for each answer count, whatever becomes of it: the guard's model was paid for them."""
    harness.agents = Agents([Agent("assistant", "You help.", [size], model=MODEL, input_guards=[_charging])])
    harness.script(calls(("ask_size", QUESTION)), says("done"))
    turn = harness.ask("tea, please")
    for said in ("huge", "tiny", last):
        harness.send(said)
        turn = harness.resume(turn)
    replies = 1 if last == "a bomb" else 2
    used = Usage.from_dict(turn["usage"])
    assert used.input_tokens == 10 * replies + 100 * (1 + judged)
    found = cost_of(harness.database, UUID(turn["turn_id"]), harness.settings, harness.agents)
    assert found == cost(MODEL, used, harness.settings)
    harness.check()


@pytest.mark.parametrize(("moment", "judged"), [("before", 1), ("after", 2)])
def test_a_crash_when_a_refused_answer_is_charged(harness: Harness, moment: Moment, judged: int) -> None:
    """The next worker judges the answer again, and the turn fails once. What is committed counts."""
    harness.agents = Agents([Agent("assistant", "You help.", [size], input_guards=[_charging])])
    harness.script(calls(("ask_size", QUESTION)), says("done"))
    turn = harness.ask("tea, please")
    harness.send("a bomb")
    with harness.crashing(moment, "turns.charge_question"):
        harness.run(UUID(turn["session_id"]))
    harness.move(31)
    turn = harness.resume(turn)
    assert (turn["status"], turn["error"]["message"]) == ("failed", "No.")
    assert turn["usage"]["input_tokens"] == 10 + 100 * (1 + judged)
    harness.check()


@pytest.mark.parametrize("end", [_late, _ended, None])
def test_guards_are_counted_without_an_answer_that_fits(harness: Harness, end: Callable[..., str] | None) -> None:
    """The same if the user writes no more, and the question is closed or the turn cancelled."""
    harness.agents = Agents([Agent("assistant", "You help.", [size], input_guards=[_charging])])
    harness.script(calls(("ask_size", QUESTION)), says("done"))
    turn = harness.ask("tea, please")
    harness.send("huge")
    turn = harness.resume(turn)
    if end is None:
        cancel(harness.runtime, UUID(turn["turn_id"]))
        turn = harness.turn(UUID(turn["turn_id"]))
    else:
        end(harness, turn)
        turn = harness.resume(turn)
    replies = 1 if turn["status"] == "cancelled" else 2
    assert turn["usage"]["input_tokens"] == 10 * replies + 200


def test_guards_are_counted_if_the_turn_waits_for_another_call(harness: Harness) -> None:
    """The answer is recorded before the transcript has it, and the tokens with it."""
    harness.calls = broker = Broker()
    harness.agents = Agents([Agent("assistant", "You help.", [size, export], input_guards=[_charging])])
    harness.script(calls(("reports_export", {"year": 2025}), ("ask_size", QUESTION)), says("done"))
    turn = harness.ask("tea, please")
    for said in ("huge", "small"):
        harness.send(said)
        turn = harness.resume(turn)
    assert turn["waiting_for"]["kind"] == "task"
    end_task(harness, broker.sent[0], "made")
    turn = harness.resume(turn)
    assert (turn["status"], turn["usage"]["input_tokens"]) == ("done", 20 + 300)
    harness.check()
