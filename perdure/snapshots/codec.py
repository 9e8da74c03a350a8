"""Snapshots as JSON text and back, strictly: what cannot be read back is not written.

Members that this release does not know are no fault: a newer release wrote them. They are kept, and written back.

Stores, exports and imports all come through here. A text that was cut off, is of another
schema, of another agent, or holds what a database cannot store is refused with the reason,
as `InvalidRequest`; where in the document the fault lies is said, what stands there is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from perdure.errors import InvalidRequest, TooLarge
from perdure.models.protocol import Message, Role, ToolCall
from perdure.snapshots.snapshot import (
    LIMIT,
    MAX_VARIABLES_BYTES,
    SCHEMA_VERSION,
    AgentSnapshot,
    Event,
    Memory,
    Status,
)
from perdure.text.untrusted import first_line, load_object

_UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_Natural = Annotated[int, Field(ge=0, lt=LIMIT)]

Wire = TypeVar("Wire", bound=BaseModel)


def dump(snapshot: AgentSnapshot, *, indent: int | None = None) -> str:
    """`snapshot` as one JSON document, on one line unless `indent` (spaces) is given.

    Raises:
        InvalidRequest: it holds what has no place in a snapshot; the message says what.
        TooLarge: the working variables are over `MAX_VARIABLES_BYTES`.
    """
    text = _json(_record(snapshot), "The snapshot", indent)
    parse(text, snapshot.agent_id)
    return text


def parse(text: str, expected_agent_id: UUID | None = None) -> AgentSnapshot:
    """The snapshot that `text` is; of the agent `expected_agent_id`, where one is given.

    Raises:
        InvalidRequest: it is no snapshot, of an unknown schema version, or of another agent.
        TooLarge: its working variables are over `MAX_VARIABLES_BYTES`.
    """
    wire = _wire(text)
    if expected_agent_id is not None and wire.agent_id != str(expected_agent_id):
        raise InvalidRequest(f"The snapshot is of the agent {wire.agent_id}, not of {expected_agent_id}.")
    _require_room(wire.memory.working_variables)
    return _domain(wire)


def checked_variables(variables: object) -> dict[str, Any]:
    """`variables` as a snapshot gives them back: a copy of what their JSON says.

    Whoever sets variables keeps this copy, so that they are the same before a crash and after
    it: a tuple is a list at once, a key that is a number is text.

    Raises:
        InvalidRequest: they are no JSON object, or hold what cannot be stored; the message says what.
        TooLarge: they are over `MAX_VARIABLES_BYTES`.
    """
    given = dict(variables) if isinstance(variables, Mapping) else variables
    made = _checked({"memory": {"working_variables": given}}, "The working variables")
    found = made["memory"]["working_variables"]
    if not isinstance(found, dict):
        raise InvalidRequest("The working variables must be a JSON object.")
    _require_room(found)
    return found


def checked_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """`events` as records that a snapshot can hold.

    Raises:
        InvalidRequest: one holds what cannot be stored; the message says what.
    """
    records: list[dict[str, Any]] = _checked(
        {"event_queue_backup": [_event_record(each) for each in events]}, "The pending events"
    )["event_queue_backup"]
    for record in records:
        _valid(_Event, record)
    return records


def events_of(records: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events that `records`, as `checked_events` makes them, stand for.

    Raises:
        InvalidRequest: they are no such records.
    """
    return tuple(_event(_valid(_Event, record)) for record in records)


class _Strict(BaseModel):
    """Strict in what it knows. What it does not know, a newer release wrote: that is kept."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def unknown(self) -> dict[str, Any]:
        """The members that this release does not know."""
        return self.model_extra or {}


class _Call(_Strict):
    id: str
    name: str
    arguments: str


class _Said(_Strict):
    role: Literal["user", "assistant", "tool"]
    content: str
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None


class _Memory(_Strict):
    short_term_history: list[_Said]
    working_variables: dict[str, Any]


class _Event(_Strict):
    source: str
    type: str
    payload: Any


class _Snapshot(_Strict):
    """The document, key by key."""

    schema_version: Literal[1]
    agent_id: Annotated[str, Field(pattern=_UUID)]
    tick_index: _Natural
    timestamp: _Natural
    status: Annotated[Status, Strict(False)]  # noqa: FBT003 (pydantic's name for: text will do)
    memory: _Memory
    event_queue_backup: list[_Event]


def _wire(text: str) -> _Snapshot:
    if not text.strip():
        raise InvalidRequest("The snapshot cannot be read: it is empty.")
    try:
        document = load_object(text)
    except ValueError as error:
        raise InvalidRequest(f"The snapshot cannot be read: {error}.") from error
    version = document.get("schema_version")
    if "schema_version" in document and (version is True or version != SCHEMA_VERSION):
        raise InvalidRequest(
            f"The snapshot is of schema version {first_line(repr(version), 40)}; "
            f"this release reads version {SCHEMA_VERSION}."
        )
    return _valid(_Snapshot, document)


def _valid(kind: type[Wire], document: Any) -> Wire:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the document"
        message = fault["msg"][:1].lower() + fault["msg"][1:]
        raise InvalidRequest(f"The snapshot is not valid: {first_line(where, 200)}: {message}.") from error


def _domain(wire: _Snapshot) -> AgentSnapshot:
    return AgentSnapshot(
        agent_id=UUID(wire.agent_id),
        tick_index=wire.tick_index,
        timestamp=wire.timestamp,
        status=wire.status,
        memory=Memory(
            tuple(_message(said) for said in wire.memory.short_term_history),
            wire.memory.working_variables,
            wire.memory.unknown,
        ),
        event_queue_backup=tuple(_event(event) for event in wire.event_queue_backup),
        schema_version=wire.schema_version,
        extra=wire.unknown,
    )


def _message(said: _Said) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments, call.unknown) for call in said.tool_calls)
    return Message(Role(said.role), said.content, calls, said.tool_call_id, said.unknown)


def _event(event: _Event) -> Event:
    return Event(event.source, event.type, event.payload, event.unknown)


def _record(snapshot: AgentSnapshot) -> dict[str, Any]:
    return {
        **snapshot.extra,
        "schema_version": snapshot.schema_version,
        "agent_id": str(snapshot.agent_id),
        "tick_index": snapshot.tick_index,
        "timestamp": snapshot.timestamp,
        "status": snapshot.status,
        "memory": {
            **snapshot.memory.extra,
            "short_term_history": [_message_record(message) for message in snapshot.memory.short_term_history],
            "working_variables": dict(snapshot.memory.working_variables),
        },
        "event_queue_backup": [_event_record(event) for event in snapshot.event_queue_backup],
    }


def _message_record(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {**message.extra, "role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [call.record() for call in message.tool_calls]
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    return record


def _event_record(event: Event) -> dict[str, Any]:
    return {**event.extra, "source": event.source, "type": event.type, "payload": event.payload}


def _checked(part: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`part` of a snapshot as its JSON reads, no deeper than it may be at its place there."""
    try:
        return load_object(_json(part, what))
    except ValueError as error:
        raise InvalidRequest(f"{what} cannot be stored: {error}.") from error


def _json(value: Any, what: str, indent: int | None = None) -> str:
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators, indent=indent)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be stored: {first_line(str(error))}.") from error


def _require_room(variables: Mapping[str, Any]) -> None:
    size = len(_json(variables, "The working variables").encode())
    if size > MAX_VARIABLES_BYTES:
        raise TooLarge(
            f"The working variables take {size:,} bytes as JSON; at most {MAX_VARIABLES_BYTES:,} may be kept. "
            "Keep what is large elsewhere, and here where it is."
        )
