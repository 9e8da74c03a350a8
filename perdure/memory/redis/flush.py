"""Writing back what working memory holds and PostgreSQL lacks.

PostgreSQL is written first, so that there is nothing to write back, unless it lost commits (a
failover, a backup) that Redis still has the turns of. They are then written behind whatever the
session has, once, in one statement under its current token; a stale process writes nothing, and
neither does an entry that another one of a higher token has overtaken. Called in the flush of a
shutdown, for each session that the process touched, and when a session ends.
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
from perdure.models.protocol import Role

log = logging.getLogger(__name__)

_PRIORITY = 5
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Flushed:
    """PostgreSQL has what it can have: so many turns were written now, so many were refused, each reported."""

    written: int
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """So many turns are lacking, and a turn that is not settled stands in the way: nothing was written."""

    lacking: int


@dataclass(frozen=True, slots=True)
class Stale:
    """The token has moved on, or the session is over: nothing was written."""


FlushOutcome = Flushed | Blocked | Stale


def flush(database: Database, working: WorkingMemory, session_id: UUID, fence: Fence) -> FlushOutcome:
    """Write to PostgreSQL the remembered turns that it lacks. May be repeated, also side by side.

    `fence` is the one that the session was claimed under last. What is remembered stays in Redis.

    Raises:
        Unavailable: Redis or PostgreSQL cannot be reached; it may be tried again.
    """
    held = working.read(session_id)
    if not held:
        return Flushed(0)
    for _ in range(_TRIES):
        rows = database.run(queries.COMPARE, {**fence.on(session_id), **_asked(held)})
        if not rows or not rows[0].current:
            return Stale()
        lacking = [turn for turn in held if turn.turn_id not in rows[0].known]
        if not lacking:
            return Flushed(0)
        if rows[0].unsettled:
            return Blocked(len(lacking))
        chosen = _choose(session_id, held, rows[0])
        refused = len(lacking) - len(chosen)
        if not chosen:
            return Flushed(0, refused)
        if _write(database, session_id, fence, rows[0], chosen):
            log.warning("session %s: PostgreSQL lacked %d turns, now written", session_id, len(chosen))
            return Flushed(len(chosen), refused)
    raise Unavailable("The session kept changing while its working memory was being flushed; please try again.")


def transcript_fault(messages: Sequence[RememberedMessage], *, replied: bool) -> str | None:
    """Why a provider would refuse `messages` as one settled turn; None if it would not.

    `replied` says that the last message is to be the reply.
    """
    if not messages or messages[0].role is not Role.USER:
        return "it does not begin with what the user said"
    if any(line.role is Role.SYSTEM or (line.tool_calls and line.role is not Role.ASSISTANT) for line in messages):
        return "a message says what its role may not"
    if not _all_answered(messages):
        return "its tool calls and their results do not match"
    if replied and (messages[-1].role is not Role.ASSISTANT or messages[-1].tool_calls):
        return "it does not end with a reply"
    return None


def _all_answered(messages: Sequence[RememberedMessage]) -> bool:
    """Whether each tool call has its one result, in the order asked, right behind the message that asked."""
    awaited: list[str] = []
    for line in messages:
        if line.role is Role.TOOL:
            if not awaited or line.tool_call_id != awaited.pop(0):
                return False
        elif awaited:
            return False
        else:
            awaited = [call.id for call in line.tool_calls or ()]
            if len(set(awaited)) < len(awaited):
                return False
    return not awaited


def _asked(held: Sequence[RememberedTurn]) -> dict[str, Any]:
    given = [(turn, line.message_id) for turn in held for line in turn.messages if line.message_id is not None]
    return {
        "turn_ids": [turn.turn_id for turn in held],
        "of_turn": [turn.turn_id for turn, _ in given],
        "channels": [turn.channel for turn, _ in given],
        "message_ids": [message_id for _, message_id in given],
    }


def _choose(session_id: UUID, held: Sequence[RememberedTurn], row: Row[Any]) -> list[RememberedTurn]:
    """Those of the turns in `held` that PostgreSQL lacks and that may be written; of others it is said why not."""
    newest = max((turn.token for turn in held if turn.turn_id in row.known), default=0)
    chosen = []
    for turn in held:
        if turn.turn_id in row.known:
            continue
        reason = transcript_fault(turn.messages, replied=turn.status != "cancelled")
        if turn.token < newest:
            reason = f"it was written under token {turn.token}, and another turn under {newest}"
        elif turn.turn_id in row.accepted:
            reason = "its message was accepted again since"
        if reason is not None:
            log.error("session %s: the remembered turn %s is not written: %s", session_id, turn.turn_id, reason)
            continue
        newest = turn.token
        chosen.append(turn)
    return chosen


def _write(
    database: Database, session_id: UUID, fence: Fence, row: Row[Any], chosen: Sequence[RememberedTurn]
) -> Sequence[Row[Any]]:
    turns, messages = _rows(chosen)
    parameters = {
        **fence.on(session_id),
        "last_turn_seq": row.last_turn_seq,
        "message_count": row.message_count,
        "turns_added": len(turns),
        "messages_added": len(messages),
        "last_at": max(turn.settled_at for turn in chosen),
        "channels": [turn.channel for turn in chosen],
        "priority": _PRIORITY,
        "turns": as_json(turns),
        "messages": as_json(messages),
        "inputs": as_json(list(_inputs(chosen))),
    }
    return database.run(queries.FLUSH, parameters)


def _rows(chosen: Sequence[RememberedTurn]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the turns and of their messages, both numbered from 1."""
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for position, turn in enumerate(chosen, start=1):
        first = len(messages) + 1
        for number, line in enumerate(turn.messages, start=first):
            record = line.model_dump(mode="json")
            created_at = record["created_at"] or turn.settled_at
            messages.append(
                {
                    **record,
                    "position": number,
                    "turn_id": turn.turn_id,
                    "channel": turn.channel,
                    "tool_calls": record["tool_calls"] or None,
                    "created_at": created_at,
                }
            )
        turns.append(_turn(turn, position, first, len(messages)))
    return turns, messages


def _turn(turn: RememberedTurn, position: int, first: int, last: int) -> dict[str, Any]:
    record = turn.model_dump(mode="json", exclude={"messages", "seq", "token"})
    spent = [line.usage for line in turn.messages if line.usage is not None]
    return {
        **record,
        "position": position,
        "first": first,
        "reply": None if turn.status == "cancelled" else last,
        # What a failure says to the sender, no model did.
        "steps": sum(line.role is Role.ASSISTANT for line in turn.messages) - (turn.status == "failed"),
        "usage": {
            "input_tokens": sum(each.input_tokens for each in spent),
            "output_tokens": sum(each.output_tokens for each in spent),
        },
        "accepted_at": turn.messages[0].created_at or turn.settled_at,
    }


def _inputs(chosen: Sequence[RememberedTurn]) -> Iterable[dict[str, Any]]:
    """The rows of the inbox: what the user said, where it is known under which id."""
    for turn in chosen:
        for position, line in enumerate(turn.messages, start=1):
            if line.role is Role.USER and line.message_id is not None:
                yield {
                    "channel": turn.channel,
                    "message_id": line.message_id,
                    "turn_id": turn.turn_id,
                    "position": position,
                    "text": line.content,
                    "accepted_at": line.created_at or turn.settled_at,
                }
