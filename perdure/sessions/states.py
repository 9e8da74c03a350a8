"""The states of a session, and the table of transitions between them.

Every statement that changes a state takes the new state from the expression `sql(trigger)`. The expression reads the
present state under the row's lock. PostgreSQL raises an error for a transition that `TRANSITIONS` does not contain.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """A state of a session."""

    INITIALIZING = "initializing"
    ACTIVE = "active"
    THINKING = "thinking"
    TOOL_EXECUTING = "tool_executing"
    WAITING_APPROVAL = "waiting_approval"
    SUMMARIZING = "summarizing"
    ENDING = "ending"
    ENDED = "ended"


class Trigger(StrEnum):
    """An event that moves a session from one state to another."""

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
    # Another worker claims a turn whose worker died.
    (State.THINKING, Trigger.TURN_CLAIMED): State.THINKING,
    (State.TOOL_EXECUTING, Trigger.TURN_CLAIMED): State.TOOL_EXECUTING,
    (State.WAITING_APPROVAL, Trigger.TURN_CLAIMED): State.WAITING_APPROVAL,
    (State.THINKING, Trigger.TOOL_REQUESTED): State.TOOL_EXECUTING,
    (State.TOOL_EXECUTING, Trigger.TOOL_RESULT): State.THINKING,
    # A turn that was parked with open calls resumes in `thinking`, and then reads the calls' results.
    (State.THINKING, Trigger.TOOL_RESULT): State.THINKING,
    (State.TOOL_EXECUTING, Trigger.APPROVAL_NEEDED): State.WAITING_APPROVAL,
    (State.WAITING_APPROVAL, Trigger.APPROVAL_DECIDED): State.THINKING,
    (State.THINKING, Trigger.RESPONSE_COMPLETE): State.ACTIVE,
    **{(state, Trigger.TURN_STOPPED): State.ACTIVE for state in (State.ACTIVE, *_TURN_STATES)},
    (State.ACTIVE, Trigger.END_DUE): State.SUMMARIZING,
    # An interrupted ending resumes in the state that it had reached.
    (State.SUMMARIZING, Trigger.END_DUE): State.SUMMARIZING,
    (State.ENDING, Trigger.END_DUE): State.ENDING,
    (State.SUMMARIZING, Trigger.SUMMARY_SAVED): State.ENDING,
    (State.ENDING, Trigger.CLEANED_UP): State.ENDED,
}


def sql(trigger: Trigger, column: str = "state") -> str:
    """The SQL expression for the state to which `trigger` leads from the present state in `column`.

    If `TRANSITIONS` has no such transition, PostgreSQL raises an error (`IllegalTransition`) and writes nothing.
    """
    transitions = [(before, after) for (before, each), after in TRANSITIONS.items() if each is trigger]
    cases = " ".join(f"WHEN '{before}' THEN '{after}'" for before, after in transitions)
    allowed = ", ".join(f"{before} to {after}" for before, after in transitions)
    return f"CASE {column} {cases} ELSE perdure_illegal_transition({column}, '{trigger} ({allowed})') END"
