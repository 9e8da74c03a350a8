"""Conversations from and into files: one JSON object a line, as CONTRACT's `messages import` says.

    {user_id, tenant?, session, message_id, role, author?, content, occurred_at, channel?}

`session` groups a user's lines into sessions, which arrive ended and not yet consolidated. A line is
known by its session and `message_id`: importing a file twice changes nothing, and a file that has
grown adds what is new. Bad lines are reported by number and reason, the good ones are kept. What is
exported can be imported, here (where it is known) and elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Row

from perdure.access.tenants import line_tenant, tenant_of, user_key, user_of
from perdure.clock import Clock
from perdure.database.engine import Database, Statement, Transaction, as_json
from perdure.errors import InvalidRequest
from perdure.ids import new_id
from perdure.memory import import_export_queries as queries
from perdure.memory.sections.budget import estimate_tokens
from perdure.text.untrusted import first_line, identifier, load_object, storable, what_is_wrong

MAX_LINE_CHARS = 16_777_216
MAX_BAD_LINES = 1_000
"""Bad lines that are told one by one; all are counted."""

_AT_ONCE = 1_000
_PAGE = 500
_SESSIONS = 100
_TOKENS_AROUND = 4
_CHANNEL = "import"


def _plain(value: str) -> str:
    if storable(value) != value:
        raise ValueError("contains NUL or a character that is no valid Unicode (a lone surrogate)")
    return value


def _said(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


def _aware(value: datetime) -> datetime:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if not _EARLIEST < aware < _LATEST:  # some that Python can write it cannot read again from the database
        raise ValueError("is too close to the ends of the calendar")
    return aware


_EARLIEST, _LATEST = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)

_Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain)]


class ImportLine(BaseModel):
    """One message in a file. A time without a zone is in UTC."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user_id: _Name
    tenant: str | None = None
    session: _Name
    message_id: _Name
    role: Literal["user", "assistant"]
    author: _Name | None = None
    content: Annotated[str, AfterValidator(_plain), AfterValidator(_said)]
    occurred_at: Annotated[datetime, AfterValidator(_aware)]
    channel: Annotated[_Name, AfterValidator(identifier)] = _CHANNEL


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was not imported, by its number from 1, and why."""

    number: int
    reason: str


@dataclass(slots=True)
class ImportResult:
    """What became of a file's lines. `sessions` are those that got something new."""

    added: int = 0
    known: int = 0
    refused: int = 0
    bad: list[BadLine] = field(default_factory=list)
    sessions: list[UUID] = field(default_factory=list)

    def refuse(self, number: int, reason: str) -> None:
        """Note a bad line."""
        self.refused += 1
        if len(self.bad) < MAX_BAD_LINES:
            self.bad.append(BadLine(number, reason))


def import_messages(
    database: Database, clock: Clock, agent: str, lines: Iterable[str], tenant: str | None = None
) -> Iterator[ImportResult]:
    """Import the lines of a file, some at a time; after each portion what has become of all lines so far.

    Every portion is committed, a session's part of it at once; `agent` is whose sessions they become. A line that
    names no tenant is of `tenant`. Give `sessions` their vectors with `embed_sessions`.

    Raises:
        Unavailable: the database cannot be reached; importing the file once more is safe.
    """
    result = ImportResult()
    numbered = enumerate(lines, start=1)
    while portion := list(islice(numbered, _AT_ONCE)):
        grouped: dict[tuple[str, str], list[tuple[int, ImportLine]]] = {}
        for number, text in portion:
            line = _parsed(number, text, tenant, result)
            if line is not None:
                grouped.setdefault((line.user_id, line.session), []).append((number, line))
        for said in grouped.values():
            with database.transaction("exchange.import") as transaction:
                _import_session(transaction, clock, agent, said, result)
        yield result


def export_messages(database: Database, user: str | None = None, tenant: str | None = None) -> Iterator[dict[str, Any]]:
    """Everything that was said, or what was said by and to one user or a tenant's, as lines that can be imported.

    `user` is the user's key.

    Raises:
        Unavailable: the database cannot be reached.
    """
    for row in _all_said(database) if user is None and tenant is None else _said_by(database, user, tenant):
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
        }
        yield {key: value for key, value in line.items() if value is not None}


def _all_said(database: Database) -> Iterator[Row[Any]]:
    return _paged(database, queries.EXPORT, {})


def _said_by(database: Database, user: str | None, tenant: str | None) -> Iterator[Row[Any]]:
    """Messages of a user or a tenant, some sessions at a time: no index finds a page of them in this order."""
    statement = queries.SESSIONS_OF_TENANT if user is None else queries.SESSIONS_OF_USER
    sessions = [row.session_id for row in database.run(statement, {"user_id": user, "tenant": tenant})]
    for start in range(0, len(sessions), _SESSIONS):
        chosen = sessions[start : start + _SESSIONS]
        yield from _paged(database, queries.EXPORT_OF_SESSIONS, {"session_ids": chosen})


def _paged(database: Database, statement: Statement, given: dict[str, Any]) -> Iterator[Row[Any]]:
    after: tuple[UUID, int] = (UUID(int=0), 0)
    while True:
        bounds = {"after_session": after[0], "after_seq": after[1], "most": _PAGE}
        rows = database.run(statement, {**given, **bounds})
        yield from rows
        if len(rows) < _PAGE:
            return
        after = (rows[-1].session_id, rows[-1].seq)


def _parsed(number: int, text: str, tenant: str | None, result: ImportResult) -> ImportLine | None:
    """The line that `text` is, its `user_id` the user's key; `None`: it is blank, or refused."""
    if not text.strip():
        return None
    if len(text) > MAX_LINE_CHARS:
        result.refuse(number, f"longer than {MAX_LINE_CHARS:,} characters")
        return None
    try:
        line = ImportLine.model_validate(load_object(text))
        return line.model_copy(update={"user_id": user_key(line_tenant(line.tenant, tenant), line.user_id)})
    except InvalidRequest as error:
        result.refuse(number, error.message)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        result.refuse(number, f"{place} {what_is_wrong(fault)}")
    except ValueError as error:
        result.refuse(number, first_line(str(error)))
    return None


def _import_session(
    transaction: Transaction, clock: Clock, agent: str, said: Sequence[tuple[int, ImportLine]], result: ImportResult
) -> None:
    """Add what is new of lines of one session."""
    user_id, name = said[0][1].user_id, said[0][1].session
    times = [line.occurred_at for _, line in said]
    session = {"user_id": user_id, "name": name, "own_id": _as_id(name)}
    span = {"first_at": min(times), "last_at": max(times)}
    transaction.run(queries.KNOW_USER, session)
    transaction.run(queries.OPEN, {**session, **span, "new_id": new_id(clock), "agent": agent})
    held = transaction.run(queries.LOCK, session)[0]
    new = _new(transaction, held.session_id, said, result)
    if not new:
        return
    if not held.imported:
        for number, _ in new:
            result.refuse(number, f"session {name} took place here: nothing can be added to it by a file")
        return
    turns, messages = _turns(clock, [line for _, line in new])
    transaction.run(
        queries.ADD,
        {
            **span,
            "session_id": held.session_id,
            "message_count": held.message_count,
            "last_turn_seq": held.last_turn_seq,
            "messages_added": len(messages),
            "turns_added": len(turns),
            "turns": as_json(turns),
            "messages": as_json(messages),
            "channels": list(dict.fromkeys(line.channel for _, line in new)),
        },
    )
    result.added += len(messages)
    if held.session_id not in result.sessions:
        result.sessions.append(held.session_id)


def _new(
    transaction: Transaction, session_id: UUID, said: Sequence[tuple[int, ImportLine]], result: ImportResult
) -> list[tuple[int, ImportLine]]:
    """The lines that are not there yet; one that is there with another text is bad."""
    given = {"session_id": session_id, "message_ids": [line.message_id for _, line in said]}
    rows = transaction.run(queries.KNOWN, given)
    there = {name: row.content for row in rows for name in (row.message_id, row.place) if name is not None}
    new = []
    for number, line in said:
        content = there.get(line.message_id)
        if content is None:
            there[line.message_id] = line.content
            new.append((number, line))
        elif content == line.content:
            result.known += 1
        else:
            result.refuse(number, f"message_id {line.message_id} is there already, with another text")
    return new


def _turns(clock: Clock, lines: Sequence[ImportLine]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Turns and messages as `exchange.add` takes them: a turn begins where the user speaks after a reply."""
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for position, line in enumerate(lines, start=1):
        if not turns or (line.role == "user" and turns[-1]["reply"] is not None):
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
            turn["steps"] += 1
            turn["reply"] = position
        messages.append(
            {
                **line.model_dump(mode="json", include={"role", "content", "message_id", "channel", "author"}),
                "occurred_at": line.occurred_at.isoformat(),
                "position": position,
                "turn_id": turn["turn_id"],
                "token_count": estimate_tokens(line.content) + _TOKENS_AROUND,
            }
        )
    return turns, messages


def _as_id(name: str) -> UUID | None:
    try:
        return UUID(name)
    except ValueError:
        return None
