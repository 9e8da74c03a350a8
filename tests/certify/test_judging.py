"""What the events of a schedule show about a tool's declaration."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent
from perdure.certify.certificate import Certificate, Kind
from perdure.certify.certification import Scenario
from perdure.certify.faults import Place
from perdure.certify.judging import Judge
from perdure.certify.schedules import Schedule
from perdure.certify.stack import Played
from perdure.testing import call
from perdure.tools.registry import Tool
from tests.certify import liars

EFFECT = "0199f2a4-0000-7000-8000-000000000001"


def _began() -> dict[str, Any]:
    return {"event": "began"}


def _returned(*changed: str) -> dict[str, Any]:
    return {"event": "returned", "changed": list(changed), "connections": [], "text": "done"}


def _raised(*changed: str) -> dict[str, Any]:
    return {**_returned(*changed), "event": "raised"}


def _probed(answer: str) -> dict[str, Any]:
    return {"event": "probed", "answer": answer}


def _kinds(given: Tool, *events: dict[str, Any], status: str = "done", turn: str = "done") -> list[Kind]:
    """What a judge finds if a killed turn, which is done undisturbed, makes these events."""
    agent = Agent("assistant", "You help.", tools=[given])
    scenario = Scenario(call(given.name))
    certificate = Certificate("a module")
    judge = Judge(certificate, {("assistant", given.name): given})
    done = {"status": "done", "error": None}
    judge.take(Schedule(agent, scenario), Played(done, [], [], [], 2))
    row = {"effect_id": EFFECT, "tool": given.name, "status": status, "result": "done"}
    told = [{"effect_id": EFFECT, "tool": given.name, **each} for each in events]
    killed = Schedule(agent, scenario, Place("within", f"{given.name}.acted"))
    judge.take(killed, Played({**done, "status": turn}, told, [row], [], 2))
    return [each.kind for each in certificate.findings]


@pytest.mark.parametrize(
    ("given", "events", "kinds"),
    [
        (liars.look_up, [_began(), _returned()], []),
        (liars.look_up, [_began(), _returned(), _began(), _returned()], []),
        (liars.look_up, [_began(), _returned("a file")], [Kind.NOT_PURE]),
        (liars.look_up, [_began(), _raised("a file")], [Kind.NOT_PURE]),
        (liars.order, [_began(), _returned("a file")], []),
        (liars.order, [_began(), _returned("a file"), _began(), _returned()], []),
        (liars.order, [_began(), _began(), _returned("a file")], []),
        (liars.order, [_began(), _raised("a file"), _began(), _returned("a file")], []),
        (liars.order, [_began(), _returned("a file"), _began(), _returned("a file")], [Kind.NOT_IDEMPOTENT]),
        (liars.mail, [_began(), _returned("a file")], []),
        (liars.mail, [_began(), _returned("a file"), _began(), _returned("a file")], [Kind.PERDURE]),
        (liars.mail, [], [Kind.PERDURE]),
        (liars.pay, [_probed("nothing"), _began(), _returned("a file")], []),
        (liars.pay, [_began(), _probed("nothing"), _began(), _returned("a file")], []),
        (liars.pay, [_began(), _returned("a file"), _probed("unknown"), _began()], [Kind.PERDURE]),
        (liars.pay, [_began(), _returned("a file"), _probed("nothing"), _began()], [Kind.PROBE_DENIES]),
        (liars.pay, [_began(), _returned(), _probed("nothing"), _began(), _returned("a file")], []),
        (liars.pay, [_began(), _returned(), _probed("nothing"), _began(), _returned()], [Kind.PROBE_DENIES]),
        (liars.pay, [_began(), _raised(), _probed("nothing"), _began(), _returned()], []),
        (liars.send, [_began(), _returned("a file"), _probed("happened")], []),
        (liars.send, [_began(), _probed("happened")], []),
        (liars.send, [_probed("happened")], [Kind.PROBE_CLAIMS]),
    ],
)
def test_a_call_is_judged_by_what_its_tool_declares(
    given: Tool, events: list[dict[str, Any]], kinds: list[Kind]
) -> None:
    """Each kind of lie is found, and nothing is found where the declaration allows what happened."""
    assert _kinds(given, *events) == kinds


def test_a_turn_that_ends_otherwise_is_a_fault_of_perdure() -> None:
    assert _kinds(liars.order, _began(), _returned(), turn="failed") == [Kind.PERDURE]


def test_the_shortest_schedule_is_kept_and_the_others_are_counted() -> None:
    agent, scenario = Agent("liar", "You lie.", tools=[liars.look_up]), Scenario(call("look_up", article="ink"))
    certificate = Certificate("a module")
    judge = Judge(certificate, {("liar", "look_up"): liars.look_up})
    told = [{"effect_id": EFFECT, "tool": "look_up", **each} for each in (_began(), _returned("the file a"))]
    row = {"effect_id": EFFECT, "tool": "look_up", "status": "done", "result": "done"}
    played = Played({"status": "done", "error": None}, told, [row], [], 2)
    for place, flush in ((None, False), (Place("after", "turns.step"), False), (Place("after", "turns.step"), True)):
        judge.take(Schedule(agent, scenario, place, flush=flush), played)
    (found,) = certificate.findings
    assert (found.schedule, found.schedules) == ('liar calls look_up({"article": "ink"})', 3)
    assert str(found).splitlines()[0] == "look_up of liar: it is declared pure, but it changes something."
    assert not certificate
    assert certificate.played == {"schedules": 3, "kills": 2, "flushes": 1}
    report = certificate.to_dict()["tools"][0]
    assert {name: report[name] for name in ("calls", "ran", "repeated")} == {"calls": 3, "ran": 3, "repeated": 0}


@pytest.mark.parametrize(
    ("given", "ended", "note"),
    [
        (liars.book, _returned(), "no effect was seen"),
        (liars.book, _returned("the file a"), None),
        (liars.price, _returned(), None),
        (liars.price, {**_returned(), "connections": ["db:5432"]}, "connects to db:5432"),
        (liars.price, {**_raised(), "text": "There is no such article."}, "fails: There is no such article."),
        (liars.mail, _returned(), None),
    ],
)
def test_what_was_not_seen_is_said(given: Tool, ended: dict[str, Any], note: str | None) -> None:
    """A certificate does not claim more than the certification has seen."""
    agent, certificate = Agent("honest", "You help.", tools=[given]), Certificate("a module")
    judge = Judge(certificate, {("honest", given.name): given})
    told = [{"effect_id": EFFECT, "tool": given.name, **each} for each in (_began(), ended)]
    played = Played({"status": "done", "error": None}, told, [], [], 2)
    judge.note_what_was_not_seen([(Schedule(agent, Scenario(call(given.name))), played)])
    (report,) = certificate.tools
    assert [each.startswith(str(note)) for each in report.notes] == [True] * bool(note)
