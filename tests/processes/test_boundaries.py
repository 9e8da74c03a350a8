"""A turn survives a SIGKILL of its worker before or after any commit.

The cases are enumerated, not sampled. `make test` plays only one case of each kind, `make check` those of perdure's own
agents, and `make exhaustive` all. Each case waits several seconds for a lease to expire. Therefore, several
installations play the cases concurrently, and each installation plays one case at a time. The test of a case waits for
the outcome of the case.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain

import pytest

from perdure.models.protocol import Role
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from tests.databases import Databases
from tests.processes.boundaries import CASES, KINDS, Case, CaseOutcome, CaseRunner, passed
from tests.processes.faults import done
from tests.processes.installation import ADAPTED, JUDGING, NATIVE
from tests.processes.model_server import PLANS, REPAIR, answer_to

LANES = 2
"""The most installations for each agent."""

ONE_OF_EACH_KIND = {
    "pure-after-turns.step-1",
    "idempotent-after-turns.step-1",
    "unsafe-within-unsafe.acted-1",
    "probed-before-turns.step-2",
    "all-before-turns.settle-1",
    "adapted-pure-after-turns.step-1",
    "adapted-idempotent-within-idempotent.acted-1",
    "adapted-unsafe-within-unsafe.acted-1",
    "adapted-probed-before-turns.step-2",
    "adapted-all-before-turns.finish_effect-2",
    "judging-pure-after-turns.step-3",
}
"""The cases that `make test` plays. `make check` plays all of perdure's own agents, `make exhaustive` all."""

TURNS = [*((kind, agent) for agent in (NATIVE, ADAPTED) for kind in KINDS), (KINDS[0], JUDGING)]
"""The kinds of turns of each agent."""

pytestmark = pytest.mark.timeout(300)  # the first test waits until the installations have started


def _of(agent: str) -> str:
    """The agent whose installations play the turns of `agent`."""
    return NATIVE if agent == JUDGING else agent


@pytest.fixture(scope="module")
def wanted(request: pytest.FixtureRequest) -> list[Case]:
    """The cases that this run of pytest has selected."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return [each["case"] for each in parameters if isinstance(each.get("case"), Case)]


@pytest.fixture(scope="module")
def case_runners(
    wanted: list[Case], databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[CaseRunner]]]:
    """The installations that play the cases, by agent."""
    with ExitStack() as stack:
        made: dict[str, list[CaseRunner]] = {NATIVE: [], ADAPTED: []}
        for number in range(LANES if len(wanted) > len(ONE_OF_EACH_KIND) else 1):
            for agent, of_agent in made.items():
                directory = tmp_path_factory.mktemp(f"{agent}{number}")
                url, _ = stack.enter_context(databases.one())
                of_agent.append(CaseRunner(url.render_as_string(hide_password=False), directory, agent))
                stack.callback(of_agent[-1].close)
        yield made


@pytest.fixture(scope="module")
def undisturbed(case_runners: dict[str, list[CaseRunner]]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The places that an undisturbed turn of each kind and agent passes."""
    return {(kind, agent): case_runners[_of(agent)][0].undisturbed(kind, agent) for kind, agent in TURNS}


@pytest.fixture(scope="module")
def played(
    wanted: list[Case], case_runners: dict[str, list[CaseRunner]], undisturbed: object
) -> Iterator[dict[Case, Future[CaseOutcome]]]:
    """The outcomes of the wanted cases, as futures."""
    free: dict[str, queue.SimpleQueue[CaseRunner]] = {agent: queue.SimpleQueue() for agent in case_runners}
    for agent, of_agent in case_runners.items():
        for case_runner in of_agent:
            free[agent].put(case_runner)

    def play(case: Case) -> CaseOutcome:
        agent = _of(case.agent)
        case_runner = free[agent].get()
        try:
            return case_runner.run(case)
        finally:
            free[agent].put(case_runner)

    players = {agent: ThreadPoolExecutor(len(of_agent)) for agent, of_agent in case_runners.items()}
    yield {case: players[_of(case.agent)].submit(play, case) for case in wanted}
    for each in players.values():
        each.shutdown(cancel_futures=True)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "agent"), TURNS)
def test_the_enumeration_is_complete(
    undisturbed: dict[tuple[str, str], list[tuple[str, str]]], kind: str, agent: str
) -> None:
    """`boundaries.passed` lists exactly the places that an undisturbed turn passes."""
    assert undisturbed[kind, agent] == passed(kind, agent)


def test_one_case_of_each_kind_is_always_played() -> None:
    """`ONE_OF_EACH_KIND` has one existing case of each kind and agent. A case of a renamed place does not count."""
    chosen = sorted((case.agent, case.kind) for case in CASES if str(case) in ONE_OF_EACH_KIND)
    assert chosen == sorted((agent, kind) for kind, agent in TURNS)


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    if str(case) in ONE_OF_EACH_KIND:
        return []
    return [pytest.mark.exhaustive if case.agent == ADAPTED else pytest.mark.long]


@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case)) for case in CASES], ids=str)
def test_after_a_kill_a_message_is_answered_once(played: dict[Case, Future[CaseOutcome]], case: Case) -> None:
    """Wherever the worker dies, the message is answered once. Tools run only as often as their effect classes allow."""
    outcome = played[case].result()
    tools = PLANS[case.kind]
    _check_effects(case, outcome)
    assert [turn["status"] for turn in (outcome.first, outcome.second)] == ["done", "done"]
    assert [turn["seq"] for turn in (outcome.first, outcome.second)] == [1, 2]
    calling, replied = outcome.messages[:2], outcome.messages[2 + len(tools) :]
    results = [row.content for row in outcome.messages[2 : 2 + len(tools)]]
    assert [(row.role, row.content) for row in calling] == [(Role.USER, outcome.text), (Role.ASSISTANT, "")]
    assert [call["name"] for call in calling[1].tool_calls] == list(tools)
    rejected = [(Role.ASSISTANT, "")] if case.agent == JUDGING else []
    answers = (
        [answer_to(REPAIR)] * 2 if rejected else [answer_to(outcome.text, *results), answer_to(outcome.second_text)]
    )
    assert [(row.role, row.content) for row in replied] == [
        *rejected,
        (Role.ASSISTANT, answers[0]),
        (Role.USER, outcome.second_text),
        *rejected,
        (Role.ASSISTANT, answers[1]),
    ]
    assert outcome.first["reply"]["text"] == answers[0]
    assert {each.body["delivery_id"] for each in outcome.deliveries} == {outcome.deliveries[0].body["delivery_id"]}


def _check_effects(case: Case, outcome: CaseOutcome) -> None:
    for position, tool in enumerate(PLANS[case.kind]):
        ids = [effect.effect_id for effect in outcome.effects if effect.tool == tool]
        content = outcome.messages[2 + position].content
        known = content == done(tool, outcome.text)
        assert len(set(ids)) <= 1, "a repeated call keeps its id"
        match tool:
            case "pure" | "idempotent":
                assert known
                assert ids
            case "probed":
                assert known
                assert len(ids) == 1
            case "unsafe":
                assert len(ids) <= 1
                assert known or content == UNKNOWN_OUTCOME
                assert not known or ids
                assert known == (outcome.statuses[tool] == "done")
                assert case.kind != tool or known is not _in_doubt(case)
            case _:
                pytest.fail(f"no check of the tool {tool}")


def _in_doubt(case: Case) -> bool:
    """For a case with one tool call: whether the killed process had committed the call's intent, but not its result."""
    place = (case.place.moment, case.place.name, case.place.nth)
    within = case.place.moment == "within" and case.place.name != "model"
    return within or place in {("after", "turns.step", 1), ("before", "turns.step", 2)}


def test_the_invariants_hold_for_all_sessions(
    case_runners: dict[str, list[CaseRunner]], played: dict[Case, Future[CaseOutcome]]
) -> None:
    """The invariants hold for all sessions of the installations. Each case checks only its own session."""
    for future in played.values():
        future.exception()
    for case_runner in chain(*case_runners.values()):
        case_runner.installation.check()
