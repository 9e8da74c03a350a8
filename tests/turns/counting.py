"""Tools that store working variables, and helpers for turns that call these tools."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from perdure import ToolContext, tool
from perdure.snapshots import queries as snapshots
from perdure.snapshots.postgres import assemble
from perdure.snapshots.store import Stored
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

AFTER_LEASE_S = 31


@tool(effect="pure")
def add(context: ToolContext) -> int:
    """Add one to the variable `n`."""
    with context.working_variables as variables:
        variables["n"] = variables.get("n", 0) + 1
        return int(variables["n"])


@tool(effect="pure")
def keep(text: str, context: ToolContext) -> str:
    """Store the text in the variable `text`."""
    with context.working_variables as variables:
        variables["text"] = text
    return "kept"


def committed_snapshot(harness: Harness, session_id: UUID) -> Stored:
    """The session's last committed snapshot, from PostgreSQL."""
    parameters = {"session_id": session_id, "history_turns": 20}
    return assemble(session_id, harness.database.run(snapshots.PRESENT, parameters)[0])


def ask_to_count(harness: Harness, **given: Any) -> dict[str, Any]:
    """Run a turn that adds one to the variable `n`."""
    harness.script(calls(("add", {})), says("counted"))
    return harness.ask(**given)


def woken_sessions(harness: Harness) -> list[UUID]:
    """The sessions that one round of the sweeper wakes."""
    harness.waker.sessions.clear()
    harness.sql("DELETE FROM sweeps")  # the next round is due at once
    sweep(harness.runtime)
    return list(harness.waker.sessions)
