"""The transcript: the messages of a turn and of the session's earlier turns.

Model providers accept only a transcript in which each tool call has exactly one result. The results must follow the
message with the calls, in the order of the calls. Every transcript that is sent to a model or settled has this form.

A call without a result is pending work. So a worker that continues after a crash needs only the committed rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Executor, Statement, as_json
from perdure.database.failures import LEFT_OUT
from perdure.errors import loggable
from perdure.files.parts import text_tokens
from perdure.memory.recall.past import Past
from perdure.models import endings
from perdure.models.protocol import Message, ModelReply, Opaque, Role, ToolCall, Usage
from perdure.sessions.running_summary import Running
from perdure.text.untrusted import cut, storable
from perdure.turns.lease.tenure import TurnRow

log = logging.getLogger(__name__)


def as_heard(text: str, at: str, order: str) -> str:
    """An SQL expression for a JSON array of messages from columns with these names; `heard` reads it."""
    return f"""
        json_agg(json_build_object('message_id', message_id, 'text', {text}, 'parts', parts, 'accepted_at', {at})
                 ORDER BY {order})
    """.strip()


# `told` has the messages of the last `window` turns that the running summary does not cover, each as an array of the
# members of `_Told`; `heard` the present turn's messages from the inbox if the transcript does not have them yet. The
# replies of failed turns are omitted. A turn that ended before the summary got so far is read without it. The cost
# depends on the window, not on the session's length. One JSON text takes the driver a third of the time that a row of
# columns for each message takes.
HISTORY = f"""
    WITH running AS (
        SELECT to_seq, summary, next_seq, next_summary, extractive FROM running_summaries
        WHERE session_id = %(session_id)s AND to_seq < %(first_seq)s
    )
    SELECT (
        SELECT json_agg(json_build_array(
                   m.turn_id, m.created_at, m.seq, m.role, m.content, m.tool_calls, m.tool_call_id, m.message_id,
                   m.model, m.fallback, m.usage, m.stop_reason, m.opaque, m.parts) ORDER BY m.seq)::text
        FROM messages AS m
        WHERE m.session_id = %(session_id)s AND m.seq < %(before_seq)s AND m.seq >= (
            SELECT min(first_seq) FROM (
                SELECT first_seq FROM turns
                WHERE session_id = %(session_id)s AND seq <= %(turn_seq)s AND first_seq IS NOT NULL
                  AND first_seq > coalesce((SELECT to_seq FROM running), 0)
                  AND {LEFT_OUT} IS NOT TRUE
                ORDER BY seq DESC LIMIT %(window)s) AS recent)
          AND (SELECT {LEFT_OUT} OR (status = 'failed' AND reply_seq = m.seq)
               FROM turns WHERE turn_id = m.turn_id) IS NOT TRUE  -- as SPOKEN
    ) AS told, (
        SELECT {as_heard("text", "accepted_at", "position")}::text
        FROM inbox
        WHERE turn_id = %(turn_id)s
          AND NOT EXISTS (SELECT FROM messages WHERE session_id = %(session_id)s AND seq = %(first_seq)s)
    ) AS heard, (SELECT to_json(running)::text FROM running) AS running
"""  # noqa: S608 (constants)

READ_HISTORY = Statement("turns.history", HISTORY, writes=False)

WINDOW_TURNS = 20
"""The number of turns that are read for a prompt, before the prompt is cut to its token budget.

This is the default of `PERDURE_MEMORY__WORKING_TURNS`.
"""

REJECTED = "rejected"
"""The `stop_reason` of a reply that is no output of its agent."""

_MAX_BIGINT = 2**63 - 1
_OWN = "perdure"
_TEXT, _CORRECTION = "text", "correction"
_MOST_REJECTED_CHARS = 16_000

NO_SUMMARY = Running()

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError)
"""Errors that are raised when this release cannot parse a row."""


@dataclass(frozen=True)
class Entry:
    """One message of a transcript; `seq` is `None` until the message is committed.

    `parts` are the stored records of its files (`perdure.files.parts`).
    `stop_reason` tells how a model's reply ended; it is `None` for every other message. `usage` is that of a model's
    reply, or of the guards that judged a user's message.
    """

    turn_id: UUID
    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    message_id: str | None = None
    model: str | None = None
    fallback: bool | None = None
    usage: Usage | None = None
    created_at: datetime | None = None
    seq: int | None = None
    stop_reason: str | None = None
    opaque: Opaque | None = None
    parts: tuple[Mapping[str, Any], ...] = ()
    prompt: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The record of the prompt of a new reply (`turns.prompt.record`); it is not read again."""

    @cached_property
    def token_count(self) -> int:
        """A conservative estimate of the number of tokens: one token for every three bytes of UTF-8.

        Counts what is sent back to the provider, too, and files.
        """
        return self.text_tokens + sum(int(part.get("tokens", 0)) - text_tokens(part) for part in self.parts)

    @cached_property
    def text_tokens(self) -> int:
        """`token_count` without the images and pages of files."""
        calls = sum(len(call.name) + len(call.arguments.encode()) for call in self.tool_calls)
        opaque = 0 if self.opaque is None else len(as_json(self.opaque.parts))
        return (len(self.content.encode()) + calls + opaque) // 3 + 4 + sum(map(text_tokens, self.parts))

    @property
    def is_rejected(self) -> bool:
        return self.stop_reason == REJECTED

    @cached_property
    def message(self) -> Message:
        opaque = None if self.is_rejected else self.opaque
        return Message(self.role, self.content, self.tool_calls, self.tool_call_id, opaque)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The entry in a prompt: one message, or a rejected reply with what is wrong with it."""
        if not self.is_rejected or self.opaque is None:
            return (self.message,)
        text, correction = self.opaque.parts[_TEXT], self.opaque.parts[_CORRECTION]
        return Message(Role.ASSISTANT, text or "(nothing)"), Message(Role.USER, correction)

    def to_dict(self, position: int) -> dict[str, Any]:
        """The entry as a record for the statements that append messages; `position` counts from 1."""
        return {
            "position": position,
            "role": self.role,
            "content": self.content,
            "tool_calls": [call.to_dict() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
            "message_id": self.message_id,
            "token_count": self.token_count,
            "model": self.model,
            "fallback": self.fallback,
            "usage": self.usage.to_dict() if self.usage else None,
            "stop_reason": self.stop_reason,
            "opaque": self.opaque.to_dict() if self.opaque else None,
            "parts": list(self.parts) or None,
            "created_at": self.created_at.isoformat() if self.created_at else None,
            **({} if self.prompt is None else {"prompt": dict(self.prompt)}),
        }


def history_parameters(turn: TurnRow, *, window: int, before_seq: int = _MAX_BIGINT) -> dict[str, Any]:
    """The parameters of `HISTORY`."""
    return {
        "session_id": turn.session_id,
        "turn_id": turn.turn_id,
        "turn_seq": turn.seq,
        "first_seq": turn.first_seq,
        "window": window,
        "before_seq": before_seq,
    }


class Transcript:
    """The messages of a session's recent turns and of the present turn, in the runner's memory.

    Attributes:
        is_screened: The hooks and guards let the user's message pass, which no step has committed yet.
        running: The session's running summary.
        original: The text of the turn's first message, if a hook has changed it and no step has committed the change.
        past: What was read of the user's past with the transcript, for the next prompt. `None` after a step, because a
            tool may have changed the past.
    """

    def __init__(self, turn_id: UUID, entries: Iterable[Entry], running: Running = NO_SUMMARY) -> None:
        self.turn_id = turn_id
        self.running = running
        self.is_screened = False
        self.original: str | None = None
        self.past: Past | None = None
        present, earlier = list[Entry](), list[Entry]()
        for entry in entries:
            (present if entry.turn_id == turn_id else earlier).append(entry)
        self._present = present
        self._earlier = [list(each) for _, each in groupby(earlier, key=lambda entry: entry.turn_id)]

    @classmethod
    def load(
        cls, executor: Executor, turn: TurnRow, *, window: int = WINDOW_TURNS, before_seq: int = _MAX_BIGINT
    ) -> Transcript:
        """Read the running summary and at most the last `window` turns up to the present turn. Runs one statement.

        Messages from `before_seq` on are not read: a turn that is not the newest has later turns behind it.

        An earlier turn that this release cannot parse is omitted as a whole, and logged.

        Raises:
            Exception: the present turn cannot be parsed.
        """
        [row] = executor.run(READ_HISTORY, history_parameters(turn, window=window, before_seq=before_seq))
        return cls.read(turn, row)

    @classmethod
    def read(cls, turn: TurnRow, row: Row[Any]) -> Transcript:
        """The transcript in the columns of `HISTORY`; see `load`."""
        told = groupby(json.loads(row.told or "[]"), key=itemgetter(0))
        entries = [entry for turn_id, messages in told for entry in _entries(UUID(turn_id), messages, turn.turn_id)]
        entries += heard(turn.turn_id, json.loads(row.heard or "[]"))
        return cls(turn.turn_id, entries, NO_SUMMARY if row.running is None else _running(row.running))

    def leave(self, running: Running) -> None:
        """Remove the messages that the new running summary covers."""
        self.running = running
        staying = ([each for each in turn if (each.seq or 0) > running.to_seq] for turn in self._earlier)
        self._earlier = [turn for turn in staying if turn]

    @property
    def uncommitted(self) -> list[Entry]:
        """The uncommitted entries.

        Before the turn's first commit, these are the user's messages. After the first commit, there are none.
        """
        return [entry for entry in self._present if entry.seq is None]

    def committed_messages(self, turns: int) -> tuple[Message, ...]:
        """The committed messages of the last `turns` turns, the present one included."""
        return tuple(entry.message for turn in self.turns[-turns:] for entry in turn if entry.seq is not None)

    @property
    def present(self) -> list[Entry]:
        return list(self._present)

    @property
    def asked(self) -> str:
        """The user's text in the present turn."""
        return "\n".join(entry.content for entry in self._present if entry.role is Role.USER)

    @property
    def steps(self) -> int:
        return steps_in(self._present)

    def stepped_at(self, now: datetime) -> datetime | None:
        """When the last step of the present turn was committed: `now`, if this run did so. `None`: it has no step."""
        steps = [each for each in self._present if each.role is not Role.USER and each.seq is not None]
        return steps[-1].created_at or now if steps else None

    @property
    def usage(self) -> Usage | None:
        """The tokens of all steps of the present turn; see `total_usage`."""
        return total_usage(self._present)

    def last_seq(self, first_seq: int) -> int:
        """The `seq` of the session's last message. The present turn's messages begin at `first_seq`."""
        return max((entry.seq for entry in self._present if entry.seq is not None), default=first_seq - 1)

    @property
    def call_ids(self) -> frozenset[str]:
        """The ids of the present turn's calls. Approvals refer to calls by id, so the ids must be distinct."""
        return frozenset(call.id for entry in self._present for call in entry.tool_calls)

    def open_reply(self) -> Entry | None:
        """The message whose tool calls have no results yet, if any."""
        last = self._present[-1] if self._present else None
        return last if last is not None and last.tool_calls else None

    def replace_asked(self, text: str) -> None:
        """Replace the user's uncommitted messages with one that has this text and all files."""
        first, *_ = said = self.uncommitted
        parts = [{**part, "at": min(part["at"], len(text))} for entry in said for part in entry.parts]
        self.original = first.content if self.original is None else self.original
        committed = [entry for entry in self._present if entry.seq is not None]
        used = total_usage(said)
        self._present = [*committed, replace(first, content=text, parts=tuple(parts), usage=used)]

    def charge(self, usage: Usage) -> None:
        """Count tokens that a guard used, with the user's last uncommitted message."""
        last = self._present[-1]
        self._present[-1] = replace(last, usage=usage if last.usage is None else last.usage + usage)

    def committed(self, appended: Sequence[Entry], base: int) -> None:
        """Replace the uncommitted entries with `appended`, which were committed directly after the `seq` `base`."""
        self.original = self.past = None
        self._present = [entry for entry in self._present if entry.seq is not None]
        self._present += [replace(entry, seq=base + number) for number, entry in enumerate(appended, start=1)]

    @property
    def earlier(self) -> list[list[Entry]]:
        """The entries of each earlier turn."""
        return list(self._earlier)

    @property
    def turns(self) -> list[list[Entry]]:
        """The entries of each turn, the present turn last."""
        return [*self._earlier, list(self._present)] if self._present else list(self._earlier)


def steps_in(entries: Iterable[Entry]) -> int:
    """The number of model replies in `entries`."""
    return sum(entry.role is Role.ASSISTANT for entry in entries)


def total_usage(entries: Sequence[Entry]) -> Usage | None:
    """The tokens that the model's replies and the guards in `entries` used, as far as they reported them.

    Includes those of other agents that answered calls. `None` if there are replies, and no usage is reported.
    """
    reported = [entry.usage for entry in entries if entry.usage]
    return sum(reported, Usage()) if reported or not steps_in(entries) else None


def reply_entry(turn_id: UUID, reply: ModelReply, taken: Collection[str] = ()) -> Entry:
    """A model's reply as a storable entry, with call ids that are distinct and not in `taken`."""
    return Entry(
        turn_id,
        Role.ASSISTANT,
        storable(reply.content),
        tool_calls=_distinct(reply.tool_calls, taken),
        model=storable(reply.model),
        fallback=reply.fallback or None,
        usage=reply.usage,
        stop_reason=endings.recorded(reply),
        opaque=reply.opaque,
    )


def rejected(reply: Entry, correction: str) -> Entry:
    """The entry of a reply that is no output of its agent. `correction` tells the model what is wrong with it.

    Its text is no content, because nobody but the model reads it: no user, no summary, no memory and no later turn.
    """
    parts = {_TEXT: cut(reply.content, _MOST_REJECTED_CHARS), _CORRECTION: storable(correction)}
    return replace(reply, content="", stop_reason=REJECTED, opaque=Opaque(_OWN, "", parts))


def heard(turn_id: UUID, records: Sequence[Mapping[str, Any]] | None) -> list[Entry]:
    """The user's messages, from JSON that `as_heard` makes."""
    return [
        Entry(
            turn_id,
            Role.USER,
            each["text"],
            message_id=each["message_id"],
            created_at=datetime.fromisoformat(each["accepted_at"]),
            parts=tuple(each["parts"] or ()),
        )
        for each in records or ()
    ]


def result_of(turn_id: UUID, call: ToolCall, text: str, used: Usage | None = None) -> Entry:
    """The entry of a call's result. `used` are the tokens of another agent that answered it."""
    return Entry(turn_id, Role.TOOL, storable(text), tool_call_id=call.id, usage=used)


def _distinct(calls: Sequence[ToolCall], taken: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls, each with a storable, non-empty and distinct id."""
    seen = set(taken)
    distinct = []
    for number, call in enumerate(calls, start=1):
        wanted = storable(call.id) or f"call_{number}"
        while wanted in seen:
            wanted = f"{wanted}_{number}"
        seen.add(wanted)
        distinct.append(ToolCall(wanted, storable(call.name), storable(call.arguments)))
    return tuple(distinct)


def _running(stored: str) -> Running:
    plan = json.loads(stored)
    return Running(plan["to_seq"], plan["summary"], plan["next_seq"], plan["next_summary"], plan["extractive"])


class _Told(NamedTuple):
    """A message as HISTORY tells it, in this order."""

    turn_id: str
    created_at: str
    seq: int
    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None
    message_id: str | None
    model: str | None
    fallback: bool | None
    usage: dict[str, Any] | None
    stop_reason: str | None
    opaque: dict[str, Any] | None
    parts: list[dict[str, Any]] | None


def _entries(turn_id: UUID, told: Iterable[Sequence[Any]], present: UUID) -> list[Entry]:
    """One turn's entries; empty for an earlier turn that cannot be parsed, so that the present turn still runs."""
    try:
        rows = map(_Told._make, told)
        return [_entry(row, turn_id, datetime.fromisoformat(row.created_at)) for row in rows]
    except UNREADABLE as error:
        if turn_id == present:
            raise
        log.error("turn %s is omitted from the prompt, because it cannot be parsed: %s", turn_id, loggable(error))  # noqa: TRY400
        return []


def read_entry(row: Row[Any]) -> Entry:
    """The entry of a row of `messages`."""
    return _entry(row, row.turn_id, row.created_at)


def _entry(row: Row[Any] | _Told, turn_id: UUID, created_at: datetime) -> Entry:
    return Entry(
        turn_id=turn_id,
        role=Role(row.role),
        content=row.content,
        tool_calls=tuple([ToolCall.from_dict(call) for call in row.tool_calls or ()]),
        tool_call_id=row.tool_call_id,
        message_id=row.message_id,
        model=row.model,
        fallback=row.fallback,
        usage=Usage.from_dict(row.usage) if row.usage else None,
        created_at=created_at,
        seq=row.seq,
        stop_reason=row.stop_reason,
        opaque=Opaque.from_dict(row.opaque) if row.opaque else None,
        parts=tuple(row.parts or ()),
    )
