"""Compares what a schedule showed with what the tools declare.

    pure          no execution changes anything
    idempotent    an execution after one that returned changes nothing more, for the same effect id
    unsafe        it runs once, unless its probe says that nothing happened
    probe         says `Happened` only if the tool began, and `DidNotHappen` only if no execution changed anything

Whatever happens, the turn ends as it does undisturbed, and a call with a result has run. What breaks these, or runs an
unsafe tool twice, is perdure's fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.certify.certificate import Certificate, Finding, Kind, ToolReport
from perdure.certify.schedules import Schedule
from perdure.certify.stack import Played
from perdure.tools.registry import Effect, Tool

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Seen:
    kind: Kind
    message: str
    seen: str


class Judge:
    """Judges one schedule after another, the shortest ones first, and fills the certificate."""

    def __init__(self, certificate: Certificate, tools: Mapping[tuple[str, str], Tool]) -> None:
        self._certificate = certificate
        self._tools = tools
        self._reports = {
            (agent, name): ToolReport(agent, name, tool.effect.value) for (agent, name), tool in tools.items()
        }
        certificate.tools = list(self._reports.values())
        self._expected: dict[int, str] = {}

    def take(self, schedule: Schedule, played: Played) -> None:
        """Judge a schedule."""
        self._certificate.played["schedules"] += 1
        if played.reached and schedule.place is not None:
            self._certificate.played["kills"] += 1
            self._certificate.played["flushes"] += schedule.flush
        agent = schedule.agent.name
        for effect_id, events in _by_call(played.events).items():
            name = events[0]["tool"]
            report, tool = self._reports.get((agent, name)), self._tools.get((agent, name))
            if report is None or tool is None:
                continue
            row = next((each for each in played.effects if each["effect_id"] == effect_id), {})
            for seen in _judged(tool, events, row):
                self._found(schedule, name, seen)
        for row in played.effects:
            self._count(agent, row, [each for each in played.events if each["effect_id"] == row["effect_id"]], schedule)
        self._judge_turn(schedule, played)

    def _count(self, agent: str, row: Mapping[str, Any], events: Sequence[Event], schedule: Schedule) -> None:
        report = self._reports.get((agent, row["tool"]))
        if report is None:
            return
        ran = sum(each["event"] == "began" for each in events)
        report.calls += 1
        report.ran += ran
        report.repeated += max(ran - 1, 0)
        report.unknown += row["status"] == "unknown"
        happened = any(each.get("answer") == "happened" for each in events)
        if row["status"] == "done" and not ran and not happened:
            message = "perdure stored a result of a call that never ran. Please report this."
            self._found(schedule, row["tool"], _Seen(Kind.PERDURE, message, str(row["result"])))

    def _judge_turn(self, schedule: Schedule, played: Played) -> None:
        ended = played.turn["status"]
        if ended == "failed":
            ended = f"failed ({(played.turn['error'] or {}).get('code')})"
        expected = self._expected.setdefault(id(schedule.scenario), ended)
        if ended == expected == "done":
            return
        for name in sorted(schedule.scenario.tools):
            if schedule.place is None:
                message = f"the turn of its scenario ends as {ended}, without a kill: nothing can be certified so."
                self._found(schedule, name, _Seen(Kind.UNANSWERED, message, _error(played)))
            elif ended != expected:
                message = f"perdure left the turn as {ended}; without a kill, it is {expected}. Please report this."
                self._found(schedule, name, _Seen(Kind.PERDURE, message, _error(played)))

    def _found(self, schedule: Schedule, tool: str, seen: _Seen) -> None:
        """Add a finding, or count it if a schedule that is as short has shown it."""
        for each in self._certificate.findings:
            if (each.agent, each.tool, each.kind) == (schedule.agent.name, tool, seen.kind):
                each.schedules += 1
                return
        self._certificate.findings.append(
            Finding(schedule.agent.name, tool, seen.kind, seen.message, str(schedule), seen.seen)
        )

    def note_what_was_not_seen(self, played: Sequence[tuple[Schedule, Played]]) -> None:
        """Add notes about tools whose effects were not seen. `played` are the undisturbed schedules."""
        for (agent, name), report in self._reports.items():
            events = [
                each
                for schedule, one in played
                for each in one.events
                if schedule.agent.name == agent and each["tool"] == name
            ]
            report.notes += _notes(self._tools[agent, name], events, unknown=report.unknown)


def _by_call(events: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for each in events:
        found.setdefault(each["effect_id"], []).append(each)
    return found


def _judged(tool: Tool, events: Sequence[Event], row: Mapping[str, Any]) -> Iterator[_Seen]:
    """What the events of one call show."""
    for at, event in enumerate(events):
        before = events[:at]
        match event["event"]:
            case "began":
                yield from _begun(tool, before, row)
            case "returned" | "raised":
                yield from _ended(tool, before, event["changed"])
            case _:
                yield from _probed(event["answer"], before, events)


def _begun(tool: Tool, before: Sequence[Event], row: Mapping[str, Any]) -> Iterator[_Seen]:
    began = sum(each["event"] == "began" for each in before)
    allowed = bool(before) and before[-1].get("answer") == "nothing"
    if began and tool.effect is Effect.UNSAFE and not allowed:
        message = "perdure ran an unsafe tool twice, although no probe allowed it. Please report this."
        yield _Seen(Kind.PERDURE, message, f"the call {row.get('effect_id', '')} began {began + 1} times")


def _ended(tool: Tool, before: Sequence[Event], changes: Sequence[str]) -> Iterator[_Seen]:
    if changes and tool.effect is Effect.PURE:
        yield _Seen(Kind.NOT_PURE, "it is declared pure, but it changes something.", "; ".join(changes))
    if changes and tool.effect is Effect.IDEMPOTENT and _last_returned(before) is not None:
        message = "it is declared idempotent, but repeating a call that had returned changes something."
        yield _Seen(Kind.NOT_IDEMPOTENT, message, "; ".join(changes))


def _probed(answer: str, before: Sequence[Event], events: Sequence[Event]) -> Iterator[_Seen]:
    returned = _last_returned(before)
    if answer == "happened" and not any(each["event"] == "began" for each in before):
        message = "its probe says that the call happened, but the tool had not begun."
        yield _Seen(Kind.PROBE_CLAIMS, message, "the model got a result of a call that never ran")
    # A call may return without an effect. So the probe is wrong if something changed, or if no change is ever seen.
    if answer == "nothing" and returned is not None and (_changes(before) or not _changes(events)):
        message = "its probe says that nothing happened, but the tool had returned: it runs again."
        seen = "; ".join(returned["changed"]) or f"it had returned {returned['text']!r}"
        yield _Seen(Kind.PROBE_DENIES, message, seen)


def _last_returned(events: Sequence[Event]) -> Event | None:
    return next((each for each in reversed(events) if each["event"] == "returned"), None)


def _changes(events: Sequence[Event]) -> bool:
    return any(each.get("changed") for each in events)


def _notes(tool: Tool, events: Sequence[Event], *, unknown: int) -> Iterator[str]:
    ended = [each for each in events if each["event"] in {"returned", "raised"}]
    if not ended:
        yield "did not end within its time limit: raise --tool-timeout"
        return
    if all(each["event"] == "raised" for each in ended):
        yield f"fails: {ended[0]['text'][:200]}"
    reached = sorted({address for each in ended for address in each["connections"]})
    if tool.effect is not Effect.UNSAFE and not any(each["changed"] for each in ended):
        if reached:
            yield f"connects to {', '.join(reached[:3])}; what it changes there, only a world shows"
        elif tool.effect is Effect.IDEMPOTENT:
            yield "no effect was seen, so the declaration is not proven: give the certification a world"
    if unknown and tool.probe is None:
        yield "a probe would settle its unknown outcomes"


def _error(played: Played) -> str:
    error = played.turn["error"]
    return "" if error is None else f"{error['code']}: {error['message']}"
