"""Messages that join a running turn, and answers to its questions: a SIGKILL of a real worker at each commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx2
import pytest

from perdure.database.engine import Moment
from perdure.turns.calls.asked import NO_ANSWER
from perdure.turns.reading import read_turn
from tests.cli.conftest import Perdure
from tests.processes.faults import Place, done, wait_until
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import ADAPTED, ASKING, MODULES, NATIVE, Installation
from tests.processes.model_server import GUARD_TOKENS, REFUSED, SECRET, answer_to

PATIENCE_S = 60.0
MOMENTS: tuple[Moment, ...] = ("before", "after")

pytestmark = pytest.mark.timeout(240)

JOINING = [Place(moment, "turns.step_joining") for moment in MOMENTS]
ASKED = [
    Place("after", "turns.step"),  # the intent is committed, the user not asked
    *(Place(moment, "turns.wait_calls") for moment in MOMENTS),
    *(Place(moment, "turns.refuse_answer") for moment in MOMENTS),
    *(Place(moment, "turns.wait_calls", 2) for moment in MOMENTS),  # asked again
    *(Place(moment, "turns.step", 2) for moment in MOMENTS),  # the answer that fits is the result
]
ALWAYS = {"after-turns.step_joining-1", "after-turns.refuse_answer-1"}
"""The places of the only kills that `make test` runs."""


def _cases(places: list[Place], *more: str) -> list[Any]:
    """The parameters of a test: all places for the first agent, and for the others `more`."""
    first, *others = more
    of_first = [(place, first) for place in places]
    of_others = [(place, agent) for agent in others for place in places]
    return [
        pytest.param(place, agent, id=f"{agent}-{place}", marks=() if is_always else pytest.mark.exhaustive)
        for place, agent in [*of_first, *of_others]
        for is_always in [str(place) in ALWAYS and agent == first]
    ]


def _killed_once(installation: Installation, place: Place) -> AbstractContextManager[None]:
    return installation.killed_once(place, PERDURE_AGENTS=MODULES[ASKING])


@pytest.mark.parametrize(("place", "agent"), _cases(JOINING, NATIVE, ADAPTED))
def test_after_a_kill_a_message_has_joined_once(installation: Installation, place: Place, agent: str) -> None:
    """The message stands behind the results of the round, once, and its id leads to the turn that it joined."""
    text, steering = f"pure: {place} {agent}", f"And tea, {place} {agent}."
    gate = installation.model_server.gate(text)
    with _killed_once(installation, place):
        first = installation.accept(text, agent=agent)
        gate.wait()
        second = installation.accept(steering, agent=agent, on_busy="steer")
        gate.opened.set()
        [turn] = installation.settled(first.turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(steering))
    assert read_turn(installation.database, second.turn_id)["turn_id"] == str(first.turn_id)
    said = [(row.role, row.content) for row in installation.transcript(first.session_id)]
    assert said == [
        ("user", text), ("assistant", ""), ("tool", done("pure", text)), ("user", steering),
        ("assistant", answer_to(steering)),
    ]  # fmt: skip
    installation.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_kill_a_message_is_changed_once(installation: Installation, moment: Moment) -> None:
    """The text before the change is nowhere, and the model gets the other."""
    with _killed_once(installation, Place(moment, "turns.step_replaced")):
        turn_id = installation.accept(f"My card is {SECRET}.", agent="rewriting").turn_id
        [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to("My card is [card]."))
    said = [(row.role, row.content) for row in installation.transcript(UUID(turn["session_id"]))]
    assert said == [("user", "My card is [card]."), ("assistant", answer_to("My card is [card]."))]
    assert installation.query("SELECT 1 FROM inbox WHERE text LIKE '%%4111%%'") == []


def _asked(installation: Installation, turn_id: UUID, number: int = 1) -> dict[str, Any]:
    """Wait until the user was asked `number` times; returns what the turn waits for."""

    def question() -> dict[str, Any] | None:
        waiting: dict[str, Any] | None = read_turn(installation.database, turn_id)["waiting_for"]
        is_asked = waiting is not None and waiting["kind"] == "user" and waiting["asked"] == number
        return waiting if is_asked else None

    return wait_until(question, f"question {number} is asked", PATIENCE_S)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("place", "agent"), _cases(ASKED, ASKING))
def test_after_a_kill_a_question_is_answered_once(installation: Installation, place: Place, agent: str) -> None:
    """The answer that does not fit is refused once, and the one that fits is the result."""
    text = f"coffee: {place}"
    with _killed_once(installation, place):
        turn_id = installation.accept(text, agent=agent).turn_id
        for number, answer in enumerate(("XXL", "m"), start=1):
            _asked(installation, turn_id, number)
            answered = installation.accept(answer, agent=agent, message_id=f"answer {number} {place}")
            assert answered.turn_id == turn_id
        [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, "M"))
    assert [row.role for row in installation.transcript(turn["session_id"])] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert len(installation.query("SELECT 1 FROM turns")) == 1
    installation.check()


OF_AGENTS = [
    Place("after", "turns.delegate"),
    *(Place(moment, "turns.wait_calls", nth) for nth in (2, 3) for moment in MOMENTS),  # the agent below asks
    *(Place(moment, "turns.refuse_answer") for moment in MOMENTS),
    Place("after", "turns.settle"),  # of the agent below
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", OF_AGENTS, ids=str)
def test_after_a_kill_a_question_of_another_agent_is_answered_once(installation: Installation, place: Place) -> None:
    """It is answered in the conversation of the turn that asked the agent."""
    with _killed_once(installation, place):
        turn = _breakfast(installation, f"breakfast: {place}", _asked)
    assert [row.role for row in installation.transcript(turn["children"][0]["turn_id"])] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_a_question_of_another_agent_outlives_the_workers(installation: Installation) -> None:
    """Each answer is accepted while there is no worker; the next one judges it, and asks again or goes on."""
    workers = [installation.worker(PERDURE_AGENTS=MODULES[ASKING])]

    def asked(installation: Installation, turn_id: UUID, number: int) -> dict[str, Any]:
        waiting = _asked(installation, turn_id, number)
        workers[-1].kill()
        return waiting

    def answered() -> None:
        workers.append(installation.worker(PERDURE_AGENTS=MODULES[ASKING]))

    _breakfast(installation, "breakfast: without workers", asked, answered)
    assert len(workers) == 3


def _breakfast(
    installation: Installation,
    text: str,
    asked: Callable[[Installation, UUID, int], dict[str, Any]],
    answered: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run a turn whose agent asks another one, which asks the user twice; returns the settled turn."""
    turn_id = installation.accept(text, agent="serving").turn_id
    for number, answer in enumerate(("XXL", "m"), start=1):
        waiting = asked(installation, turn_id, number)
        assert (waiting["agent"], waiting["question"]) == ("asking", f"Which size, for coffee: {text}?")
        accepted = installation.accept(answer, agent="serving", message_id=f"answer {number} {text}")
        assert accepted.turn_id == turn_id
        answered()
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, answer_to(f"coffee: {text}", "M")))
    assert len(installation.query("SELECT 1 FROM turns")) == 2
    installation.check()
    return turn


@contextmanager
def _door(installation: Installation, perdure: Perdure, door: str) -> Iterator[Callable[[UUID, str, str], bool]]:
    """Yields a function that brings the value of an answer, and returns whether its process lived to say so."""
    if door == "command":
        yield lambda turn_id, call_id, value: perdure("turns", "answer", str(turn_id), call_id, value).returncode == 0
        return
    gateway = GatewayProcess(perdure)

    def bring(turn_id: UUID, call_id: str, value: str) -> bool:
        body = {"call_id": call_id, "result": value}
        try:
            answered = httpx2.post(f"{gateway.url}/v1/turns/{turn_id}/results", json=body)
        except httpx2.TransportError:
            gateway.kill()
            gateway.start()
            return False
        return answered.status_code == HTTPStatus.ACCEPTED

    try:
        gateway.start()
        yield bring
    finally:
        gateway.kill()


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("door", ["gateway", "command"])
def test_after_a_kill_an_answer_by_value_counts_once(
    installation: Installation, perdure: Perdure, door: str, moment: Moment
) -> None:
    """The killed process told its caller nothing. The request changes nothing later, if the answer was committed."""
    installation.environment["PERDURE_AGENTS"] = MODULES[ASKING]
    installation.worker().ready()
    turn_id = installation.accept(text := "coffee: by value", agent=ASKING).turn_id
    call_id = _asked(installation, turn_id)["call_id"]
    with _door(installation, perdure, door) as bring:
        installation.faults.arm(Place(moment, "turns.answer_by_value"))
        assert not bring(turn_id, call_id, "M")
        assert installation.faults.fired()
        if moment == "after":
            [turn] = installation.settled(turn_id, within_s=PATIENCE_S)  # without another request
        assert bring(turn_id, call_id, "S" if moment == "after" else "M")
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, "M"))
    [payload] = installation.query("SELECT payload FROM tool_effects")
    assert payload[0]["said"] == [{"value": "M"}]
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_kill_a_question_is_closed_once(installation: Installation, moment: Moment) -> None:
    """The model reads once that there is no answer. A message after that begins a turn of its own."""
    with _killed_once(installation, Place(moment, "turns.close_question")):
        first = installation.accept(text := "coffee: too late", agent="impatient")
        [turn] = installation.settled(first.turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, f"Error: {NO_ANSWER}"))
    later = installation.accept("M", agent="impatient")
    assert later.turn_id != first.turn_id
    [turn] = installation.settled(later.turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to("M"))
    installation.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("moment", "judged"), [("before", 1), ("after", 2)])
def test_after_a_kill_a_refused_answer_is_charged(installation: Installation, moment: Moment, judged: int) -> None:
    """The turn fails once. Its usage has the tokens of the message's and of each committed judgement."""
    with _killed_once(installation, Place(moment, "turns.charge_question")):
        turn_id = installation.accept("coffee: guarded", agent="cautious").turn_id
        _asked(installation, turn_id)
        installation.accept(f"{REFUSED}, please", agent="cautious")
        [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["error"]["message"]) == ("failed", "No.")
    [asking] = installation.query("SELECT usage FROM messages WHERE model IS NOT NULL")
    assert turn["usage"]["input_tokens"] == asking.usage["input_tokens"] + GUARD_TOKENS * (1 + judged)
    installation.check()
