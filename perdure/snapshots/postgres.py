"""Snapshots in PostgreSQL.

The table `snapshots` holds the working variables. `load` assembles the rest of a snapshot: the history from the
transcript's last turns, the pending events from the session's queue, and the tick and status from the session's row.
The table also holds events that were passed to `save`; `load` ignores them after the session's next commit.

The engine does not call `save`. Instead, the statement that commits a step also writes the working variables
(`queries.WITH_STEP`). The engine uses this statement with every snapshot store, so PostgreSQL still has the variables
if another store loses a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from perdure.database.engine import Database, Executor, as_json
from perdure.errors import InvalidRequest, NotFound, TooLarge, Unavailable
from perdure.models.protocol import Message, Role, ToolCall
from perdure.snapshots import pending, queries
from perdure.snapshots.codec import checked_events, checked_variables, events_of
from perdure.snapshots.snapshot import HISTORY_TURNS, AgentSnapshot, Event, Memory, Status
from perdure.snapshots.store import (
    SnapshotUnavailable,
    Stored,
    Version,
    refuse_stale,
    report_set_aside,
    version_of,
)
from perdure.text.untrusted import first_line, load_object

_READ_ONLY = "25006"
_OUT_OF_RESOURCES = "53"
"""The class of SQLSTATE codes for insufficient resources: a full disk, full memory or too many connections."""


class PostgresSnapshots:
    """The snapshots in the engine's own database."""

    name = "postgres"

    def __init__(self, database: Database, history_turns: int = HISTORY_TURNS) -> None:
        self._database = database
        self._history_turns = history_turns

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        """Store the variables and events of `snapshot`; see `SnapshotStore.save`.

        Raises:
            NotFound: there is no such session.
        """
        offered = version_of(snapshot, token)
        session_id = snapshot.agent_id
        parameters = {
            "session_id": session_id,
            "variables": as_json(checked_variables(snapshot.memory.working_variables)),
            "events": as_json(checked_events(snapshot.event_queue_backup)),
            "token": offered.token,
            "tick": offered.tick,
            "timestamp": snapshot.timestamp,
        }
        with _mapped_errors(), self._database.transaction("snapshots.save") as transaction:
            refuse_stale(session_id, offered, _committed(transaction, session_id))
            kept = transaction.run(queries.KEPT, {"session_id": session_id})
            refuse_stale(session_id, offered, _version(kept[0]) if kept else None)
            transaction.run(queries.SAVE, parameters)

    def load(self, agent_id: UUID) -> Stored | None:
        while rows := self._run(queries.LOAD, session_id=agent_id, history_turns=self._history_turns):
            try:
                return assemble(agent_id, rows[0])
            except InvalidRequest as error:
                self._move(agent_id, error.message, _unchanged(rows[0]))
        return None

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """See `SnapshotStore.set_aside`; marks the row."""
        self._move(agent_id, reason, lambda kept: _version(kept) <= upto)

    def delete(self, agent_id: UUID) -> None:
        self._run(queries.DELETE, session_id=agent_id)

    def close(self) -> None:
        """Nothing to close: the engine owns the database."""

    def _move(self, session_id: UUID, reason: str, wanted: Callable[[Row[Any]], bool]) -> None:
        """Mark the session's newest row as set aside, if there is a row and `wanted` returns True for it."""
        parameters = {"session_id": session_id}
        with _mapped_errors(), self._database.transaction("snapshots.set_aside") as transaction:
            transaction.run(queries.LOCK_SESSION, parameters)
            kept = transaction.run(queries.KEPT, parameters)
            if not (kept and wanted(kept[0])):
                return
            transaction.run(queries.FORGET_SET_ASIDE, parameters)
            transaction.run(queries.SET_ASIDE, {**parameters, "tick": kept[0].tick})
        report_set_aside(self.name, session_id, "its row with set_aside", reason)

    def _run(self, statement: Any, **parameters: Any) -> Any:
        with _mapped_errors():
            return self._database.run(statement, parameters)


def _committed(executor: Executor, session_id: UUID) -> Version:
    """Lock the session; returns the version of its last commit."""
    rows = executor.run(queries.LOCK_SESSION, {"session_id": session_id})
    if not rows:
        raise NotFound("There is no such session.")
    return _version(rows[0])


def _version(row: Row[Any]) -> Version:
    return Version(row.token, row.tick)


def _unchanged(damaged: Row[Any]) -> Callable[[Row[Any]], bool]:
    return lambda kept: (kept.variables, kept.events) == (damaged.variables, damaged.events)


def assemble(session_id: UUID, row: Row[Any]) -> Stored:
    """Convert a row of `queries.LOAD` or `queries.PRESENT` to a snapshot.

    Raises:
        InvalidRequest: the stored variables or events are damaged.
    """
    try:
        kept = load_object(f'{{"variables":{row.variables},"events":{row.events}}}')
        memory = Memory(tuple(_message(said) for said in row.history), checked_variables(kept["variables"]))
        events = kept["events"]
    except (ValueError, TooLarge) as error:
        raise InvalidRequest(f"The snapshot cannot be read: {error}.") from error
    if not isinstance(events, list):
        raise InvalidRequest("The snapshot cannot be read: its events are not a list.")
    snapshot = AgentSnapshot(
        agent_id=session_id,
        tick_index=row.tick,
        timestamp=row.timestamp,
        status=Status.of(row.state),
        memory=memory,
        event_queue_backup=_events(events, row),
    )
    return Stored(snapshot, row.token)


def _events(saved: list[dict[str, Any]], row: Row[Any]) -> tuple[Event, ...]:
    """The events of the session's queue.

    If the session has not committed since `saved` was written, the saved events come first.
    """
    kept = () if row.committed_since else events_of(saved)
    return (*kept, *(event for event in pending.events(row.pending) if event not in kept))


def _message(said: dict[str, Any]) -> Message:
    calls = tuple(ToolCall.from_dict(call) for call in said["tool_calls"] or ())
    return Message(Role(said["role"]), said["content"], calls, said["tool_call_id"])


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        cause = error.__cause__
        if isinstance(cause, DBAPIError) and _code(cause) == _READ_ONLY:
            raise SnapshotUnavailable(
                "postgres", "the database is read-only", "PERDURE_DATABASE_URL must name the primary server."
            ) from error
        raise SnapshotUnavailable("postgres", _cause(error), "Check the database server.") from error


def _cause(error: Unavailable) -> str:
    """PostgreSQL's own message if PostgreSQL lacks a resource, otherwise the message of `error`."""
    cause = error.__cause__
    code = _code(cause) if isinstance(cause, DBAPIError) else ""
    if isinstance(cause, DBAPIError) and code.startswith(_OUT_OF_RESOURCES):
        return first_line(str(cause.orig))
    return error.message[:1].lower() + error.message[1:].rstrip(".")


def _code(error: DBAPIError) -> str:
    return getattr(error.orig, "pgcode", None) or ""
