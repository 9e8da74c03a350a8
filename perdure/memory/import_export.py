"""Imports and exports conversations as files with one JSON object per line.

    {user_id, tenant?, session, message_id, role, author?, content, occurred_at, channel?, error?: {code, message}}

`error` marks the reply of a failed turn: it is kept for people, and is neither searched nor shown to a model.
`session` groups a user's lines into sessions. Imported sessions have ended and await consolidation. `session` and
`message_id` together identify a line. If a file is imported again, only its new lines are added. Invalid lines are
skipped, and reported with their number and the reason. An exported file can be imported into any database.

Called by `perdure messages import` and `perdure messages export`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from sqlalchemy import Row

from perdure.access.tenants import UserKey, line_tenant, tenant_of, user_key, user_of
from perdure.clock import Clock
from perdure.database.engine import Database, Statement, Transaction, as_json
from perdure.errors import InvalidRequest
from perdure.ids import new_id
from perdure.memory import import_export_queries as queries
from perdure.text.tokens import estimate_tokens
from perdure.text.untrusted import first_line, identifier, load_object, member_path, storable, what_is_wrong

MAX_LINE_CHARS = 16_777_216
MAX_BAD_LINES = 1_000
"""Maximum invalid lines that are reported individually; all are counted."""

_LINES_PER_PORTION = 1_000
_ROWS_PER_PAGE = 500
_SESSIONS_PER_PAGE = 100
_TOKENS_PER_MESSAGE = 4
_CHANNEL = "import"


def _require_storable(value: str) -> str:
    if storable(value) != value:
        raise ValueError("contains NUL or a character that is not valid Unicode (a lone surrogate)")
    return value


def _require_text(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


def _aware(value: datetime) -> datetime:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if not _EARLIEST < aware < _LATEST:  # a conversion to another time zone could overflow
        raise ValueError("is too close to the year 1 or 9999")
    return aware


_EARLIEST, _LATEST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)

_Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_require_storable)]


class LineError(BaseModel):
    """The error that a line reports."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: _Name
    message: Annotated[str, AfterValidator(_require_storable)]


class ImportLine(BaseModel):
    """One message of an imported file. If `occurred_at` has no time zone, it is in UTC."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user_id: _Name
    tenant: str | None = None
    session: _Name
    message_id: _Name
    role: Literal["user", "assistant"]
    author: _Name | None = None
    content: Annotated[str, AfterValidator(_require_storable), AfterValidator(_require_text)]
    occurred_at: Annotated[datetime, AfterValidator(_aware)]
    channel: Annotated[_Name, AfterValidator(identifier)] = _CHANNEL
    error: LineError | None = None

    @field_validator("error")
    @classmethod
    def _of_the_assistant(cls, error: LineError | None, info: ValidationInfo) -> LineError | None:
        if error is not None and info.data.get("role") != "assistant":
            raise ValueError("belongs to a line with the role assistant")
        return error


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was not imported, and the reason. `number` counts from 1."""

    number: int
    reason: str


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
    database: Database, clock: Clock, agent: str, lines: Iterable[str], tenant: str | None = None
) -> Iterator[ImportResult]:
    """Import the lines of a file in portions; after each portion, yields the counts of all lines so far.

    A portion is committed session by session. `agent` becomes the agent of new sessions. `tenant` is the tenant of
    lines that name no tenant. To embed the messages, pass the `sessions` of the result to `embed_sessions`.

    Raises:
        Unavailable: the database cannot be reached; a repeated import is safe.
    """
    result = ImportResult()
    numbered = enumerate(lines, start=1)
    while portion := list(islice(numbered, _LINES_PER_PORTION)):
        grouped: dict[tuple[UserKey, str], list[tuple[int, ImportLine]]] = {}
        for number, text in portion:
            parsed = _parsed(number, text, tenant, result)
            if parsed is not None:
                user, line = parsed
                grouped.setdefault((user, line.session), []).append((number, line))
        for (user, _), numbered_lines in grouped.items():
            with database.transaction("exchange.import") as transaction:
                _import_session(transaction, clock, agent, numbered_lines, result, user=user)
        yield result


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


def _parsed(number: int, text: str, tenant: str | None, result: ImportResult) -> tuple[UserKey, ImportLine] | None:
    """Parse a line; returns the user's key and the line, or `None` if the line is blank or refused."""
    if not text.strip():
        return None
    if len(text) > MAX_LINE_CHARS:
        result.refuse(number, f"longer than {MAX_LINE_CHARS:,} characters")
        return None
    try:
        line = ImportLine.model_validate(load_object(text))
        return user_key(line_tenant(line.tenant, tenant), line.user_id), line
    except InvalidRequest as error:
        result.refuse(number, error.message)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        result.refuse(number, f"{member_path(fault)} {what_is_wrong(fault)}")
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
    name = numbered_lines[0][1].session
    times = [line.occurred_at for _, line in numbered_lines]
    session = {"user_id": user, "name": name, "own_id": _as_id(name)}
    span = {"first_at": min(times), "last_at": max(times)}
    transaction.run(queries.ENSURE_USER, session)
    transaction.run(queries.OPEN, {**session, **span, "new_id": new_id(clock), "agent": agent})
    session_row = transaction.run(queries.LOCK, session)[0]
    new = _new(transaction, session_row.session_id, numbered_lines, result)
    if not new:
        return
    if not session_row.imported:
        for number, _ in new:
            result.refuse(number, f"session {name} exists and is not an imported one, so an import cannot add to it")
        return
    turns, messages = _turns(clock, [line for _, line in new])
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


def _new(
    transaction: Transaction, session_id: UUID, numbered_lines: Sequence[tuple[int, ImportLine]], result: ImportResult
) -> list[tuple[int, ImportLine]]:
    """The lines that are not stored yet. Refuses a line whose `message_id` is stored with a different text."""
    parameters = {"session_id": session_id, "message_ids": [line.message_id for _, line in numbered_lines]}
    rows = transaction.run(queries.FIND_MESSAGES, parameters)
    existing = {name: row.content for row in rows for name in (row.message_id, row.place) if name is not None}
    new = []
    for number, line in numbered_lines:
        content = existing.get(line.message_id)
        if content is None:
            existing[line.message_id] = line.content
            new.append((number, line))
        elif content == line.content:
            result.known += 1
        else:
            result.refuse(number, f"message_id {line.message_id} exists already, with another text")
    return new


def _turns(clock: Clock, lines: Sequence[ImportLine]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Turns and messages for `queries.ADD`. A user's line after a reply, or any line after an error, begins a turn."""
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for position, line in enumerate(lines, start=1):
        if not turns or "error_code" in turns[-1] or (line.role == "user" and turns[-1]["reply"] is not None):
            turns.append(
                {
                    "position": len(turns) + 1,
                    "turn_id": new_id(clock),
                    "channel": line.channel,
                    "steps": 0,
                    "first": position,
                    "reply": None,
                    "accepted_at": line.occurred_at,
                }
            )
        turn = turns[-1]
        turn["settled_at"] = line.occurred_at
        if line.role == "assistant":
            turn["steps"] += line.error is None
            turn["reply"] = position
        if line.error is not None:
            turn.update(error_code=line.error.code, error_message=line.error.message)
        messages.append(
            {
                **line.model_dump(mode="json", include={"role", "content", "message_id", "channel", "author"}),
                "occurred_at": line.occurred_at.isoformat(),
                "position": position,
                "turn_id": turn["turn_id"],
                "token_count": estimate_tokens(line.content) + _TOKENS_PER_MESSAGE,
            }
        )
    return turns, messages


def _as_id(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None
