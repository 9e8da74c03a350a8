"""The states of a session, and the one table of what leads from which to which.

The table is ADR-021's, with the transitions that parking, cancelling, approvals and crashes
need; `drawing.py` draws it. Every statement that changes a state takes the new one from `sql(trigger)`, which
reads the state before under the row's lock and refuses what the table does not hold. So no
other state is ever observable, whoever writes.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a session is in its life."""

    INITIALIZING = "initializing"
    ACTIVE = "active"
    THINKING = "thinking"
    TOOL_EXECUTING = "tool_executing"
    WAITING_APPROVAL = "waiting_approval"
    SUMMARIZING = "summarizing"
    ENDING = "ending"
    ENDED = "ended"


class Trigger(StrEnum):
    """What moves a session from one state to another."""

    SESSION_CREATED = "session created"
    TURN_CLAIMED = "turn claimed"
    TOOL_REQUESTED = "tool requested"
    TOOL_RESULT = "tool result received"
    APPROVAL_NEEDED = "approval needed"
    APPROVAL_DECIDED = "approval decided"
    RESPONSE_COMPLETE = "response complete"
    TURN_STOPPED = "turn parked, cancelled or failed"
    END_DUE = "inactivity timeout or explicit end"
    SUMMARY_SAVED = "summary saved"
    CLEANED_UP = "cleanup done"


_TURN_STATES = (State.THINKING, State.TOOL_EXECUTING, State.WAITING_APPROVAL)

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.INITIALIZING, Trigger.SESSION_CREATED): State.ACTIVE,
    (State.ACTIVE, Trigger.TURN_CLAIMED): State.THINKING,
    # A turn whose runner died is taken over where it stood.
    (State.THINKING, Trigger.TURN_CLAIMED): State.THINKING,
    (State.TOOL_EXECUTING, Trigger.TURN_CLAIMED): State.TOOL_EXECUTING,
    (State.WAITING_APPROVAL, Trigger.TURN_CLAIMED): State.WAITING_APPROVAL,
    (State.THINKING, Trigger.TOOL_REQUESTED): State.TOOL_EXECUTING,
    (State.TOOL_EXECUTING, Trigger.TOOL_RESULT): State.THINKING,
    # A turn that was parked with open calls comes back thinking, and then finds their results.
    (State.THINKING, Trigger.TOOL_RESULT): State.THINKING,
    (State.TOOL_EXECUTING, Trigger.APPROVAL_NEEDED): State.WAITING_APPROVAL,
    (State.WAITING_APPROVAL, Trigger.APPROVAL_DECIDED): State.THINKING,
    (State.THINKING, Trigger.RESPONSE_COMPLETE): State.ACTIVE,
    **{(state, Trigger.TURN_STOPPED): State.ACTIVE for state in (State.ACTIVE, *_TURN_STATES)},
    (State.ACTIVE, Trigger.END_DUE): State.SUMMARIZING,
    # A crash in the middle of ending is resumed where it was.
    (State.SUMMARIZING, Trigger.END_DUE): State.SUMMARIZING,
    (State.ENDING, Trigger.END_DUE): State.ENDING,
    (State.SUMMARIZING, Trigger.SUMMARY_SAVED): State.ENDING,
    (State.ENDING, Trigger.CLEANED_UP): State.ENDED,
}


def sql(trigger: Trigger, column: str = "state") -> str:
    """The SQL expression for the state that `trigger` leads to from the one in `column`.

    PostgreSQL raises what the table refuses (`IllegalTransition`), and writes nothing.
    """
    ways = [(before, after) for (before, each), after in TRANSITIONS.items() if each is trigger]
    cases = " ".join(f"WHEN '{before}' THEN '{after}'" for before, after in ways)
    leads = ", ".join(f"{before} to {after}" for before, after in ways)
    return f"CASE {column} {cases} ELSE perdure_illegal_transition({column}, '{trigger} ({leads})') END"
