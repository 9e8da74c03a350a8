"""Messages that join a running turn, and answers to its questions: a SIGKILL of a real worker at each commit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from perdure.database.engine import Moment
from perdure.turns.reading import read_turn
from tests.processes.faults import Place, done, wait_until
from tests.processes.installation import ADAPTED, ASKING, MODULES, NATIVE, Installation
from tests.processes.model_server import SECRET, answer_to

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
        pytest.param(place, agent, id=f"{agent}-{place}", marks=() if is_always else pytest.mark.long)
        for place, agent in [*of_first, *of_others]
        for is_always in [str(place) in ALWAYS and agent == first]
    ]


@contextmanager
def _killed_once(installation: Installation, place: Place) -> Iterator[None]:
    """Two workers, of which one is killed at the place within the block."""
    workers = [installation.worker(PERDURE_AGENTS=MODULES[ASKING]) for _ in range(2)]
    for each in workers:
        each.ready()
    installation.faults.arm(place, signal.SIGKILL)
    yield
    struck = wait_until(installation.faults.fired, f"the fault at {place} fires", PATIENCE_S)
    next(each for each in workers if each.pid == struck.pid).container.wait()


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(("place", "agent"), _cases(ASKED, ASKING))
def test_after_a_kill_a_question_is_answered_once(installation: Installation, place: Place, agent: str) -> None:
    """The answer that does not fit is refused once, and the one that fits is the result."""
    text = f"coffee: {place}"

    def is_asked(number: int, turn_id: UUID) -> bool:
        waiting = read_turn(installation.database, turn_id)["waiting_for"]
        return waiting is not None and waiting["kind"] == "user" and waiting["asked"] == number

    with _killed_once(installation, place):
        turn_id = installation.accept(text, agent=agent).turn_id
        for number, answer in enumerate(("XXL", "m"), start=1):
            wait_until(partial(is_asked, number, turn_id), f"question {number} is asked", PATIENCE_S)
            answered = installation.accept(answer, agent=agent, message_id=f"answer {number} {place}")
            assert answered.turn_id == turn_id
        [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, "M"))
    assert [row.role for row in installation.transcript(turn["session_id"])] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert len(installation.query("SELECT 1 FROM turns")) == 1
    installation.check()
