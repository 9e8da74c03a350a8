"""Reports of a call's progress: from any thread of the tool, until the call has ended."""

from __future__ import annotations

from typing import cast
from uuid import UUID

from perdure import ToolContext, tool
from perdure.events.writer import EventWriter, TurnEvents
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says


class _Outlet:
    """Takes the events of turns that a client follows."""

    def __init__(self) -> None:
        self.opened: list[TurnEvents] = []

    def open(self, turn_id: UUID, session_id: UUID, token: int, epoch: int) -> TurnEvents:
        self.opened.append(TurnEvents(turn_id, session_id, token, epoch, self))
        return self.opened[-1]

    def has_listener(self, turn_id: UUID) -> bool:
        del turn_id
        return True

    def changed(self, turn: TurnEvents, *, at_once: bool = False) -> None:
        """Write nothing."""

    def next_number(self) -> int:
        return 1


def _reports(events: TurnEvents) -> list[str]:
    return [entry.data["text"] for entry in events.take() if entry.kind == "progress"]


def test_a_call_that_has_ended_reports_nothing(harness: Harness) -> None:
    """What it left behind, such as a thread, may go on to report: it is no progress of the turn's next step."""
    outlet, during = _Outlet(), list[str]()
    kept: list[ToolContext] = []

    @tool(effect="pure")
    def act(context: ToolContext) -> str:
        """Act."""
        kept.append(context)
        context.progress("1 of 2")
        during.extend(_reports(outlet.opened[0]))
        return "acted"

    harness.events = cast("EventWriter", outlet)
    harness.equip(act)
    harness.script(calls(("act", {})), says("done"))
    harness.ask()
    kept[0].progress("2 of 2")
    assert (during, _reports(outlet.opened[0])) == (["1 of 2"], [])


def test_each_of_many_calls_may_report_again() -> None:
    """The bound of the calls of a step drops the reports of further calls, not newer ones of the same."""
    events = _Outlet().open(UUID(int=1), UUID(int=2), 1, 0)
    for number in range(101):
        events.progress(str(number), "act", "1 of 2")
    assert len(_reports(events)) == 100
    events.progress("5", "act", "2 of 2")
    assert _reports(events) == ["2 of 2"]
