"""Forks: copies of a session as it was at an earlier tick (the number of steps that the session has committed).

A fork contains the turns that were settled at or before the tick, their messages, and the working variables as the last
of these turns left them. A message reaches a fork only by the fork's session id, never by routing.

Tool effects, deliveries, inbox rows and the summary are not copied. The running summary is copied, unless it covers
later turns. The copied turns are settled, so no worker runs or delivers them again. Settled turns never change.
Therefore the list of turns that `PLAN_FORK` reads is still valid when `FORK` copies the turns, although no lock is held
in between.
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


def fork(
    executor: Executor, clock: Clock, session_id: UUID, tick: int | None = None, *, most_open: int | None = None
) -> UUID:
    """Copy a session up to the last turn that was settled at or before `tick`; returns the copy's id.

    If `tick` is `None`, copies all settled turns. The fork of an ended session has no working variables, because the
    end of a session deletes them. `most_open` limits the user's forks that have not ended; `None` is no limit.

    Raises:
        InvalidRequest: `tick` is negative.
        NotFound: there is no such session.
        Conflict: the session has not reached `tick`, or had no settled turn at that tick, or is no conversation, or the
            user has `most_open` open forks.
    """
    if tick is not None and tick < 0:
        raise InvalidRequest("tick: must be a whole number from 0.")
    reachable = None if tick is None else min(tick, _MAX_BIGINT)
    rows = executor.run(queries.PLAN_FORK, {"session_id": session_id, "tick": reachable})
    if not rows:
        raise NotFound("There is no such session.")
    if rows[0].answers_call:
        raise Conflict("An agent answers a call of another in that session. Only conversations are forked.")
    if most_open is not None and rows[0].open_forks >= most_open:
        raise Conflict(
            f"The user has {rows[0].open_forks} open forks; at most {most_open} are accepted "
            "(PERDURE_GUARD__OPEN_FORKS). End a fork first."
        )
    turn_ids = _planned(rows[0], tick)
    fork_id = new_id(clock)
    made = {"session_id": session_id, "fork_id": fork_id, "turn_ids": turn_ids}
    if not executor.run(queries.FORK, {**made, "new_turn_ids": [new_id(clock) for _ in turn_ids]}):
        raise NotFound("There is no such session.")  # the session was erased between the two statements
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
