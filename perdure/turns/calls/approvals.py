"""Approvals: tool calls that wait for a person's decision. The wait occupies no worker.

If any call of a reply needs a decision, no call of that reply begins. The calls that need a decision are committed as
`asked`, the others as `approved`. The worker then releases its lease. No worker claims the session until a person has
made the last decision, or the approval expires. The wait does not count as an attempt.

The last decision wakes the session, and the next worker begins the approved calls concurrently. If the approval has
expired or the session's end is requested, the commit that begins the approved calls also denies the undecided calls.
Cancelling the turn settles it and denies its calls.

A tool names who approves a call: the user of the turn, or only staff. The caller of `decide` says for whom it acts.

A decision, the beginning of the wait, the session's end and a cancellation each lock the session's row first, so they
are serialised. A decision is accepted only while the turn waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator
from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.engine import as_json
from perdure.errors import Conflict, Forbidden, InvalidRequest, NotFound, ToolError
from perdure.runtime import Runtime
from perdure.text.untrusted import load_object, validated
from perdure.tools.registry import STAFF, USER, who_approves
from perdure.turns.calls import queries

log = logging.getLogger(__name__)

UNBEGUN = frozenset({"asked", "approved"})
"""Statuses of a call that waits for a decision about itself or about another call of the same reply."""

DENIED = "A person denied this call, and it was not run. Do not ask for it again unless the user asks you to."
EXPIRED = "This call was not approved in time, and it was not run."
ENDED = "The conversation ended before this call was approved, and it was not run."


_DENIED_WITH_ARGUMENTS: JsonValue = {
    "required": ["decision", "arguments"],
    "properties": {"decision": {"const": "deny"}, "arguments": {"type": "object"}},
}


class Decision(BaseModel):
    """A person's decision about a call: the body of `POST /v1/turns/{id}/approval`.

    `arguments`, if given, replace the arguments that the model chose.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"not": _DENIED_WITH_ARGUMENTS})

    call_id: Annotated[str, Field(strict=True, min_length=1)]
    decision: Literal["approve", "deny"]
    arguments: dict[str, Any] | None = None

    @field_validator("arguments")
    @classmethod
    def _only_approved(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if value is not None and info.data.get("decision") == "deny":
            raise ValueError("allowed only with the decision approve")
        return value


@dataclass(frozen=True, slots=True)
class Decider:
    """Who decides. `name` is stored with the call. `is_staff` tells whether staff's calls may be decided, too."""

    name: str
    is_staff: bool = False

    @classmethod
    def user(cls, key: UserKey, *, is_staff: bool = False) -> Decider:
        return cls(f"user:{key}", is_staff)


_UNKNOWN = Decider("unknown")

OPERATOR = Decider("operator", is_staff=True)
"""A person at the command line of this installation."""


def none_begun(statuses: Iterable[str]) -> bool:
    """Whether at least one call of a message is `asked` or `approved`, and no call has begun."""
    present = set(statuses)
    return bool(present & UNBEGUN) and present <= UNBEGUN | {"denied"}


def parse_decision(given: Mapping[str, Any]) -> Decision:
    """Validate the body of a request.

    Raises:
        InvalidRequest: a field is invalid; the error names the field.
    """
    return validated(Decision, given)


def decide(runtime: Runtime, turn_id: UUID, decision: Decision, by: Decider = _UNKNOWN) -> None:
    """Record a decision about a call. The last decision that a turn waits for wakes the turn's session.

    The caller has checked that `by` has access to the turn.

    Raises:
        NotFound: there is no such turn, or no such call in it.
        Forbidden: staff approves the call, or a call with the edited arguments.
        Conflict: the call does not wait for a decision, or the agent no longer has the call's tool.
        InvalidRequest: the arguments do not fit the tool.
    """
    wanted = {"turn_id": turn_id, "call_id": decision.call_id}
    # Before the transaction: the tool checks edited arguments, and its author's function may name the approver.
    asking = runtime.database.run(queries.FIND_CALL, wanted)
    asked = [row for row in asking if row.status == "asked"]
    arguments, approver = _examined(runtime, asked[0], decision.arguments) if asked else (None, USER)
    with runtime.database.transaction("turns.decide") as transaction:
        locked = transaction.run(queries.LOCK_OF_TURN, {"turn_id": asking[0].turn_id if asking else turn_id})
        if not locked:
            raise NotFound("There is no such turn.")
        found = transaction.run(queries.FIND_CALL, wanted)
        if not found:
            raise NotFound("There is no such call in this turn.")
        row = found[0]
        if not by.is_staff and STAFF in (row.approver, approver):
            edited = "" if row.approver == STAFF or decision.arguments is None else " with these arguments"
            raise Forbidden(
                f"This call{edited} needs the approval of staff, so the user of the turn cannot decide about it."
            )
        if row.status != "asked":
            raise Conflict("That call was already decided, or needed no decision.")
        if locked[0].ending or not row.waits or row.unwanted:
            raise Conflict(
                "That call no longer waits: its turn runs or is settled, its session is ending,"
                " or the turn that asked its agent no longer waits for it."
            )
        if row.expired:
            raise Conflict("The time to approve that call has expired: it is denied.")
        approved = decision.decision == "approve"
        last = transaction.run(
            queries.DECIDE,
            {
                "session_id": locked[0].session_id,
                "turn_id": row.turn_id,
                "effect_id": row.effect_id,
                "status": "approved" if approved else "denied",
                "result": None if approved else DENIED,
                "arguments": arguments,
                "decided_by": by.name,
            },
        )
    log.info("turn %s: decision about the call %s of %s: %s", turn_id, decision.call_id, row.tool, decision.decision)
    if last:
        runtime.wake.session(locked[0].session_id, row.priority)


def _examined(runtime: Runtime, row: Row[Any], edited: Mapping[str, Any] | None) -> tuple[str | None, str]:
    """Return edited arguments as JSON (`None`: they are not edited), and who approves the call by the present tool.

    The call may have been asked by a worker of another deployment, whose tool names another approver. Validates edited
    arguments with the tool, unless the tool is an MCP server's.
    """
    agent = runtime.agents.get(row.agent)
    tool = agent.find_tool(row.tool)
    text = None if edited is None else as_json(edited)
    if tool is None and agent.may_have(row.tool):  # the MCP server checks the arguments when it is called
        server, _, name = row.tool.partition(":")
        declared = next(each.approver_of(name) for each in agent.servers if each.name == server)
        given = load_object(row.arguments) if edited is None else edited
        return text, who_approves(row.tool, declared, given)
    if tool is None and not agent.is_own:
        return text, row.approver if edited is None else STAFF
    if tool is None:
        if edited is None:
            return None, row.approver
        raise Conflict(f"The agent {row.agent!r} no longer has the tool {row.tool!r}.")
    try:
        parsed = tool.parse(row.arguments if text is None else text)
    except ToolError as error:
        if text is None:  # the call itself will fail; its approver stays
            return None, row.approver
        raise InvalidRequest(error.message) from None
    return text, tool.approver_of(parsed)
