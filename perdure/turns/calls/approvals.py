"""Approvals: tool calls that wait for a person's decision, without a worker.

A reply with such a call is committed with its calls `asked` (a person decides) or `approved` (no decision needed), and
none of them begins. The turn then waits: no lease, no worker, no attempt, and no worker claims the session before the
approval expires. The last decision wakes the session; the next worker begins the approved calls concurrently. The
commit that begins them also denies undecided calls if the approval has expired or the session's end is requested.
Cancelling closes the turn with its calls.

Each statement locks the session's row, so decisions, an end and a cancellation are serialised. A decision counts only
while the turn waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, ValidationInfo, field_validator
from sqlalchemy import Row

from perdure.database.engine import Database, Executor, as_json
from perdure.errors import Conflict, InvalidRequest, NotFound, ToolError
from perdure.runtime import Runtime
from perdure.text.untrusted import what_is_wrong
from perdure.turns.calls import queries
from perdure.turns.lease.claim import LeaseLost
from perdure.turns.lease.hold import Hold

log = logging.getLogger(__name__)

UNBEGUN = frozenset({"asked", "approved"})
"""The statuses of calls that wait for a decision, or for the decisions of the other calls."""

DENIED = "A person did not approve of this call, and it was not run. Do not ask for it again unless you are told to."
EXPIRED = "Nobody approved of this call in time, and it was not run."
ENDED = "The conversation was ended before anybody approved of this call, and it was not run."


_DENIED_WITH_ARGUMENTS: JsonValue = {
    "required": ["decision", "arguments"],
    "properties": {"decision": {"const": "deny"}, "arguments": {"type": "object"}},
}


class Decision(BaseModel):
    """A decision about a call, as `POST /v1/turns/{id}/approval` takes it.

    `arguments` replace the model's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"not": _DENIED_WITH_ARGUMENTS})

    call_id: Annotated[str, Field(strict=True, min_length=1)]
    decision: Literal["approve", "deny"]
    arguments: dict[str, Any] | None = None

    @field_validator("arguments")
    @classmethod
    def _only_approved(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if value is not None and info.data.get("decision") == "deny":
            raise ValueError("they go with an approval only")
        return value


class Waits(Enum):
    """The outcome of releasing a session until its calls are decided."""

    YES = auto()
    CANCELLED = auto()
    """The turn is cancelled: it does not wait."""
    ENDING = auto()
    """The session's end is requested: undecided calls are denied."""


class Undecided(Exception):
    """Some of the calls wait for a decision."""


def parse_decision(given: Mapping[str, Any]) -> Decision:
    """Parse a decision from outside.

    Raises:
        InvalidRequest: it is malformed; the error names the field and the reason.
    """
    try:
        return Decision.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_input=False)
        raise InvalidRequest(
            " ".join(f"{'.'.join(map(str, item['loc']))}: {what_is_wrong(item)}." for item in wrong)
        ) from None


def decide(runtime: Runtime, turn_id: UUID, decision: Decision) -> None:
    """Decide about a call that waits; after the last decision the turn continues.

    Raises:
        NotFound: there is no such turn, or no such call in it.
        Conflict: the call does not wait: it was decided, has expired, or its turn is being ended.
        InvalidRequest: the arguments do not fit the tool.
        Unavailable: the database cannot be reached.
    """
    with runtime.database.transaction("turns.decide") as transaction:
        locked = transaction.run(queries.LOCK_OF_TURN, {"turn_id": turn_id})
        if not locked:
            raise NotFound("There is no such turn.")
        found = transaction.run(queries.FIND_CALL, {"turn_id": turn_id, "call_id": decision.call_id})
        if not found:
            raise NotFound("There is no such call in this turn.")
        row = found[0]
        _require_open(row, ending=locked[0].ending)
        approved = decision.decision == "approve"
        last = transaction.run(
            queries.DECIDE,
            {
                "session_id": locked[0].session_id,
                "turn_id": turn_id,
                "effect_id": row.effect_id,
                "status": "approved" if approved else "denied",
                "result": None if approved else DENIED,
                "arguments": _checked(runtime, row, decision.arguments),
            },
        )
    log.info("turn %s: the call %s of %s is decided: %s", turn_id, decision.call_id, row.tool, decision.decision)
    if last:
        runtime.wake.session(locked[0].session_id, row.priority)


def wait(database: Database, hold: Hold, turn_id: UUID, message_seq: int, spent_s: float) -> Waits:
    """Release the session until the calls of a message are decided.

    Raises:
        LeaseLost: the token has moved on; nothing was written.
        Unavailable: the database cannot be reached.
    """
    with database.transaction("turns.wait_approval") as transaction:
        # Cancelling and ending hold this lock, too, so what is read after it is final.
        if not transaction.run(queries.LOCK_HELD, hold.held):
            raise LeaseLost
        given = {**hold.held, "turn_id": turn_id, "message_seq": message_seq, "spent_s": spent_s}
        if transaction.run(queries.WAIT_APPROVAL, given):
            return Waits.YES
        return Waits.CANCELLED if transaction.run(queries.IS_CANCELLED, {"turn_id": turn_id}) else Waits.ENDING


def begin(
    executor: Executor,
    hold: Hold,
    *,
    turn_id: UUID,
    message_seq: int,
    calls: Iterable[tuple[UUID, float]],
    lease_s: float,
) -> None:
    """Begin the approved calls among `calls` (effect id, seconds that it may take), once all are decided.

    Raises:
        Undecided: some are not; nothing has begun.
        LeaseLost: the token has moved on; nothing was written.
    """
    rows = executor.run(
        queries.BEGIN_APPROVED,
        {
            **hold.held,
            "lease_s": lease_s,
            "turn_id": turn_id,
            "message_seq": message_seq,
            "calls": as_json([{"effect_id": effect_id, "timeout_s": timeout_s} for effect_id, timeout_s in calls]),
            "expired": EXPIRED,
            "ended": ENDED,
        },
    )
    if not rows:
        raise LeaseLost
    if rows[0].undecided:
        raise Undecided


def _require_open(row: Row[Any], *, ending: bool) -> None:
    if row.status != "asked":
        raise Conflict("That call is decided already, or needs no approval.")
    if ending or not row.waits:
        raise Conflict("That call no longer waits: its turn continues or has ended.")
    if row.expired:
        raise Conflict("The approval of that call has expired: it is denied.")


def _checked(runtime: Runtime, row: Row[Any], arguments: Mapping[str, Any] | None) -> str | None:
    """The arguments as text, checked against the tool."""
    if arguments is None:
        return None
    agent, text = runtime.agents.get(row.agent), as_json(arguments)
    tool = agent.find_tool(row.tool)
    if tool is None and agent.may_have(row.tool):
        return text  # a server checks its tools' arguments itself
    if tool is None:
        raise Conflict(f"The agent {row.agent!r} has no tool {row.tool!r} any more.")
    try:
        tool.parse(text)
    except ToolError as error:
        raise InvalidRequest(error.message) from None
    return text
