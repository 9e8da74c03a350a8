"""Results of calls that someone outside runs: an `external_tool`, or a deferred call of an adapted agent.

The answer to a question of `ask_user` may come in the same way, as a value (`asked`).

The first result of a call counts; a repeated one changes nothing. `awaited.record` records it and wakes the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.json_schema import SkipJsonSchema
from sqlalchemy import Row

from perdure.agents import Agents
from perdure.database.engine import Database, Executor
from perdure.errors import Conflict, NotFound
from perdure.runtime import Runtime, Waker
from perdure.text.untrusted import validated
from perdure.tools.awaited.port import TaskEnded
from perdure.turns.calls import asked, awaited, queries

_ENDED = frozenset({"done", "failed"})


class CallResult(BaseModel):
    """The result of a call, or the error with which it failed: the body of `POST /v1/turns/{id}/results`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"oneOf": [{"required": ["result"]}, {"required": ["error"]}]},
    )

    call_id: Annotated[str, Field(strict=True, min_length=1)]
    result: JsonValue = None
    error: Annotated[str, Field(strict=True, min_length=1)] | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if ("result" in self.model_fields_set) == (self.error is not None):
            raise ValueError("either a result or an error is required")
        return self


def parse_result(given: Mapping[str, Any]) -> CallResult:
    """Validate the body of a request.

    Raises:
        InvalidRequest: a field is invalid; the error names the field.
    """
    return validated(CallResult, given)


def answer(runtime: Runtime, turn_id: UUID, given: CallResult) -> None:
    """As `bring`, in a process with a runtime."""
    bring(runtime.database, runtime.wake, runtime.agents, turn_id, given)


def bring(database: Database, wake: Waker | None, agents: Agents | None, turn_id: UUID, given: CallResult) -> None:
    """Record the result of a call. The last result that a turn waits for wakes the turn's session.

    The caller has checked that whoever brings the result has access to the turn. `wake` and `agents` are as for
    `awaited.record`.

    Raises:
        NotFound: there is no such turn, or no such call in it.
        Conflict: the call is not run outside, has not begun, or the turn no longer waits for it.
    """
    row = _find_waiting(database, turn_id, given.call_id)
    if row is None:
        return
    failed = given.error is not None
    if row.waits_for == "user" and not failed:
        is_recorded = asked.bring(database, wake, row.effect_id, given.result)
    else:
        ended = TaskEnded(failed=failed, value=given.error if failed else given.result)
        recorded = awaited.record(database, wake, agents, row.effect_id, ended)
        is_recorded = recorded is not None and recorded.waits
    if not is_recorded:  # since the row was read, another result has arrived, or the turn has stopped waiting
        _find_waiting(database, turn_id, given.call_id)


def _find_waiting(executor: Executor, turn_id: UUID, call_id: str) -> Row[Any] | None:
    """The call, if it waits for a result from outside; `None` if it has one. Raises as `bring`."""
    found = executor.run(queries.FIND_CALL, {"turn_id": turn_id, "call_id": call_id})
    if not found:
        raise NotFound("There is no such call in this turn.")
    row = found[0]
    if row.waits_for not in {"client", "user"}:
        raise Conflict("That call is not run outside, so nobody brings its result.")
    if row.status in _ENDED and not row.unanswered:
        return None
    if row.status != "intended" or row.unwanted:
        raise Conflict("That call waits for no result: it has not begun, or its turn no longer waits for it.")
    return row
