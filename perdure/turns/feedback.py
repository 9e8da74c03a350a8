"""Feedback: a user's score of a reply, and its effect on the CaseBank.

The score overrides the turn's outcome for the cases in its prompt, and positive feedback makes the turn a case. The
last feedback on a turn counts. A case that came from feedback is then judged by its uses.
"""

from __future__ import annotations

import logging
from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from perdure.casebank import cases, executions
from perdure.casebank.embedding import embed_case
from perdure.database.engine import as_json
from perdure.errors import Conflict, PerdureError, loggable
from perdure.models.protocol import ModelCall
from perdure.runtime import Runtime
from perdure.text.untrusted import storable
from perdure.turns import queries
from perdure.turns.reading import read_turn

log = logging.getLogger(__name__)

MAX_COMMENT_CHARS = 2_000


def _no_truth_value(value: object) -> object:
    """`value`, unless it is a boolean, which Python takes for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("must be -1 or 1")  # noqa: TRY004 (pydantic reports only this one)
    return value


class Feedback(BaseModel):
    """A score of a turn, as `POST /v1/turns/{id}/feedback` takes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    score: Annotated[Literal[-1, 1], BeforeValidator(_no_truth_value)]
    comment: Annotated[str, Field(max_length=MAX_COMMENT_CHARS)] | None = None


def give_feedback(runtime: Runtime, turn_id: UUID, feedback: Feedback) -> None:
    """Store `feedback`, count it for the cases in the turn's prompt, and make a case of a praised turn.

    Raises:
        NotFound: there is no such turn.
        Conflict: the turn has no reply.
        Unavailable: the database cannot be reached; repeating the call is safe.
    """
    said = {"score": feedback.score, "comment": None if feedback.comment is None else storable(feedback.comment)}
    case_id, asked = None, ""
    with runtime.database.transaction("turns.feedback") as transaction:
        rows = transaction.run(queries.FEEDBACK, {"turn_id": turn_id, "feedback": as_json(said)})
        if not rows:
            status = read_turn(transaction, turn_id)["status"]
            raise Conflict(f"There is no reply yet to say something of: the turn is {status}.")
        executions.feedback(transaction, turn_id, feedback.score)
        told = rows[0]
        bank = _bank(runtime, told.agent)
        praised = feedback.score > 0 and told.status == "done"
        if praised and bank is not None and (told.asked or "").strip() and told.reply.strip():
            asked = told.asked
            case_id = cases.learn(
                transaction,
                runtime.clock,
                turn_id=turn_id,
                user_id=told.user_id,
                query=asked,
                response_text=told.reply,
                bank=bank,
            )
    if case_id is not None:
        _embed(runtime, case_id, asked)


def _bank(runtime: Runtime, name: str) -> str | None:
    """The case bank of the agent `name`; `None` if it uses none or is no longer defined."""
    agent = runtime.agents.find(name)
    return None if agent is None else agent.bank


def _embed(runtime: Runtime, case_id: str, query: str) -> None:
    """Give a new case its vector now; if the embedder fails, the next reflection does it."""
    call = ModelCall(runtime.clock, runtime.settings.memory.recall_timeout_s)
    try:
        embed_case(runtime.database, runtime.embedder, case_id, query, call)
    except PerdureError as error:
        log.warning("case %s gets its vector later: %s", case_id, loggable(error))
