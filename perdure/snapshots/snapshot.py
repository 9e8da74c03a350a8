"""`AgentSnapshot`: the state of a session between two steps. A snapshot store saves and loads it.

`codec.dump` converts a snapshot to JSON. The engine recovers a session from its snapshot after a crash, and deletes the
snapshot when the session ends. A snapshot does not contain the user's memories, which outlive sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self
from uuid import UUID

from perdure.models.protocol import Message

SCHEMA_VERSION = 1
"""The schema version that this release writes. This release reads no other version."""

HISTORY_TURNS = 20
"""The number of recent turns whose messages a snapshot contains; the default of `PERDURE_MEMORY__WORKING_TURNS`."""

MAX_VARIABLES_BYTES = 64 * 1024
"""The maximum size of the working variables as JSON. It is small because each change writes all variables."""

LIMIT = 2**53
"""Ticks, tokens and milliseconds are below this limit, so that JSON parsers and Lua represent them exactly."""


class Status(StrEnum):
    """A session's state (`sessions.state`) in capitals. The state `active` becomes `WAITING_FOR_EVENT`."""

    INITIALIZING = "INITIALIZING"
    WAITING_FOR_EVENT = "WAITING_FOR_EVENT"
    THINKING = "THINKING"
    TOOL_EXECUTING = "TOOL_EXECUTING"
    WAITING_APPROVAL = "WAITING_APPROVAL"
    SUMMARIZING = "SUMMARIZING"
    ENDING = "ENDING"
    ENDED = "ENDED"

    @classmethod
    def of(cls, session_state: str) -> Self:
        return cls("WAITING_FOR_EVENT" if session_state == "active" else session_state.upper())


@dataclass(frozen=True, slots=True)
class Event:
    """An event that has arrived and is not processed yet. `payload` is any JSON value.

    In this class and in the classes below, `extra` holds the JSON members that this release does not know.
    """

    source: str
    type: str
    payload: Any
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """The messages of the last turns, and the working variables of the tools."""

    short_term_history: tuple[Message, ...]
    working_variables: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """The state of a session at one tick.

    `agent_id` is the session's id. `tick_index` is the count of the session's committed steps. `timestamp` is in Unix
    milliseconds.
    """

    agent_id: UUID
    tick_index: int
    timestamp: int
    status: Status
    memory: Memory
    event_queue_backup: tuple[Event, ...] = ()
    schema_version: int = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)
