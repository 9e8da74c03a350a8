"""Agents that ask other agents, in real workers: users' places, a SIGKILL at each commit, cancelling and erasing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from perdure import Agent
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.database.engine import Moment
from perdure.turns.cancel import cancel
from perdure.turns.reading import read_turn
from tests.processes.faults import Place
from tests.processes.installation import DELEGATING, MODULES, Installation
from tests.processes.model_server import answer_to, task_of
from tests.processes.nodes import Worker

PATIENCE_S = 60.0
CHILD_S = 4.0
"""Seconds that the model takes to answer a child."""

pytestmark = pytest.mark.timeout(240)

BOUNDARIES = [
    Place("after", "turns.step"),  # the intents are committed, the agents are not asked
    Place("before", "turns.delegate"),
    Place("after", "turns.delegate"),  # one of two agents is asked
    Place("after", "turns.delegate", 2),
    Place("before", "turns.wait_calls"),
    Place("after", "turns.wait_calls"),
    Place("before", "turns.settle"),  # of a child
    Place("after", "turns.settle"),  # its answer is not reported
    Place("before", "turns.finish_task"),
    Place("after", "turns.finish_task", 2),  # the caller may go on, and is not woken
    Place("after", "turns.step", 2),
]
ALWAYS = "after-turns.settle-1"
"""The place of the only kill that `make test` runs."""


def _worker(installation: Installation) -> Worker:
    made = installation.worker(PERDURE_AGENTS=MODULES[DELEGATING])
    made.ready()
    return made


def _accept(installation: Installation, text: str, **given: Any) -> UUID:
    return installation.accept(text, agent=DELEGATING, **given).turn_id


def _children(installation: Installation, turn_id: UUID) -> list[dict[str, Any]]:
    return list(read_turn(installation.database, turn_id).get("children", []))


def _answer(text: str) -> str:
    """The reply of a turn that asks both agents."""
    return answer_to(text, *(answer_to(task_of(text, number)) for number in range(2)))


@pytest.mark.parametrize(
    "place",
    [each if str(each) == ALWAYS else pytest.param(each, marks=pytest.mark.exhaustive) for each in BOUNDARIES],
    ids=str,
)
def test_after_a_kill_each_agent_answers_once(installation: Installation, place: Place) -> None:
    """Wherever a worker dies, the caller's model gets each answer once, and no agent is asked twice."""
    with installation.killed_once(place, PERDURE_AGENTS=MODULES[DELEGATING]):
        turn_id = _accept(installation, text := f"asks: {place}")
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", _answer(text))
    assert [each["status"] for each in turn["children"]] == ["done", "done"]
    assert len(installation.query("SELECT 1 FROM sessions")) == 3
    for each in turn["children"]:
        assert [row.role for row in installation.transcript(each["turn_id"])] == ["user", "assistant"]
    installation.check()


@pytest.mark.exhaustive
def test_twelve_delegating_turns_of_one_user_take_three_times_a_childs_time(installation: Installation) -> None:
    """At the default limits, which let ten turns of a user run. Each turn asks two agents."""
    _worker(installation)
    warm = _accept(installation, "asks: warm")
    installation.settled(warm, within_s=PATIENCE_S)
    texts = [f"asks: {number}" for number in range(12)]
    for text in texts:
        for number in range(2):
            installation.model_server.latencies[task_of(text, number)] = CHILD_S
    turns = installation.settled(
        *(_accept(installation, text, conversation=text) for text in texts), within_s=PATIENCE_S
    )
    assert [turn["reply"]["text"] for turn in turns] == [_answer(text) for text in texts]
    begun = min(datetime.fromisoformat(turn["accepted_at"]) for turn in turns)
    ended = max(datetime.fromisoformat(turn["settled_at"]) for turn in turns)
    assert (ended - begun).total_seconds() < 3 * CHILD_S
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_after_a_kill_the_conversation_is_handed_over_once(installation: Installation, moment: Moment) -> None:
    """The other agent answers, and the next message is its own."""
    with installation.killed_once(Place(moment, "turns.step_handing_off"), PERDURE_AGENTS=MODULES[DELEGATING]):
        turn_id = _accept(installation, "hands over: now")
    [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["steps"]) == ("done", 2)
    roles = [row.role for row in installation.transcript(UUID(turn["session_id"]))]
    assert roles == ["user", "assistant", "tool", "assistant"]
    known = Agents([*installation.runtime.agents, Agent("searcher", "Runs in the workers only.")])
    installation.runtime = replace(installation.runtime, agents=known)  # as a gateway's
    later = installation.accept("And now?", agent=None, session_id=UUID(turn["session_id"]))
    installation.settled(later.turn_id, within_s=PATIENCE_S)
    agents = installation.query("SELECT agent FROM turns UNION ALL SELECT agent FROM sessions")
    assert [row.agent for row in agents] == ["searcher"] * 3
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("end", ["cancel", "erase"])
def test_the_end_of_a_turn_reaches_the_agents_that_it_asked(installation: Installation, end: str) -> None:
    """A cancelled turn cancels them while their models answer, and erasing the user leaves none of their rows."""
    _worker(installation)
    text = "asks: too much"
    gates = [installation.model_server.gate(task_of(text, number)) for number in range(2)]
    turn_id = _accept(installation, text, user="cid")
    for gate in gates:
        gate.wait()
    children = [UUID(each["turn_id"]) for each in _children(installation, turn_id)]
    if end == "cancel":
        cancel(installation.runtime, turn_id)
        turns = installation.settled(turn_id, *children, within_s=PATIENCE_S)
        assert [turn["status"] for turn in turns] == ["cancelled"] * 3
    else:
        installation.runtime.eraser.erase(UserKey("cid"))
        for gate in gates:
            gate.opened.set()
        assert installation.query("SELECT 1 FROM sessions UNION ALL SELECT 1 FROM turns") == []
    installation.check()
