"""What an agent is in the middle of: `AgentSnapshot`, the contract between the engine and the stores.

The engine makes it, a store keeps it, and neither knows more of the other. Its keys, in JSON,
are those that `dump` in `codec` writes. State is not memory: a snapshot is there to survive a
crash and is gone when its session has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self
from uuid import UUID

from perdure.models.protocol import Message

SCHEMA_VERSION = 1
"""Of the JSON that this release writes, and the only one that it reads."""

HISTORY_TURNS = 20
"""Turns, the newest ones, whose messages a snapshot holds: the default of `PERDURE_MEMORY__WORKING_TURNS`."""

MAX_VARIABLES_BYTES = 64 * 1024
"""Bytes of the working variables as JSON. They are written anew with each change."""

LIMIT = 2**53
"""Ticks, tokens and milliseconds stay below it: exact in every reader of JSON, in Lua as well."""


class Status(StrEnum):
    """A session's state in capitals; an active one waits for its next event."""

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
        """The status of a session in `session_state`, as the table of sessions spells it."""
        return cls("WAITING_FOR_EVENT" if session_state == "active" else session_state.upper())


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has arrived and is not worked on yet. `payload` is any JSON value.

    `extra`, here and below, holds the members that this release does not know.
    """

    source: str
    type: str
    payload: Any
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the agent has in mind: the last turns' messages, and the variables that its tools keep."""

    short_term_history: tuple[Message, ...]
    working_variables: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """One agent at one tick. `agent_id` is its session's id, `timestamp` Unix milliseconds."""

    agent_id: UUID
    tick_index: int
    timestamp: int
    status: Status
    memory: Memory
    event_queue_backup: tuple[Event, ...] = ()
    schema_version: int = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)
