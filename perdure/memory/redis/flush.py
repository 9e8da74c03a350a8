"""Restores turns that PostgreSQL lost, from the copy in working memory.

Every turn is written to PostgreSQL first. PostgreSQL therefore lacks a turn only if it lost commits, for example in a
failover or when a backup was restored. One statement appends the lost turns to the session, under the session's current
fencing token. A process with an older token writes nothing. A lost turn is not written if its token is lower than the
token of another turn that both working memory and PostgreSQL have.

Called when a worker shuts down, for each session that the worker holds, and when a session ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Database, as_json
from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.memory.redis import queries
from perdure.memory.redis.working import RememberedMessage, RememberedTurn, WorkingMemory
from perdure.models.protocol import Role, Usage

log = logging.getLogger(__name__)

_PRIORITY = 5
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Flushed:
    """The flush is complete. `written` and `refused` are numbers of turns. Each refused turn is logged."""

    written: int
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """Nothing was written: PostgreSQL lacks `missing` turns, and the session has an unsettled turn."""

    missing: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Nothing was written: the token is stale, or the session has ended."""


FlushOutcome = Flushed | Blocked | Stale


def flush(database: Database, working: WorkingMemory, session_id: UUID, fence: Fence) -> FlushOutcome:
    """Write the turns of working memory that PostgreSQL lacks. Idempotent, and safe to call concurrently.

    `fence` must be from the session's latest claim. The turns stay in Redis.

    Raises:
        Unavailable: Redis or PostgreSQL cannot be reached; a retry is safe.
    """
    remembered = working.read(session_id)
    if not remembered:
        return Flushed(0)
    for _ in range(_ATTEMPTS):
        rows = database.run(queries.COMPARE, {**fence.on(session_id), **_comparison(remembered)})
        if not rows or not rows[0].current:
            return Stale()
        missing = [turn for turn in remembered if turn.turn_id not in rows[0].known]
        if not missing:
            return Flushed(0)
        if rows[0].unsettled:
            return Blocked(len(missing))
        writable = _writable(session_id, remembered, rows[0])
        refused = len(missing) - len(writable)
        if not writable:
            return Flushed(0, refused)
        if _write(database, session_id, fence, rows[0], writable):
            log.warning("session %s: wrote %d turns back that PostgreSQL had lost", session_id, len(writable))
            return Flushed(len(writable), refused)
    raise Unavailable("The session kept changing while its working memory was being flushed; please try again.")


def transcript_fault(messages: Sequence[RememberedMessage], *, replied: bool) -> str | None:
    """Why a provider would refuse `messages` as one settled turn; `None` if it would accept them.

    If `replied` is true, the last message must be the reply.
    """
    if not messages or messages[0].role is not Role.USER:
        return "it does not begin with a user message"
    if any(
        message.role is Role.SYSTEM or (message.tool_calls and message.role is not Role.ASSISTANT)
        for message in messages
    ):
        return "a message has a role or tool calls that a settled turn cannot have"
    if not _all_answered(messages):
        return "its tool calls and their results do not match"
    if replied and (messages[-1].role is not Role.ASSISTANT or messages[-1].tool_calls):
        return "it does not end with a reply"
    return None


def _all_answered(messages: Sequence[RememberedMessage]) -> bool:
    """Whether each message with tool calls is followed by one result per call, in the order of the calls."""
    awaited: list[str] = []
    for message in messages:
        if message.role is Role.TOOL:
            if not awaited or message.tool_call_id != awaited.pop(0):
                return False
        elif awaited:
            return False
        else:
            awaited = [call.id for call in message.tool_calls or ()]
            if len(set(awaited)) < len(awaited):
                return False
    return not awaited


def _comparison(remembered: Sequence[RememberedTurn]) -> dict[str, Any]:
    inputs = [
        (turn, message.message_id) for turn in remembered for message in turn.messages if message.message_id is not None
    ]
    return {
        "turn_ids": [turn.turn_id for turn in remembered],
        "of_turn": [turn.turn_id for turn, _ in inputs],
        "channels": [turn.channel for turn, _ in inputs],
        "message_ids": [message_id for _, message_id in inputs],
    }


def _writable(session_id: UUID, remembered: Sequence[RememberedTurn], row: Row[Any]) -> list[RememberedTurn]:
    """The turns in `remembered` that PostgreSQL lacks and that may be written.

    Logs each turn that PostgreSQL lacks and that may not be written.
    """
    newest = max((turn.token for turn in remembered if turn.turn_id in row.known), default=0)
    writable = []
    for turn in remembered:
        if turn.turn_id in row.known:
            continue
        reason = transcript_fault(turn.messages, replied=turn.status != "cancelled")
        if turn.token < newest:
            reason = f"it was written under token {turn.token}, and another turn under {newest}"
        elif turn.turn_id in row.accepted:
            reason = "its message was accepted again"
        if reason is not None:
            log.error("session %s: the remembered turn %s is not written: %s", session_id, turn.turn_id, reason)
            continue
        newest = turn.token
        writable.append(turn)
    return writable


def _write(
    database: Database, session_id: UUID, fence: Fence, row: Row[Any], writable: Sequence[RememberedTurn]
) -> Sequence[Row[Any]]:
    turns, messages = _rows(writable)
    parameters = {
        **fence.on(session_id),
        "last_turn_seq": row.last_turn_seq,
        "message_count": row.message_count,
        "turns_added": len(turns),
        "messages_added": len(messages),
        "last_at": max(turn.settled_at for turn in writable),
        "channels": [turn.channel for turn in writable],
        "priority": _PRIORITY,
        "turns": as_json(turns),
        "messages": as_json(messages),
        "inputs": as_json(list(_inputs(writable))),
    }
    return database.run(queries.FLUSH, parameters)


def _rows(writable: Sequence[RememberedTurn]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the turns, and the rows of their messages. In each list, `position` counts from 1."""
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for position, turn in enumerate(writable, start=1):
        first = len(messages) + 1
        for number, message in enumerate(turn.messages, start=first):
            record = message.model_dump(mode="json")
            created_at = record["created_at"] or turn.settled_at
            messages.append(
                {
                    **record,
                    "position": number,
                    "turn_id": turn.turn_id,
                    "channel": turn.channel,
                    "tool_calls": record["tool_calls"] or None,
                    "parts": record["parts"] or None,
                    "created_at": created_at,
                }
            )
        turns.append(_turn(turn, position, first, len(messages)))
    return turns, messages


def _turn(turn: RememberedTurn, position: int, first: int, last: int) -> dict[str, Any]:
    record = turn.model_dump(mode="json", exclude={"messages", "seq", "token"})
    spent = [message.usage for message in turn.messages if message.usage is not None]
    # The last message of a failed turn comes from perdure, not from a model.
    steps = sum(message.role is Role.ASSISTANT for message in turn.messages) - (turn.status == "failed")
    usage = sum((Usage.from_dict(each.model_dump()) for each in spent), Usage()).to_dict()
    return {
        **record,
        "position": position,
        "first": first,
        "reply": None if turn.status == "cancelled" else last,
        "steps": steps,
        "usage": usage if spent or steps == 0 else None,
        "accepted_at": turn.messages[0].created_at or turn.settled_at,
    }


def _inputs(writable: Sequence[RememberedTurn]) -> Iterable[dict[str, Any]]:
    for turn in writable:
        for position, message in enumerate(turn.messages, start=1):
            if message.role is Role.USER and message.message_id is not None:
                yield {
                    "channel": turn.channel,
                    "message_id": message.message_id,
                    "turn_id": turn.turn_id,
                    "position": position,
                    "text": message.content,
                    "parts": message.parts,
                    "accepted_at": message.created_at or turn.settled_at,
                }
