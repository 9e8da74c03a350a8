"""Settling a turn: one statement commits the turn's last messages, its outcome and its delivery.

The statement also adds a result to each tool call that has none, because model providers reject a transcript with an
unanswered call. No channel receives a reply before this commit. The statement also records the use of the cases in the
prompt.

The parameters of the statement are first assembled as a `Verdict`. While the session's snapshot is being saved in a
store other than PostgreSQL, the turn's row holds the verdict as JSON.

Called by the runner, by `cancel`, and by `accept` when a new message interrupts the turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, assert_never
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Executor, as_json
from perdure.database.fencing import Fence
from perdure.errors import PerdureError, TurnCancelled
from perdure.ids import new_id
from perdure.models.protocol import Role, Usage, unknown_members
from perdure.snapshots import queries as snapshots
from perdure.text.untrusted import load_object, storable
from perdure.tools.variables import VariableSet
from perdure.turns.calls.result_values import outcome_of, recorded
from perdure.turns.lease.claim import LeaseLost, TurnRef
from perdure.turns.run import queries
from perdure.turns.run.transcript import Entry, Transcript, result_of, steps_in, total_usage

CANCELLED = "The turn was cancelled."


@dataclass(frozen=True, slots=True)
class Replied:
    """The model replied without tool calls."""

    reply: Entry


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn failed. The error's message is sent as the reply.

    `rejected` is the model's reply, if a hook rejected it. It is not stored, but it counts as a step, with its usage.
    """

    error: PerdureError
    rejected: Entry | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The turn was cancelled; there is no reply."""


Ending = Replied | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class Settled:
    """The state after the commit: the number of the session's unsettled turns, and the delivery to publish.

    `may_end` tells that the session's end is requested and that the session has no unsettled turn left. `others_wait`
    tells that the user has queued sessions, and that the settled turn freed one of the user's places.
    """

    unsettled: int
    may_end: bool
    delivery_id: UUID | None
    others_wait: bool = False


@dataclass(frozen=True, slots=True)
class Tenure:
    """A session, and the fence under which the caller writes to it. `lease_s` is the duration of a renewed lease."""

    session_id: UUID
    fence: Fence
    lease_s: float
    tick: int | None = None
    """The expected tick of the session, so that a repeated commit has no effect.

    `None`: the caller has locked the session's row.
    """


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that settling a turn writes, as JSON values.

    `messages` has the new messages, as made by `Entry.record`. `variables` has the working variables, or is `None` if
    they are unchanged. `case_ids` names the cases in the prompt. `extra` has the members of a held verdict that this
    release does not know.
    """

    status: str
    messages: list[dict[str, Any]]
    replied: bool
    steps: int
    usage: dict[str, Any] | None
    error_code: str | None
    error_message: str | None
    variables: dict[str, Any] | None
    case_ids: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def used(self) -> Usage | None:
        """The tokens that the turn used; `None` if no provider reported them."""
        return None if self.usage is None else Usage.from_record(self.usage)

    @property
    def said(self) -> list[dict[str, Any]]:
        """`messages` without the reply of a failed turn, which no model receives."""
        return self.messages[:-1] if self.status == "failed" else self.messages

    def to_json(self) -> str:
        """The verdict as a JSON object, with the members of `extra` at the top level."""
        record = asdict(self)
        return as_json({**record.pop("extra"), **record})

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Parse the output of `to_json` of this or another release."""
        record = json.loads(text)
        known = {each.name for each in fields(cls)} - {"extra"}
        return cls(
            **{name: value for name, value in record.items() if name in known}, extra=unknown_members(record, known)
        )


def conclude(
    executor: Executor,
    session_id: UUID,
    turn: TurnRef,
    transcript: Transcript,
    ending: Ending,
    *,
    case_ids: Sequence[str] = (),
) -> Verdict:
    """The verdict on a turn that ends with `ending`, with results for open calls.

    `case_ids` names the cases in the prompt.
    """
    closing, variables = _close_calls(executor, session_id, turn, transcript)
    entries = [*transcript.uncommitted, *closing, *_reply(turn.turn_id, ending)]
    error = _error(ending)
    spent = [*transcript.present, *_last_step(ending)]
    usage = total_usage(spent)
    return Verdict(
        status=_status(ending),
        messages=[entry.record(position) for position, entry in enumerate(entries, start=1)],
        replied=not isinstance(ending, Cancelled),
        steps=steps_in(spent),
        usage=None if usage is None else usage.record(),
        error_code=error.code if error else None,
        error_message=storable(error.message) if error else None,
        variables=variables,
        # A cancelled turn does not show whether the cases were useful.
        case_ids=[] if isinstance(ending, Cancelled) else list(case_ids),
    )


def conclude_unread(executor: Executor, session_id: UUID, turn: TurnRef, ending: Ending) -> Verdict:
    """The verdict on a turn, built without parsing its rows, so that an unreadable row cannot prevent the settlement.

    Working variables stay as the last step committed them.
    """
    [remains] = executor.run(
        queries.REMAINS, {"session_id": session_id, "turn_id": turn.turn_id, "first_seq": turn.first_seq}
    )
    said = [_inbox_entry(turn.turn_id, each) for each in remains.uncommitted]
    closing = [
        Entry(turn.turn_id, Role.TOOL, storable(outcome_of(each["status"], each["result"])[1]), tool_call_id=each["id"])
        for each in remains.open_calls
    ]
    entries = [*said, *closing, *_reply(turn.turn_id, ending)]
    error = _error(ending)
    return Verdict(
        status=_status(ending),
        messages=[entry.record(position) for position, entry in enumerate(entries, start=1)],
        replied=not isinstance(ending, Cancelled),
        steps=remains.steps,
        usage=remains.usage,
        error_code=error.code if error else None,
        error_message=storable(error.message) if error else None,
        variables=None,
    )


def settle(
    executor: Executor,
    clock: Clock,
    tenure: Tenure,
    *,
    turn: TurnRef,
    verdict: Verdict,
    keep: bool = False,
    saved: bool = False,
) -> Settled:
    """Settle a turn.

    With `keep`, the lease is kept if the session has more turns. This commit begins a new tick. `saved`: the snapshot
    store already has the snapshot of that tick.

    Raises:
        LeaseLost: another worker has the session; nothing was written.
    """
    rows = executor.run(
        queries.SETTLE,
        {
            **tenure.fence.on(tenure.session_id),
            "tick": tenure.tick,
            "lease_s": tenure.lease_s,
            "keep": keep,
            "turn_id": turn.turn_id,
            "channel": turn.channel,
            "added": len(verdict.messages),
            "messages": as_json(verdict.messages),
            "status": verdict.status,
            "steps": verdict.steps,
            "usage": None if verdict.usage is None else as_json(verdict.usage),
            "error_code": verdict.error_code,
            "error_message": verdict.error_message,
            "replied": verdict.replied,
            "variables": None if verdict.variables is None else as_json(verdict.variables),
            "saved": saved,
            "case_ids": verdict.case_ids,
            "delivery_id": new_id(clock),
        },
    )
    if not rows:
        raise LeaseLost
    return Settled(rows[0].unsettled, rows[0].may_end, rows[0].delivery_id, rows[0].others_wait)


def _close_calls(
    executor: Executor, session_id: UUID, turn: TurnRef, transcript: Transcript
) -> tuple[list[Entry], dict[str, Any] | None]:
    """Results for the open calls, and the working variables with the changes of finished calls; `None` if unchanged."""
    asking = transcript.asking()
    if asking is None:
        return [], None
    results, changes = recorded(executor, turn.turn_id, asking)
    closing = closings(turn.turn_id, asking, [result.text for result in results])
    if not changes:
        return closing, None
    kept = executor.run(snapshots.KEPT, {"session_id": session_id})
    variables = VariableSet(load_object(kept[0].variables) if kept else None)
    variables.replay(changes)
    return closing, variables.changed()


def _inbox_entry(turn_id: UUID, message: Mapping[str, Any]) -> Entry:
    """Convert a message of the inbox to an entry."""
    accepted_at = datetime.fromisoformat(message["accepted_at"])
    return Entry(turn_id, Role.USER, message["text"], message_id=message["message_id"], created_at=accepted_at)


def closings(turn_id: UUID, asking: Entry | None, texts: Sequence[str]) -> list[Entry]:
    """The entries that answer the calls of `asking` with `texts`, in the order of the calls."""
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


def _last_step(ending: Ending) -> list[Entry]:
    """The model's reply that ended the turn, if one did."""
    match ending:
        case Replied(reply):
            return [reply]
        case Failed(_, rejected):
            return [rejected] if rejected else []
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
