"""Calls of `ask_user`: a question that waits for the user's next message.

The call's intent is committed like that of any other call, and the turn is parked (`awaited`). The commit that parks it
also puts the question into the outbox, and marks it as sent. Accepting a message under the lock of the session's row
finds the question, and records the answer in the call's row (`payload`), with the message's row in the inbox: the
message begins no turn, and its id deduplicates it. It then wakes the session.

The worker that claims the turn judges the answer, because only workers have the agent's types. If it does not fit, one
statement records the sentence for the user, and the turn is parked again, which sends the question once more. If the
worker crashes before this statement, the next one judges the same answer. After `AskUser.tries` answers, the model
reads what the user said. A question without an answer is closed under the same lock: each message either is the answer,
or begins a turn.

`payload` is `{"said": [{"text": …} or {"value": …}], "judged": N, "problem": SENTENCE, "used": USAGE}`, with `"closed":
true` if the question ended without an answer. `used` are the tokens of the guards that judged refused answers. Those
that judge the last one are added to the result of the call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Database, as_json
from perdure.models.protocol import Usage
from perdure.runtime import Runtime, Waker
from perdure.text import untrusted
from perdure.tools.awaited.asking import AskUser, Misfit
from perdure.turns.calls import queries
from perdure.turns.calls.plan import Planned
from perdure.turns.calls.result_values import Result, used_in
from perdure.turns.lease.tenure import TurnRow

log = logging.getLogger(__name__)

NO_ANSWER = "The user has not answered."
ENDED = "The conversation ended before the user answered."
UNSEEN = (
    "The user cannot be asked: another agent asked you, and only it reads what you say. "
    "If you need to know more, let your answer be the question."
)
UNSEEN_ON = "openai"
"""The channel whose clients get a question as the end of an answer, and so only one of the turn itself."""

Screen = Callable[[str, Callable[[Usage], None]], str]
"""Returns what the agent's input guards let pass of an answer, and reports the tokens that each of them used."""

_UNREADABLE = "This answer cannot be used. Please answer again."
_MOST_SAID = 2_000


def bring(database: Database, wake: Waker | None, effect_id: UUID, value: Any) -> bool:
    """Record a value as the answer to a question.

    Returns False, and changes nothing, if the question has an answer, or its turn no longer waits for one.
    """
    with database.transaction("turns.answer_by_value") as transaction:
        if not transaction.run(queries.LOCK_OF_CALL, {"effect_id": effect_id}):
            return False
        rows = transaction.run(
            queries.ANSWER_BY_VALUE,
            {"effect_id": effect_id, "said": as_json([{"value": untrusted.storable_json(value)}])},
        )
    if rows and rows[0].wakes and wake is not None:
        wake.session(rows[0].session_id, rows[0].priority)
    return bool(rows)


def resume(runtime: Runtime, turn: TurnRow, row: Row[Any], planned: Planned, screen: Screen) -> Result | None:
    """The result of a question that an earlier worker asked; `None` if it waits for the user.

    Judges the user's answer, after the input guards (`screen`). One that does not fit is refused, and the question
    waits for another.
    """
    position, payload = planned.position, row.payload or {}
    said, judged = payload.get("said", []), payload.get("judged", 0)
    if len(said) > judged:
        if not isinstance(planned.tool, AskUser):
            why = planned.refusal or f"{planned.call.name} no longer asks the user."
            return Result(position, "failed", f"Error: {why}", row.effect_id, used_in(row))
        used = [] if (before := used_in(row)) is None else [before]
        try:
            screened = _screened(said[judged], screen, used.append)
        except Exception:
            _charge(runtime.database, row, judged, used)
            raise
        try:
            return Result(position, "done", _read(planned.tool, screened), row.effect_id, _total(used))
        except Misfit as misfit:
            problem = untrusted.storable(str(misfit))
        judged += 1
        if judged >= planned.tool.tries:
            allowed = [*(_screened(each, screen, used.append) for each in said[:-1]), screened]
            heard = "; ".join(untrusted.cut(str(each.get("text", each.get("value"))), _MOST_SAID) for each in allowed)
            text = f"Error: The user's answers do not fit. They said: {heard}"
            return Result(position, "failed", text, row.effect_id, _total(used))
        given = {
            "effect_id": row.effect_id,
            "judged": judged,
            "refused": as_json({"judged": judged, "problem": problem, **_stored(used)}),
        }
        runtime.database.run(queries.REFUSE_ANSWER, given)
    if row.undecided_s <= 0:
        unanswered = Result(position, "failed", f"Error: {NO_ANSWER}", row.effect_id, used_in(row))
        return _closed(runtime, row, unanswered, NO_ANSWER)
    sessions = runtime.database.run(queries.IS_ENDING, {"session_id": turn.session_id})
    if sessions and sessions[0].ending:
        return _closed(runtime, row, Result(position, "denied", ENDED, row.effect_id, used_in(row)), ENDED)
    return None


def _closed(runtime: Runtime, row: Row[Any], result: Result, text: str) -> Result | None:
    """`result`, recorded so that no later message is taken as the answer; `None` if the user has just answered."""
    given = {"effect_id": row.effect_id, "status": result.status, "result": text}
    with runtime.database.transaction("turns.close_question") as transaction:
        transaction.run(queries.LOCK_OF_CALL, given)
        return result if transaction.run(queries.CLOSE_QUESTION, given) else None


def _charge(database: Database, row: Row[Any], judged: int, used: Sequence[Usage]) -> None:
    """Record the tokens of guards that refuse an answer: the turn ends, and the call with it."""
    if used:
        given = {"effect_id": row.effect_id, "judged": judged, "used": as_json(_stored(used))}
        database.run(queries.CHARGE_QUESTION, given)


def _total(used: Sequence[Usage]) -> Usage | None:
    return sum(used[1:], used[0]) if used else None


def _stored(used: Sequence[Usage]) -> dict[str, Any]:
    """The member of `payload`; none if no tokens were used."""
    total = _total(used)
    return {} if total is None else {"used": total.to_dict()}


def _screened(said: Mapping[str, Any], screen: Screen, spend: Callable[[Usage], None]) -> Mapping[str, Any]:
    """An answer as the input guards let it pass. They judge a value as JSON. `spend` counts what they used."""
    value = said.get("text", said.get("value"))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    passed = screen(text, spend)
    return said if passed == text else {"text": passed}


def _read(tool: AskUser, said: Mapping[str, Any]) -> str:
    """The answer as text for the model.

    Raises:
        Misfit: it does not fit, or the type's own code failed.
    """
    is_text = "text" in said
    try:
        return untrusted.cut(
            tool.read(said["text"] if is_text else said.get("value"), is_text=is_text), tool.max_result_chars
        )
    except Misfit:
        raise
    except Exception as error:
        log.exception("the type of the answers of %s failed", tool.name)
        raise Misfit(_UNREADABLE) from error
