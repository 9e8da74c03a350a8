"""Forks: copies of a session as it was at an earlier tick.

A fork copies the conversation through the last turn that was settled at or before a tick, and the working variables of
that tick. A fork receives messages by its id only, never by routing.

Tool effects, deliveries, message ids and the summary stay with the source. The copied turns are settled, so none runs
or is delivered again. Settled turns never change, so the plan that `PLAN_FORK` reads is still valid when `FORK`
copies the turns, without a lock in between.
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
    """Copy a session up to and including its last turn settled at or before `tick`. Returns the copy's id.

    By default, copies the whole session as it is now. The fork of an ended session has no working variables, because
    they are deleted when the session ends.

    Raises:
        InvalidRequest: `tick` is negative.
        NotFound: there is no such session.
        Conflict: the session has not reached `tick`, or had no settled turn at that tick.
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
        raise NotFound("There is no such session.")  # erased between the two statements
    return fork_id


def _planned(row: Row[Any], tick: int | None) -> list[UUID]:
    if tick is not None and tick > row.tick:
        raise Conflict(f"The session has not reached tick {tick}: it is at tick {row.tick}.")
    if row.turn_ids:
        turn_ids: list[UUID] = row.turn_ids
        return turn_ids
    if row.first_tick is None:
        raise Conflict("The session has no settled turn yet, so there is nothing to copy.")
    raise Conflict(f"The session had no settled turn at tick {tick}; the first was settled at tick {row.first_tick}.")
