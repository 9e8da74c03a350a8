"""Results of tool calls as values: read from effect rows, and rendered as text for the transcript.

The step loop commits results to the transcript. If a message has several calls, `execute` and `awaited` first
record each result in the effect row of its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Executor
from perdure.models.protocol import ToolCall, Usage
from perdure.text.untrusted import cut, storable
from perdure.tools.variables import Change
from perdure.turns.calls import approvals, queries
from perdure.turns.calls.plan import Planned
from perdure.turns.transcript import Entry

UNKNOWN_OUTCOME = (
    "The outcome of this call is unknown: it was interrupted after it had begun and is not repeated, "
    "for it may have taken effect. Check before you call it again."
)

LOST = (
    "The task of this call has not ended, and this conversation no longer waits for it. "
    "Its outcome is unknown: it may have taken effect. Check before you call it again."
)

UNANSWERED = (
    "No result of this call has arrived, and this conversation no longer waits for it. "
    "Its outcome is unknown: it may have taken effect. Check before you call it again."
)

ABANDONED = (
    "The agent has not answered, and this conversation no longer waits for it. "
    "Its outcome is unknown: what it did until it was cancelled has taken effect. Check before you call it again."
)

_UNKNOWN = {
    "task": LOST,
    "client": UNANSWERED,
    "agent": ABANDONED,
    "user": "The user has not answered, and is no longer asked.",
}
"""The texts of unknown outcomes, by what the call waited for."""

UNUSED = "The user has answered, but the turn ended before the answer was used."

_MOST_SAID = 2_000


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call: a status (`done`, `failed`, `denied` or `unknown`), and a text for the model.

    `used` are the tokens of another agent that answered the call, or of the guards that judged the user's answers.
    """

    position: int
    status: str
    text: str
    effect_id: UUID | None = None
    used: Usage | None = None

    def to_dict(self) -> dict[str, Any]:
        """The values to write to the ended call's effect row. `result` is `None`: the transcript holds the text."""
        return {"effect_id": self.effect_id, "status": self.status, "result": None}


def last_recorded(
    executor: Executor, open_reply: Entry, held: Mapping[str, Any] | None, *, screens: bool
) -> tuple[list[Result], list[Change]]:
    """The results of a message's calls at the end of its turn, and the calls' uncommitted changes of working variables.

    `held` is the fence under which the caller holds the session: calls that still wait for a result from outside are
    closed, so that none is accepted from now on. `None`: the caller has locked the session's row. The answer to a
    question that no worker has judged is quoted, unless the agent `screens` what the user says.
    """
    turn_id = open_reply.turn_id
    rows = effect_rows(executor, turn_id, open_reply)
    if held is not None and any(map(_takes_result, rows.values())):
        executor.run(queries.CLOSE_CALLS, {**held, "turn_id": turn_id})
        rows = effect_rows(executor, turn_id, open_reply)
    results = []
    for position in range(len(open_reply.tool_calls)):
        row = rows.get(position)
        result = recorded_result(position, row)
        said = None if row is None else _unjudged(row)
        results.append(result if said is None else replace(result, text=UNUSED if screens else f"{UNUSED} {said}"))
    return with_edited_arguments(open_reply, rows, results), recorded_changes(rows)


def _takes_result(row: Row[Any]) -> bool:
    return row.status == "intended" and row.waits_for in _UNKNOWN and _unjudged(row) is None


def _unjudged(row: Row[Any]) -> str | None:
    """What the user has answered to a question, if no worker has judged it."""
    payload = row.payload or {}
    if row.status != "intended" or row.waits_for != "user" or len(payload.get("said", ())) <= payload.get("judged", 0):
        return None
    said = payload["said"][-1]
    return f"They said: {cut(str(said.get('text', said.get('value'))), _MOST_SAID)}"


def effect_rows(executor: Executor, turn_id: UUID, open_reply: Entry) -> dict[int, Row[Any]]:
    """The effect rows of a message's calls, by position."""
    rows = executor.run(queries.EFFECTS_OF_STEP, {"turn_id": turn_id, "message_seq": open_reply.seq})
    return {row.position: row for row in rows}


def recorded_changes(rows: Mapping[int, Row[Any]]) -> list[Change]:
    """The changes of working variables that finished calls have recorded, but that no step has committed."""
    return [cast("Change", tuple(change)) for row in rows.values() for change in row.variables or ()]


def calls_as_decided(open_reply: Entry, rows: Mapping[int, Row[Any]]) -> list[ToolCall]:
    """The message's calls. Arguments that a person edited replace those of the model."""
    return [
        replace(call, arguments=rows[position].arguments) if position in rows else call
        for position, call in enumerate(open_reply.tool_calls)
    ]


def with_edited_arguments(open_reply: Entry, rows: Mapping[int, Row[Any]], results: Iterable[Result]) -> list[Result]:
    """The results. If a person edited a call's arguments, the text of its result begins with the new arguments.

    The model does not read the arguments that a hook has changed, of a call that no person approved.
    """
    noted = []
    for result in results:
        row = rows.get(result.position)
        call = open_reply.tool_calls[result.position]
        if row is not None and row.approver is not None and row.arguments != call.arguments:
            text = f"The arguments of this call were changed to {row.arguments}\n{result.text}"
            noted.append(replace(result, text=text))
        else:
            noted.append(result)
    return noted


def is_intended(row: Row[Any] | None) -> bool:
    """Whether the call's intent is committed and its result is not."""
    return row is not None and row.status == "intended"


def unbegun_result(planned: Planned, row: Row[Any] | None) -> Result:
    """The result of a call that does not run, because it was denied or refused."""
    if row is not None and row.status == "denied":
        return recorded_result(planned.position, row)
    if row is None and planned.refusal is None:  # refused when the reply was first planned: there is no row
        return recorded_result(planned.position, None)
    return replace(refused_result(planned), effect_id=None if row is None else row.effect_id)


def refused_result(planned: Planned) -> Result:
    return Result(planned.position, "failed", f"Error: {planned.refusal}")


def recorded_result(position: int, row: Row[Any] | None) -> Result:
    """The result that the call's effect row records; without a row, a failed result."""
    if row is None:
        return Result(position, *outcome_of(None, None))
    open_question = row.status == "intended" and row.waits_for == "user"
    if (row.status == "unknown" or open_question) and row.waits_for in _UNKNOWN:
        return unknown_result(position, row)
    return Result(position, *outcome_of(row.status, row.result), row.effect_id, used_in(row))


def results_to_dicts(results: Sequence[Result]) -> list[Mapping[str, Any]]:
    """The values that store results in their effect rows. `recorded_result` is the inverse."""
    dicts: list[Mapping[str, Any]] = []
    for result in results:
        text = result.text.removeprefix("Error: ") if result.status == "failed" else result.text
        stored = None if result.status == "unknown" else storable(text)
        used = None if result.used is None else result.used.to_dict()
        if result.effect_id is not None:
            dicts.append({"effect_id": result.effect_id, "status": result.status, "result": stored, "used": used})
    return dicts


def unknown_result(position: int, row: Row[Any]) -> Result:
    """The result of a call that waited for someone or something outside, and for which the turn no longer waits."""
    return Result(position, "unknown", _UNKNOWN[row.waits_for], row.effect_id, used_in(row))


def used_in(row: Row[Any]) -> Usage | None:
    """The tokens of another agent that answers the call, or of the guards that refused answers to a question."""
    return None if row.used is None else Usage.from_dict(row.used)


def outcome_of(status: str | None, result: str | None) -> tuple[str, str]:
    """Status and text of a call's result, from its effect row; `status` is `None` if the call has no row."""
    match status:
        case "done":
            return "done", result or ""
        case "failed":
            return "failed", f"Error: {result or 'it failed.'}"
        case "denied":
            return "denied", result or approvals.DENIED
        case None | "asked" | "approved":
            return "failed", "Error: this call was not run."
        case _:
            return "unknown", UNKNOWN_OUTCOME


def in_call_order(results: list[Result]) -> list[Result]:
    return sorted(results, key=lambda result: result.position)
