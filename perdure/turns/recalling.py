"""Recall and an agent's own memory, with the parts of a process: what briefing, tools, routes and commands share."""

from __future__ import annotations

from uuid import UUID

from perdure.memory.own import Means, OwnMemory
from perdure.memory.recall import Recall
from perdure.runtime import Runtime
from perdure.turns.lease import TurnRef


def recall_of(runtime: Runtime) -> Recall:
    """How this process recalls."""
    return Recall(runtime.database, runtime.embedder, runtime.settings.memory, runtime.clock, runtime.settings.timezone)


def own_memory(runtime: Runtime, session_id: UUID, turn: TurnRef, effect_id: UUID) -> OwnMemory:
    """The memory of the user of `turn`, for one call of a tool."""
    settings = runtime.settings
    means = Means(recall_of(runtime), settings.consolidation, settings.memory.recall_timeout_s)
    return OwnMemory(means, turn.user_id, session_id, turn.turn_id, effect_id, turn.channel)
