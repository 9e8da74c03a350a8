"""The verdict on a turn that has ended: everything that settling the turn writes, as JSON values.

Settling also adds a result to each tool call that has none, because model providers reject a transcript with an
unanswered call. While the session's snapshot is being saved in a store other than PostgreSQL, the turn's row stores the
verdict.

Called by the loop, and by `cancel` and `accept` when they settle a turn that no worker runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from perdure.database.engine import Executor, as_json
from perdure.models.protocol import Role, Usage, unknown_members
from perdure.snapshots import queries as snapshots
from perdure.text.untrusted import load_object, storable
from perdure.tools.variables import VariableSet
from perdure.turns.calls.result_values import outcome_of, recorded
from perdure.turns.lease.tenure import Tenure, TurnRow
from perdure.turns.outcome import Cancelled, Ending
from perdure.turns.run import queries
from perdure.turns.transcript import UNREADABLE, Entry, Transcript, result_of, steps_in, total_usage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that settling a turn writes, as JSON values.

    `messages` has the new messages, as made by `Entry.to_dict`. `variables` has the working variables, or is `None` if
    they are unchanged. `case_ids` names the cases in the prompt. `extra` has the members of an unsaved verdict that
    this release does not know.
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
        return None if self.usage is None else Usage.from_dict(self.usage)

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
    executor: Executor, tenure: Tenure, transcript: Transcript, ending: Ending, *, case_ids: Sequence[str] = ()
) -> Verdict:
    """The verdict on the turn at hand, which ends with `ending`, with results for open calls.

    `case_ids` names the cases in the prompt.
    """
    turn = tenure.at_hand
    closing, variables = _close_calls(executor, tenure, transcript)
    entries = [*transcript.uncommitted, *closing, *ending.last_entries(turn.turn_id)]
    spent = [*transcript.present, *ending.last_step()]
    usage = total_usage(spent)
    return _verdict(
        entries,
        ending,
        steps=steps_in(spent),
        usage=None if usage is None else usage.to_dict(),
        variables=variables,
        # A cancelled turn does not show whether the cases were useful.
        case_ids=[] if isinstance(ending, Cancelled) else list(case_ids),
    )


def conclude_unread(executor: Executor, tenure: Tenure, ending: Ending) -> Verdict:
    """The verdict on a turn, built without parsing its rows, so that an unreadable row cannot prevent the settlement.

    Working variables stay as the last step committed them.
    """
    turn = tenure.at_hand
    [remains] = executor.run(
        queries.REMAINS, {"session_id": tenure.session_id, "turn_id": turn.turn_id, "first_seq": turn.first_seq}
    )
    said = [_inbox_entry(turn.turn_id, each) for each in remains.uncommitted]
    closing = [
        Entry(turn.turn_id, Role.TOOL, storable(outcome_of(each["status"], each["result"])[1]), tool_call_id=each["id"])
        for each in remains.open_calls
    ]
    entries = [*said, *closing, *ending.last_entries(turn.turn_id)]
    return _verdict(entries, ending, steps=remains.steps, usage=remains.usage)


def conclude_begun(executor: Executor, tenure: Tenure, ending: Ending) -> Verdict:
    """The verdict on a turn that this process did not run; see `conclude` and `conclude_unread`."""
    try:
        return conclude(executor, tenure, Transcript.load(executor, tenure, window=1), ending)
    except UNREADABLE:
        log.exception("turn %s cannot be parsed; its open calls are closed unread", tenure.at_hand.turn_id)
        return conclude_unread(executor, tenure, ending)


def stored_verdict(turn: TurnRow) -> Verdict | None:
    """The verdict in the turn's row; `None` if there is none or this release cannot parse it."""
    if turn.verdict is None:
        return None
    try:
        return Verdict.from_json(turn.verdict)
    except UNREADABLE:
        log.exception("turn %s: its stored verdict cannot be parsed", turn.turn_id)
        return None


def _verdict(
    entries: Sequence[Entry],
    ending: Ending,
    *,
    steps: int,
    usage: dict[str, Any] | None,
    variables: dict[str, Any] | None = None,
    case_ids: Sequence[str] = (),
) -> Verdict:
    error = ending.error
    return Verdict(
        status=ending.status,
        messages=[entry.to_dict(position) for position, entry in enumerate(entries, start=1)],
        replied=not isinstance(ending, Cancelled),
        steps=steps,
        usage=usage,
        error_code=error.code if error else None,
        error_message=storable(error.message) if error else None,
        variables=variables,
        case_ids=list(case_ids),
    )


def _close_calls(
    executor: Executor, tenure: Tenure, transcript: Transcript
) -> tuple[list[Entry], dict[str, Any] | None]:
    """Results for the open calls, and the working variables with the changes of finished calls; `None` if unchanged."""
    asking = transcript.asking()
    if asking is None:
        return [], None
    results, changes = recorded(executor, asking.turn_id, asking)
    closing = closings(asking, [result.text for result in results])
    if not changes:
        return closing, None
    kept = executor.run(snapshots.KEPT, {"session_id": tenure.session_id})
    variables = VariableSet(load_object(kept[0].variables) if kept else None)
    variables.replay(changes)
    return closing, variables.changed()


def _inbox_entry(turn_id: UUID, message: Mapping[str, Any]) -> Entry:
    """Convert a message of the inbox to an entry."""
    accepted_at = datetime.fromisoformat(message["accepted_at"])
    return Entry(turn_id, Role.USER, message["text"], message_id=message["message_id"], created_at=accepted_at)


def closings(asking: Entry, texts: Sequence[str]) -> list[Entry]:
    """The entries that answer the calls of `asking` with `texts`, in the order of the calls."""
    return [result_of(asking.turn_id, call, text) for call, text in zip(asking.tool_calls, texts, strict=True)]
