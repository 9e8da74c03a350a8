"""How a turn ends: one commit that says all of it.

Keeps the laws that what is settled is a transcript that a provider accepts (open calls are
closed in the same commit, saying how) and that nothing reaches a channel before its commit
(the reply and what is owed to its receiver are one statement). Called by the step loop, and
by accept when a message interrupts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Executor, as_json
from perdure.errors import PerdureError, TurnCancelled
from perdure.ids import new_id
from perdure.models.protocol import Role
from perdure.turns import queries
from perdure.turns.lease import LeaseLost, TurnRef
from perdure.turns.transcript import Entry, Transcript, result_of, usage_record
from perdure.untrusted import storable

CANCELLED = "The turn was cancelled."


@dataclass(frozen=True, slots=True)
class Replied:
    """The model answered without asking for another tool."""

    reply: Entry


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn cannot go on. The error's message is the reply that the sender gets."""

    error: PerdureError


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Somebody who may asked for it; there is no reply."""


Ending = Replied | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class Settled:
    """What the commit left: turns that still wait in the session, and the delivery that is owed.

    `may_end` says that the session was asked to end and that this was its last turn.
    """

    unsettled: int
    may_end: bool
    delivery_id: UUID | None


@dataclass(frozen=True, slots=True)
class Tenure:
    """Under which token a session is written, and for how long a commit prolongs its lease."""

    session_id: UUID
    token: int
    lease_s: float


def settle(
    executor: Executor,
    clock: Clock,
    tenure: Tenure,
    *,
    turn: TurnRef,
    transcript: Transcript,
    ending: Ending,
    closing: Sequence[Entry] = (),
    keep: bool = False,
) -> Settled:
    """Settle a turn.

    `closing` answers the calls that are still open; `keep` holds on to the lease where more
    turns wait.

    Raises:
        LeaseLost: the token has moved on; nothing was written.
    """
    entries = [*transcript.uncommitted, *closing, *_reply(turn.turn_id, ending)]
    error = _error(ending)
    steps = transcript.steps + isinstance(ending, Replied)
    usage = transcript.usage
    if isinstance(ending, Replied) and ending.reply.usage:
        usage += ending.reply.usage
    rows = executor.run(
        queries.SETTLE,
        {
            "session_id": tenure.session_id,
            "token": tenure.token,
            "lease_s": tenure.lease_s,
            "keep": keep,
            "turn_id": turn.turn_id,
            "channel": turn.channel,
            "added": len(entries),
            "messages": as_json([entry.record(position) for position, entry in enumerate(entries, start=1)]),
            "status": _status(ending),
            "steps": steps,
            "usage": as_json(usage_record(usage)),
            "error_code": error.code if error else None,
            "error_message": storable(error.message) if error else None,
            "replied": not isinstance(ending, Cancelled),
            "delivery_id": new_id(clock),
        },
    )
    if not rows:
        raise LeaseLost
    return Settled(rows[0].unsettled, rows[0].may_end, rows[0].delivery_id)


def closings(turn_id: UUID, asking: Entry | None, texts: Sequence[str]) -> list[Entry]:
    """Results for the calls of `asking`, in the order asked, so that none stays open."""
    if asking is None:
        return []
    return [result_of(turn_id, call, text) for call, text in zip(asking.tool_calls, texts, strict=True)]


def _reply(turn_id: UUID, ending: Ending) -> list[Entry]:
    match ending:
        case Replied(reply):
            return [reply]
        case Failed(error):
            return [Entry(turn_id, Role.ASSISTANT, storable(error.message))]
        case Cancelled():
            return []
        case _:
            assert_never(ending)


def _error(ending: Ending) -> PerdureError | None:
    match ending:
        case Replied():
            return None
        case Failed(error):
            return error
        case Cancelled():
            return TurnCancelled(CANCELLED)
        case _:
            assert_never(ending)


def _status(ending: Ending) -> str:
    match ending:
        case Replied():
            return "done"
        case Failed():
            return "failed"
        case Cancelled():
            return "cancelled"
        case _:
            assert_never(ending)
