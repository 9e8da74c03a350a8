"""Turns in flight survive a change of their agent: the workers of the old version stop, those of the new one go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest

from perdure.turns.calls.outside import CallResult, answer
from perdure.turns.reading import read_turn
from tests.processes.faults import wait_until
from tests.processes.installation import ROOT, Installation
from tests.processes.model_server import OUTSIDE, answer_to
from tests.processes.nodes import Worker

VERSIONS = {
    "first": f"""
from perdure import Agent, external_tool, tool

@tool(effect="pure")
def look() -> str:
    "Look."
    return "seen"

tester = Agent("tester", "You are the first.", tools=[external_tool({OUTSIDE!r}, "A client runs it."), look])
""",
    "second": f"""
from perdure import Agent, external_tool, tool

@tool(effect="pure")
def watch(minutes: int) -> str:
    "Watch."
    return "watched"

changed = external_tool({OUTSIDE!r}, "Somebody runs it.", {{"type": "object", "properties": {{"why": {{}}}}}})
tester = Agent("tester", "You are the second.", tools=[changed, watch], max_steps=5)
""",
}


def _worker(installation: Installation, version: str, **environment: str) -> Worker:
    directory: Path = installation.directory
    (directory / f"{version}.py").write_text(VERSIONS[version])
    worker = installation.worker(PERDURE_AGENTS=version, PYTHONPATH=f"{ROOT}:{directory}", **environment)
    worker.ready()
    return worker


def _begin(installation: Installation, turns: int) -> list[UUID]:
    """Send messages, and wait until each of their turns waits for a client."""

    def send(number: int) -> UUID:
        return installation.accept(f"{OUTSIDE}: {number}", user=f"user {number}").turn_id

    with ThreadPoolExecutor(4) as threads:
        sent = list(threads.map(send, range(turns)))
    waiting = "SELECT count(*) AS turns FROM tool_effects WHERE status = 'intended' AND waits_for = 'client'"
    wait_until(lambda: installation.query(waiting)[0].turns == turns, f"{turns} turns wait", 10 + turns / 10)
    return sent


def _answer(installation: Installation, turn_ids: list[UUID]) -> None:
    """Bring each turn the result that it waits for."""

    def bring(turn_id: UUID) -> None:
        [pending] = read_turn(installation.database, turn_id)["pending_calls"]
        answer(installation.runtime, turn_id, CallResult(call_id=pending["call_id"], result="brought"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(bring, turn_ids))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(240)]),
        pytest.param(10_000, marks=pytest.mark.chaos),
    ],
)
def test_turns_in_flight_survive_a_change_of_tools_and_prompt(installation: Installation, turns: int) -> None:
    """Each gets the result that it waited for, and ends as it would have, with the new instructions in its prompt."""
    first = _worker(installation, "first")
    sent = _begin(installation, turns)
    first.kill("SIGTERM")
    _worker(installation, "second")
    _answer(installation, sent)
    settled = installation.settled(*sent, within_s=30 + turns / 10)
    assert {(turn["status"], turn["attempts"]) for turn in settled} == {("done", 1)}
    assert [turn["reply"]["text"] for turn in settled] == [
        answer_to(f"{OUTSIDE}: {number}", "brought") for number in range(turns)
    ]
    told = {body["messages"][0]["content"].split(".")[0] for body in installation.model_server.server.requests}
    assert told == {"You are the first", "You are the second"}
    installation.check()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_pinned_turns_end_at_the_version_that_began_them(installation: Installation) -> None:
    """While workers of both versions run, each turn ends at that which began it. What has not begun is anybody's."""
    pinned = {"PERDURE_TURN__PIN_AGENTS": "true"}
    first = _worker(installation, "first", **pinned)
    sent = _begin(installation, 20)
    second = _worker(installation, "second", **pinned)
    _answer(installation, sent)
    settled = installation.settled(*sent, within_s=60)
    assert {(turn["status"], turn["attempts"]) for turn in settled} == {("done", 1)}
    versions = "SELECT DISTINCT fingerprint FROM turns"
    [before] = installation.query(versions)
    first.kill("SIGTERM")
    later = installation.accept(f"{OUTSIDE}: later", user="late").turn_id
    wait_until(lambda: read_turn(installation.database, later)["pending_calls"], "the turn waits", 30)
    assert len(installation.query(versions)) == 2
    assert {row.fingerprint for row in installation.query(versions)} > {before.fingerprint}
    assert "as it was when the turn began" in second.logs()
    _answer(installation, [later])
    installation.settled(later)
    installation.check()
