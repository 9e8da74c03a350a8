"""Feedback: a person's score of a reply, and its effect on the CaseBank.

A case is a stored question with its answer. A turn's prompt may contain cases, and the outcome of the turn counts in
the success rates of these cases. The score replaces that outcome. A turn with the status `done` and a positive score
becomes a case if its agent uses a bank, unless nothing of the turn may be remembered. Later feedback replaces earlier
feedback: a negative score archives the case that the turn has become, and a positive one restores it.
"""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from perdure.access.tenants import UserKey
from perdure.casebank import cases, executions
from perdure.casebank.embedding import embed_now
from perdure.database.engine import as_json
from perdure.errors import Conflict
from perdure.models.protocol import ModelCall
from perdure.runtime import Runtime
from perdure.text.untrusted import storable
from perdure.turns import queries
from perdure.turns.reading import read_turn

MAX_COMMENT_CHARS = 2_000


def _no_truth_value(value: object) -> object:
    """Reject `true`, which Python treats as 1."""
    if isinstance(value, bool):
        raise ValueError("must be -1 or 1")  # noqa: TRY004 (pydantic reports only this one)
    return value


class Feedback(BaseModel):
    """A person's feedback on a turn: the body of `POST /v1/turns/{id}/feedback`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    score: Annotated[Literal[-1, 1], BeforeValidator(_no_truth_value)]
    comment: Annotated[str, Field(max_length=MAX_COMMENT_CHARS)] | None = None


def give_feedback(runtime: Runtime, turn_id: UUID, feedback: Feedback) -> None:
    """Record `feedback`, apply it to the cases in the turn's prompt, and learn a case from a positive score.

    A negative score withdraws the case that was learnt from an earlier positive score.

    Raises:
        NotFound: there is no such turn.
        Conflict: the turn has no reply.
        Unavailable: the database cannot be reached; the call may be repeated.
    """
    record = {"score": feedback.score, "comment": None if feedback.comment is None else storable(feedback.comment)}
    case_id, asked = None, ""
    with runtime.database.transaction("turns.feedback") as transaction:
        rows = transaction.run(queries.FEEDBACK, {"turn_id": turn_id, "feedback": as_json(record)})
        if not rows:
            status = read_turn(transaction, turn_id)["status"]
            raise Conflict(f"The turn has no reply to rate: it is {status}.")
        executions.feedback(transaction, turn_id, feedback.score)
        if feedback.score < 0:
            cases.withdraw(transaction, turn_id)
        rated = rows[0]
        bank = _bank(runtime, rated.agent)
        is_lesson = feedback.score > 0 and rated.status == "done" and rated.is_remembered
        if is_lesson and bank is not None and (rated.asked or "").strip() and rated.reply.strip():
            asked = rated.asked
            case_id = cases.learn(
                transaction,
                runtime.clock,
                turn_id=turn_id,
                user_id=UserKey(rated.user_id),
                query=asked,
                response_text=rated.reply,
                bank=bank,
            )
    if case_id is not None:
        _embed(runtime, case_id, asked)


def _bank(runtime: Runtime, name: str) -> str | None:
    """The agent's bank; `None` if the agent uses no bank, or this installation does not have the agent."""
    agent = runtime.agents.find(name)
    return None if agent is None else agent.bank


def _embed(runtime: Runtime, case_id: str, query: str) -> None:
    call = ModelCall(runtime.clock, runtime.settings.memory.recall_timeout_s)
    embed_now(runtime.database, runtime.embedder, case_id, query, call)
