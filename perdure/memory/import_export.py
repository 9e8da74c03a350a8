"""Imports and exports conversations as files with one JSON object per line.

    {user_id, tenant?, session, message_id, role, author?, content, occurred_at, channel?, error?: {code, message},
     turn?, agent?, status?, feedback?: {score, comment?}, tool_calls?: [{id, name, arguments}], tool_call_id?,
     model?, usage?, stop_reason?, remember?, forgotten?}

`session` groups a user's lines into sessions. Imported sessions have ended and await consolidation. `session` and
`message_id` together identify a line. If a file is imported again, only its new lines are added. Invalid lines are
skipped, and reported with their number and the reason. An exported file can be imported into any database.

`turn` groups successive lines of a session into a turn. Without it, a user's line after a reply begins a turn. `agent`,
`status` (`cancelled`) and `feedback` are the turn's. `error` marks the reply of a failed turn: it is kept for people,
and is neither searched nor shown to a model. Each call in `tool_calls` has its result in one of the next lines, with
the role `tool`. If a line of a turn has `remember: false`, nothing of the turn is remembered or searched. No memory is
extracted from a line with `forgotten: true`. If the line is known, its memories are forgotten.

Called by `perdure messages import` and `perdure messages export`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from typing import Annotated, Any, Literal, Self, TextIO
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from sqlalchemy import Row

from perdure.access.tenants import UserKey, line_tenant, tenant_of, user_key, user_of
from perdure.clock import Clock
from perdure.database.engine import Database, Statement, Transaction, as_json
from perdure.errors import InvalidRequest, TurnCancelled
from perdure.ids import new_id, new_id_of
from perdure.memory import import_export_queries as queries
from perdure.memory.consolidation.queries import LOCK_USER
from perdure.memory.recall.agent_memory import forget_within
from perdure.memory.recall.agent_memory_queries import MARK_FORGOTTEN
from perdure.models.protocol import Usage
from perdure.text.tokens import estimate_tokens
from perdure.text.untrusted import first_line, identifier, load_object, member_path, storable, what_is_wrong

MAX_LINE_CHARS = 16_777_216
MAX_BAD_LINES = 1_000
"""Maximum invalid lines that are reported individually; all are counted."""

_LINES_PER_PORTION = 1_000
_ROWS_PER_PAGE = 500
_SESSIONS_PER_PAGE = 100
_MOST_LINES_OF_A_PORTION = 10_000
_TOKENS_PER_MESSAGE = 4
_CHANNEL = "import"
_CANCELLED = "The turn was cancelled."


def _require_storable(value: str) -> str:
    if storable(value) != value:
        raise ValueError("contains NUL or a character that is not valid Unicode (a lone surrogate)")
    return value


def _require_score(value: int) -> int:
    if value not in {-1, 1}:
        raise ValueError("must be -1 or 1")
    return value


def _aware(value: datetime) -> datetime:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if not _EARLIEST < aware < _LATEST:  # a conversion to another time zone could overflow
        raise ValueError("is too close to the year 1 or 9999")
    return aware


_EARLIEST, _LATEST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)

_STORED = {
    "role", "content", "message_id", "channel", "author", "tool_calls", "tool_call_id", "model", "usage", "stop_reason",
    "forgotten",
}  # fmt: skip
"""The members of a line that the row of its message has."""

_Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_require_storable)]


class LineError(BaseModel):
    """The error that a line reports."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: _Name
    message: Annotated[str, AfterValidator(_require_storable)]


class LineFeedback(BaseModel):
    """A person's feedback on the turn whose reply the line is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: Annotated[int, Field(strict=True), AfterValidator(_require_score)]
    comment: Annotated[str, AfterValidator(_require_storable)] | None = None


class LineCall(BaseModel):
    """A tool call of the model. `arguments` is the model's text. Members of other releases are ignored."""

    model_config = ConfigDict(frozen=True)

    id: Annotated[str, Field(min_length=1), AfterValidator(_require_storable)]
    name: Annotated[str, Field(min_length=1), AfterValidator(_require_storable)]
    arguments: Annotated[str, AfterValidator(_require_storable)]


_Tokens = Annotated[int, Field(strict=True, ge=0, le=10**12)]


class LineUsage(BaseModel):
    """The tokens of the model call that made the line. Members of other releases are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None


class ImportLine(BaseModel):
    """One message of an imported file. If `occurred_at` has no time zone, it is in UTC."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user_id: _Name
    tenant: str | None = None
    session: _Name
    message_id: _Name
    role: Literal["user", "assistant", "tool"]
    author: _Name | None = None
    content: Annotated[str, AfterValidator(_require_storable)]
    occurred_at: Annotated[datetime, AfterValidator(_aware)]
    channel: Annotated[_Name, AfterValidator(identifier)] = _CHANNEL
    turn: _Name | None = None
    agent: _Name | None = None
    status: Literal["cancelled"] | None = None
    error: LineError | None = None
    feedback: LineFeedback | None = None
    tool_calls: Annotated[tuple[LineCall, ...], Field(min_length=1)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1), AfterValidator(_require_storable)] | None = None
    model: _Name | None = None
    usage: LineUsage | None = None
    stop_reason: _Name | None = None
    remember: StrictBool = True
    forgotten: StrictBool = False

    @field_validator("error", "feedback", "tool_calls", "model", "stop_reason")
    @classmethod
    def _of_the_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("role") != "assistant":
            raise ValueError("belongs to a line with the role assistant")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to each line with the role tool, and to no other")
        if self.role != "tool" and self.tool_calls is None and not self.content.strip():
            raise ValueError("content is empty")
        return self


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was not imported, and the reason. `number` counts from 1."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What a reader of another format cannot convert to a line, and the reason."""

    reason: str


Given = str | dict[str, Any] | Unreadable
"""A line of a file, an object that a reader of another format made, or what it could not read."""


@dataclass(slots=True)
class ImportResult:
    """Counts of a file's lines: new (`added`), already stored (`known`) and not imported (`refused`).

    `bad` lists at most `MAX_BAD_LINES` of the lines that were not imported. `sessions` are the ids of the sessions to
    which messages were added.
    """

    added: int = 0
    known: int = 0
    refused: int = 0
    bad: list[BadLine] = field(default_factory=list)
    sessions: list[UUID] = field(default_factory=list)

    def refuse(self, number: int, reason: str) -> None:
        """Count a line that is not imported, and add it to `bad` if `bad` is not full."""
        self.refused += 1
        if len(self.bad) < MAX_BAD_LINES:
            self.bad.append(BadLine(number, reason))


def import_messages(
    database: Database, clock: Clock, agent: str, lines: Iterable[Given], tenant: str | None = None
) -> Iterator[ImportResult]:
    """Import the lines of a file in portions; after each portion, yields the counts of all lines so far.

    Memory is bounded by a portion, which is committed session by session. `agent` becomes the agent of new sessions
    whose lines name none. `tenant` is the tenant of lines that name no tenant. To embed the messages, pass the
    `sessions` of the result to `embed_sessions`.

    Raises:
        Unavailable: the database cannot be reached; a repeated import is safe.
    """
    result = ImportResult()
    for portion in _portions(lines, tenant, result):
        for (user, _), numbered_lines in portion.items():
            with database.transaction("exchange.import") as transaction:
                _import_session(transaction, clock, agent, numbered_lines, result, user=user)
        yield result


_Session = tuple[UserKey, str]


def _portions(
    lines: Iterable[Given], tenant: str | None, result: ImportResult
) -> Iterator[dict[_Session, list[tuple[int, ImportLine]]]]:
    """The valid lines by session, in portions that end between two turns, so that no turn is imported in halves."""
    portion: dict[_Session, list[tuple[int, ImportLine]]] = {}
    size, turn = 0, None
    for number, given in enumerate(lines, start=1):
        size += 1
        parsed = _parsed(number, given, tenant, result)
        user, line = parsed or (None, None)
        ended = line is None or line.turn is None or line.turn != turn
        if (size > _LINES_PER_PORTION and ended) or size > _MOST_LINES_OF_A_PORTION:
            yield portion
            portion, size = {}, 1
        if user is not None and line is not None:
            turn = line.turn
            portion.setdefault((user, line.session), []).append((number, line))
    yield portion


def bounded_lines(stream: TextIO) -> Iterator[str]:
    """The lines of a file. Of a line that is too long to be imported, only the beginning is read into memory."""
    while line := stream.readline(MAX_LINE_CHARS + 1):
        yield line
        while len(line) > MAX_LINE_CHARS and not line.endswith("\n"):
            line = stream.readline(MAX_LINE_CHARS + 1)


def export_messages(
    database: Database, user: UserKey | None = None, tenant: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the messages of all users, of one user or of one tenant, as JSON objects for the lines of an import file.

    `user` is a user key (see `perdure.access.tenants`).
    """
    for row in _all_messages(database) if user is None and tenant is None else _messages_of(database, user, tenant):
        line = {
            "user_id": user_of(row.user_id),
            "tenant": tenant_of(row.user_id),
            "session": row.session,
            "message_id": row.message_id,
            "role": row.role,
            "author": row.author,
            "content": row.content,
            "occurred_at": row.occurred_at.astimezone(UTC).isoformat(),
            "channel": row.channel,
            "error": None if row.error_code is None else {"code": row.error_code, "message": row.error_message},
            "turn": str(row.turn),
            "agent": row.agent,
            "status": row.status,
            "feedback": row.feedback,
            "tool_calls": row.tool_calls,
            "tool_call_id": row.tool_call_id,
            "model": row.model,
            "usage": row.usage,
            "stop_reason": row.stop_reason,
            "remember": False if row.is_left_out else None,
            "forgotten": True if row.is_forgotten else None,
        }
        yield {key: value for key, value in line.items() if value is not None}


def _all_messages(database: Database) -> Iterator[Row[Any]]:
    return _paged(database, queries.EXPORT, {})


def _messages_of(database: Database, user: UserKey | None, tenant: str | None) -> Iterator[Row[Any]]:
    """The messages of a user or a tenant.

    No index serves all messages of a user in the order of the export. Each statement therefore reads only a few
    sessions.
    """
    statement = queries.SESSIONS_OF_TENANT if user is None else queries.SESSIONS_OF_USER
    sessions = [row.session_id for row in database.run(statement, {"user_id": user, "tenant": tenant})]
    for start in range(0, len(sessions), _SESSIONS_PER_PAGE):
        chosen = sessions[start : start + _SESSIONS_PER_PAGE]
        yield from _paged(database, queries.EXPORT_OF_SESSIONS, {"session_ids": chosen})


def _paged(database: Database, statement: Statement, parameters: dict[str, Any]) -> Iterator[Row[Any]]:
    after: tuple[UUID, int] = (UUID(int=0), 0)
    while True:
        bounds = {"after_session": after[0], "after_seq": after[1], "most": _ROWS_PER_PAGE}
        rows = database.run(statement, {**parameters, **bounds})
        yield from rows
        if len(rows) < _ROWS_PER_PAGE:
            return
        after = (rows[-1].session_id, rows[-1].seq)


def _parsed(number: int, given: Given, tenant: str | None, result: ImportResult) -> tuple[UserKey, ImportLine] | None:
    """Parse a line; returns the user's key and the line, or `None` if the line is blank or refused."""
    if isinstance(given, Unreadable):
        result.refuse(number, given.reason)
        return None
    if isinstance(given, str) and not given.strip():
        return None
    if len(given) > MAX_LINE_CHARS:
        result.refuse(number, f"longer than {MAX_LINE_CHARS:,} characters")
        return None
    try:
        line = ImportLine.model_validate(load_object(given) if isinstance(given, str) else given)
        return user_key(line_tenant(line.tenant, tenant), line.user_id), line
    except InvalidRequest as error:
        result.refuse(number, error.message)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        result.refuse(number, f"{member_path(fault)} {what_is_wrong(fault)}".strip())
    except ValueError as error:
        result.refuse(number, first_line(str(error)))
    return None


def _import_session(
    transaction: Transaction,
    clock: Clock,
    agent: str,
    numbered_lines: Sequence[tuple[int, ImportLine]],
    result: ImportResult,
    *,
    user: UserKey,
) -> None:
    """Add the new lines of one session."""
    numbered_lines = _answered(numbered_lines, result)
    if not numbered_lines:
        return
    name = numbered_lines[0][1].session
    times = [line.occurred_at for _, line in numbered_lines]
    session = {"user_id": user, "name": name, "own_id": _as_id(name)}
    span = {"first_at": min(times), "last_at": max(times)}
    transaction.run(queries.ENSURE_USER, session)
    transaction.run(
        queries.OPEN, {**session, **span, "new_id": new_id(clock), "agent": numbered_lines[0][1].agent or agent}
    )
    session_row = transaction.run(queries.LOCK, session)[0]
    new, forgotten = _new(transaction, session_row.session_id, numbered_lines, result)
    if forgotten:
        _forget(transaction, user, session_row.session_id, forgotten)
    if not new:
        return
    if not session_row.imported:
        for number, _ in new:
            result.refuse(number, f"session {name} exists and is not an imported one, so an import cannot add to it")
        return
    turns, messages = _turns([line for _, line in new])
    transaction.run(
        queries.ADD,
        {
            **span,
            "session_id": session_row.session_id,
            "message_count": session_row.message_count,
            "last_turn_seq": session_row.last_turn_seq,
            "messages_added": len(messages),
            "turns_added": len(turns),
            "turns": as_json(turns),
            "messages": as_json(messages),
            "channels": list(dict.fromkeys(line.channel for _, line in new)),
        },
    )
    result.added += len(messages)
    if session_row.session_id not in result.sessions:
        result.sessions.append(session_row.session_id)


def _answered(numbered_lines: Sequence[tuple[int, ImportLine]], result: ImportResult) -> list[tuple[int, ImportLine]]:
    """The lines whose calls have their results, and whose results have their calls. A provider accepts no others."""
    kept: list[tuple[int, ImportLine]] = []
    rest = list(numbered_lines)
    while rest:
        asking = rest.pop(0) if rest[0][1].role != "tool" else None
        results = list(takewhile(lambda each: each[1].role == "tool", rest))
        del rest[: len(results)]
        round_ = [*([asking] if asking else []), *results]
        asked = [call.id for call in (asking and asking[1].tool_calls) or ()]
        if sorted(asked) == sorted(line.tool_call_id or "" for _, line in results):
            kept += round_
            continue
        for number, line in round_:
            if line.role == "tool" or line.tool_calls:
                result.refuse(number, "each tool call needs its result, as a line with the role tool directly after it")
            else:
                kept.append((number, line))
    return kept


def _new(
    transaction: Transaction, session_id: UUID, numbered_lines: Sequence[tuple[int, ImportLine]], result: ImportResult
) -> tuple[list[tuple[int, ImportLine]], list[int]]:
    """The lines that are not stored yet, and the `seq` of each stored one that only its line has as forgotten.

    Refuses a line whose `message_id` is stored with a different text.
    """
    parameters = {"session_id": session_id, "message_ids": [line.message_id for _, line in numbered_lines]}
    rows = transaction.run(queries.FIND_MESSAGES, parameters)
    existing = {name: row.content for row in rows for name in (row.message_id, row.place) if name is not None}
    remembered = {name: row.seq for row in rows if not row.is_forgotten for name in (row.message_id, row.place)}
    new, forgotten = [], []
    for number, line in numbered_lines:
        content = existing.get(line.message_id)
        if content is None:
            existing[line.message_id] = line.content
            new.append((number, line))
        elif content == line.content:
            result.known += 1
            if line.forgotten and line.message_id in remembered:
                forgotten.append(remembered[line.message_id])
        else:
            result.refuse(number, f"message_id {line.message_id} exists already, with another text")
    return new, forgotten


def _forget(transaction: Transaction, user: UserKey, session_id: UUID, seqs: Sequence[int]) -> None:
    """Mark messages as forgotten, and forget the memories that no other message has (`recall.agent_memory.forget`)."""
    transaction.run(LOCK_USER, {"user_id": user})
    transaction.run(MARK_FORGOTTEN, {"session_ids": [session_id] * len(seqs), "seqs": list(seqs)})
    for row in transaction.run(queries.OF_FORGOTTEN, {"user_id": user, "session_id": session_id, "seqs": list(seqs)}):
        forget_within(transaction, user, row.memory_id)


def _turns(lines: Sequence[ImportLine]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Turns and messages for `queries.ADD`. A user's line after a reply, or any line after an error, begins a turn."""
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    before: ImportLine | None = None
    for position, line in enumerate(lines, start=1):
        if before is None or _begins_turn(before, line, turns[-1]):
            turns.append(
                {
                    "position": len(turns) + 1,
                    "turn_id": new_id_of(line.occurred_at),  # lists are in the order of ids
                    "agent": line.agent,
                    "channel": line.channel,
                    "status": "done",
                    "steps": 0,
                    "first": position,
                    "reply": None,
                    "accepted_at": line.occurred_at,
                    "remember": True,
                }
            )
        turn, before = turns[-1], line
        turn["settled_at"] = line.occurred_at
        turn["remember"] &= line.remember
        if line.role == "assistant":
            turn["steps"] += line.error is None
            turn["reply"] = None if line.tool_calls else position
        if line.status is not None:
            turn.update(status=line.status, reply=None, error_code=TurnCancelled.code, error_message=_CANCELLED)
        if line.error is not None:
            turn.update(status="failed", error_code=line.error.code, error_message=line.error.message)
        if line.feedback is not None:
            turn["feedback"] = line.feedback.model_dump()
        if line.usage is not None:
            used = Usage.from_dict(line.usage.model_dump(mode="json"))
            turn["usage"] = (used if turn.get("usage") is None else Usage.from_dict(turn["usage"]) + used).to_dict()
        messages.append(
            {
                **line.model_dump(mode="json", include=_STORED),
                "occurred_at": line.occurred_at.isoformat(),
                "position": position,
                "turn_id": turn["turn_id"],
                "token_count": estimate_tokens(line.content) + _TOKENS_PER_MESSAGE,
            }
        )
    return turns, messages


def _begins_turn(before: ImportLine, line: ImportLine, turn: dict[str, Any]) -> bool:
    if line.turn is not None or before.turn is not None:
        return line.turn != before.turn
    return "error_code" in turn or (line.role == "user" and turn["reply"] is not None)


def _as_id(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None
