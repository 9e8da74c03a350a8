"""Forks: a session goes on a second time from where it once stood.

A fork copies the conversation through the last turn that was settled at or before a tick, with
the working variables as they were then, and shares nothing later with its source. It is reached
by its id only, never by routing.

What was done once stays with the source: its tool effects, what was delivered, the ids of
accepted messages, its summary. The copied turns are settled, so nothing of them runs or is
delivered again. What is settled is never written again either; so the plan that one
statement reads is as true for the next one, which copies and commits, whatever the source does
meanwhile: no lock is held.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.clock import Clock
from perdure.database.engine import Executor
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.ids import new_id
from perdure.sessions import queries

_MAX_BIGINT = 2**63 - 1


def fork(executor: Executor, clock: Clock, session_id: UUID, tick: int | None = None) -> UUID:
    """Copy a session through its last turn settled at or before `tick` (default: now); the new session's id.

    A session that has ended may be forked; its variables are gone.

    Raises:
        InvalidRequest: a tick is never below 0.
        NotFound: there is no such session.
        Conflict: it has not come to that tick, or had settled nothing by then.
    """
    if tick is not None and tick < 0:
        raise InvalidRequest("tick: must be a whole number from 0.")
    reachable = None if tick is None else min(tick, _MAX_BIGINT)
    rows = executor.run(queries.PLAN_FORK, {"session_id": session_id, "tick": reachable})
    if not rows:
        raise NotFound("There is no such session.")
    turn_ids = _planned(rows[0], tick)
    fork_id = new_id(clock)
    made = {"session_id": session_id, "fork_id": fork_id, "turn_ids": turn_ids}
    if not executor.run(queries.FORK, {**made, "new_turn_ids": [new_id(clock) for _ in turn_ids]}):
        raise NotFound("There is no such session.")  # erased at this moment
    return fork_id


def _planned(row: Row[Any], tick: int | None) -> list[UUID]:
    if tick is not None and tick > row.tick:
        raise Conflict(f"The session has not come to tick {tick}: it is at tick {row.tick}.")
    if row.turn_ids:
        turn_ids: list[UUID] = row.turn_ids
        return turn_ids
    if row.first_tick is None:
        raise Conflict("The session has settled no turn yet, so there is nothing to copy.")
    raise Conflict(f"The session had settled no turn at tick {tick}; the first was settled at tick {row.first_tick}.")
