"""Converts snapshots to JSON text and back, for stores, exports and imports.

`parse` reads every document that `dump` writes. A newer release may write members that this release does not know.
`parse` keeps such members, and `dump` writes them back.

`parse` rejects text that is truncated, has an unknown schema version, or contains characters that a database cannot
store. If a member of the document is invalid, the `InvalidRequest` names the member's position, not its value.
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
from perdure.text.untrusted import first_line, load_object, member_path

_UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_Natural = Annotated[int, Field(ge=0, lt=LIMIT)]

Model = TypeVar("Model", bound=BaseModel)


def dump(snapshot: AgentSnapshot, *, indent: int | None = None) -> str:
    """`snapshot` as a JSON document, on one line or indented by `indent` spaces per level.

    Raises:
        InvalidRequest: `snapshot` contains a value that cannot be stored; the message says why.
        TooLarge: the working variables are over `MAX_VARIABLES_BYTES`.
    """
    text = _json(_snapshot_to_dict(snapshot), "The snapshot", indent)
    parse(text, snapshot.agent_id)
    return text


def parse(text: str, expected_agent_id: UUID | None = None) -> AgentSnapshot:
    """Parse `text`; if `expected_agent_id` is given, check that the snapshot has this `agent_id`.

    Raises:
        InvalidRequest: the text is not a snapshot, or has an unknown schema version or another agent's id.
        TooLarge: the working variables are over `MAX_VARIABLES_BYTES`.
    """
    model = _read_model(text)
    if expected_agent_id is not None and model.agent_id != str(expected_agent_id):
        raise InvalidRequest(f"The snapshot is of the agent {model.agent_id}, not of {expected_agent_id}.")
    _require_room(model.memory.working_variables)
    return _domain(model)


def checked_variables(variables: object) -> dict[str, Any]:
    """A copy of `variables` after a round trip through JSON.

    For example, tuples become lists, and numeric keys become text. A turn that resumes after a crash reads such values.
    The engine uses the copy in every turn, so a turn without a crash reads the same values.

    Raises:
        InvalidRequest: `variables` are not a JSON object, or contain a value that cannot be stored.
        TooLarge: `variables` are over `MAX_VARIABLES_BYTES`.
    """
    given = dict(variables) if isinstance(variables, Mapping) else variables
    made = _checked({"memory": {"working_variables": given}}, "The working variables")
    copied = made["memory"]["working_variables"]
    if not isinstance(copied, dict):
        raise InvalidRequest("The working variables must be a JSON object.")
    _require_room(copied)
    return copied


def checked_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Check `events`, and convert them to the JSON records of a snapshot.

    Raises:
        InvalidRequest: an event contains a value that cannot be stored.
    """
    records: list[dict[str, Any]] = _checked(
        {"event_queue_backup": [_event_to_dict(each) for each in events]}, "The pending events"
    )["event_queue_backup"]
    for record in records:
        _valid(_EventModel, record)
    return records


def events_of(records: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """Convert the records of `checked_events` back to events.

    Raises:
        InvalidRequest: a record is invalid.
    """
    return tuple(_event(_valid(_EventModel, record)) for record in records)


class _StrictModel(BaseModel):
    """Checks the types of known members strictly. Keeps unknown members, which a newer release wrote."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def unknown(self) -> dict[str, Any]:
        return self.model_extra or {}


class _CallModel(_StrictModel):
    id: str
    name: str
    arguments: str


class _MessageModel(_StrictModel):
    role: Literal["user", "assistant", "tool"]
    content: str
    tool_calls: list[_CallModel] = []
    tool_call_id: str | None = None


class _MemoryModel(_StrictModel):
    short_term_history: list[_MessageModel]
    working_variables: dict[str, Any]


class _EventModel(_StrictModel):
    source: str
    type: str
    payload: Any


class _SnapshotModel(_StrictModel):
    """The schema of a snapshot's JSON document."""

    schema_version: Literal[1]
    agent_id: Annotated[str, Field(pattern=_UUID)]
    tick_index: _Natural
    timestamp: _Natural
    status: Annotated[Status, Strict(False)]  # noqa: FBT003 (pydantic's API)
    memory: _MemoryModel
    event_queue_backup: list[_EventModel]


def _read_model(text: str) -> _SnapshotModel:
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
    return _valid(_SnapshotModel, document)


def _valid(kind: type[Model], document: Any) -> Model:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = member_path(fault) or "the document"
        message = fault["msg"][:1].lower() + fault["msg"][1:]
        raise InvalidRequest(f"The snapshot is not valid: {where}: {message}.") from error


def _domain(model: _SnapshotModel) -> AgentSnapshot:
    return AgentSnapshot(
        agent_id=UUID(model.agent_id),
        tick_index=model.tick_index,
        timestamp=model.timestamp,
        status=model.status,
        memory=Memory(
            tuple(_message(record) for record in model.memory.short_term_history),
            model.memory.working_variables,
            model.memory.unknown,
        ),
        event_queue_backup=tuple(_event(event) for event in model.event_queue_backup),
        schema_version=model.schema_version,
        extra=model.unknown,
    )


def _message(record: _MessageModel) -> Message:
    calls = tuple(ToolCall(call.id, call.name, call.arguments, call.unknown) for call in record.tool_calls)
    return Message(Role(record.role), record.content, calls, record.tool_call_id, extra=record.unknown)


def _event(event: _EventModel) -> Event:
    return Event(event.source, event.type, event.payload, event.unknown)


def _snapshot_to_dict(snapshot: AgentSnapshot) -> dict[str, Any]:
    return {
        **snapshot.extra,
        "schema_version": snapshot.schema_version,
        "agent_id": str(snapshot.agent_id),
        "tick_index": snapshot.tick_index,
        "timestamp": snapshot.timestamp,
        "status": snapshot.status,
        "memory": {
            **snapshot.memory.extra,
            "short_term_history": [_message_to_dict(message) for message in snapshot.memory.short_term_history],
            "working_variables": dict(snapshot.memory.working_variables),
        },
        "event_queue_backup": [_event_to_dict(event) for event in snapshot.event_queue_backup],
    }


def _message_to_dict(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {**message.extra, "role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [call.to_dict() for call in message.tool_calls]
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    return record


def _event_to_dict(event: Event) -> dict[str, Any]:
    return {**event.extra, "source": event.source, "type": event.type, "payload": event.payload}


def _checked(part: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A copy of `part` after a round trip through JSON. `part` is a snapshot's document with only some of the members.

    A value has the same depth in `part` as in the whole document, so the limit on nesting has the same effect.
    """
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
            "Store large values elsewhere, and keep only their location here."
        )
