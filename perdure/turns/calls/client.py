"""What a turn asks of the client of a request: to run calls of the tools that the client brought, or to ask the user.

A turn that waits for them has come to a *stop*. Each request sees the part of a turn from one stop to the next (an
*exchange*): the first request from the beginning, and the request that brings the results from the stop that they
answer. So a repeated request gets the same answer, however far the turn has come.

Results are brought as those of any call that someone outside runs (`outside`): the first one of a call counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.engine import Executor, as_json
from perdure.runtime import AcceptingRuntime
from perdure.text.untrusted import load_object
from perdure.tools.awaited.port import TaskEnded
from perdure.turns.additions import Additions
from perdure.turns.calls import awaited, queries

WENT_ON = "The client went on without a result."


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A call that the client runs. `arguments` is the model's text.

    `is_begun` is false while the reply waits for a person, who may deny the call.
    """

    effect_id: UUID
    tool: str
    arguments: str
    position: int
    is_begun: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """A message at which a turn waits, or has waited, for the client. `number` counts the turn's messages from 1.

    `question` is what the user is asked. `is_open`: a call has no result yet, or the question no answer. `is_begun`: a
    call or the question has begun, so that the turn stops here.
    """

    number: int
    calls: tuple[ClientCall, ...]
    question: str | None
    is_begun: bool
    is_open: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """The part of a turn that one request sees: the messages after the first `after`, up to the next stop.

    `may_join`: the request's message may yet join the turn that runs (see `joined`).
    """

    turn_id: UUID
    after: int = 0
    may_join: bool = False


def read_stops(executor: Executor, turn_id: UUID) -> list[Stop]:
    """The stops of a turn, in order."""
    rows = executor.run(queries.STOPS, {"turn_id": turn_id})
    return [_stop(number, list(each)) for number, each in groupby(rows, key=lambda row: row.number)]


def stop_of(stops: Sequence[Stop], exchange: Exchange, status: str) -> Stop | None:
    """The stop that ends an exchange, if the turn has come to it; `status` is the turn's.

    A question whose answer did not fit is asked again at the same stop.
    """
    for each in stops:
        if each.is_begun and (each.number > exchange.after or (each.number == exchange.after and each.is_open)):
            return None if each.is_open and status != "parked" else each
    return None


def joined(executor: Executor, exchange: Exchange, turn_id: UUID) -> Exchange:
    """The exchange in the turn `turn_id`, if its message has joined this turn: after the last stop before the message.

    The exchange itself if it has its own turn.
    """
    if turn_id == exchange.turn_id:
        return exchange
    rows = executor.run(queries.STOP_BEFORE, {"turn_id": exchange.turn_id})
    return Exchange(turn_id, max(exchange.after, rows[0].number if rows else 0))


def used_in(executor: Executor, exchange: Exchange, stop: Stop | None) -> dict[str, Any]:
    """The tokens of an exchange that ends with `stop`, or with the turn.

    If no model's server reported them, those of the exchange's messages, `estimated`.
    """
    given = {"turn_id": exchange.turn_id, "after": exchange.after, "until": None if stop is None else stop.number}
    return dict(executor.run(queries.USED_BETWEEN, given)[0].used)


def read_additions(executor: Executor, turn_id: UUID) -> Additions:
    """What a turn's client adds to the agent.

    Raises:
        SettingsError, LookupError, TypeError: this release cannot read it.
    """
    rows = executor.run(queries.ADDITIONS, {"turn_id": turn_id})
    return Additions.from_dict(rows[0].additions if rows else None)


def find_calls(executor: Executor, user: UserKey, effect_ids: Sequence[UUID]) -> dict[UUID, Row[Any]]:
    """The calls with these ids, of turns of `user`, that a client runs."""
    rows = executor.run(queries.CLIENT_CALLS, {"effect_ids": list(effect_ids)}) if effect_ids else ()
    return {row.effect_id: row for row in rows if row.user_id == user}


def bring(runtime: AcceptingRuntime, calls: Sequence[Row[Any]], results: Mapping[UUID, str], added: Additions) -> None:
    """Record the results of `calls`, all of one turn. A call without a result failed: the client went on without it.

    `added` replaces what the turn's client added to the agent before, unless all calls have their results.

    Raises:
        Unavailable: the database cannot be reached. The same results may be brought again.
    """
    waiting = [row for row in calls if row.is_open]
    if not waiting:
        return
    turn_id = waiting[0].turn_id
    additions = added.after(read_additions(runtime.database, turn_id)).to_dict()
    given = {"turn_id": turn_id, "additions": None if additions is None else as_json(additions)}
    with runtime.database.transaction("turns.set_additions") as transaction:
        transaction.run(queries.SET_ADDITIONS, given)
        if not added.remember:
            transaction.run(queries.FORGET_TURN, {"turn_id": turn_id})
    for row in waiting:
        result = results.get(row.effect_id)
        ended = TaskEnded(failed=result is None, value=WENT_ON if result is None else result)
        awaited.record(runtime.database, runtime.wake, runtime.agents, row.effect_id, ended)


def _stop(number: int, rows: Sequence[Row[Any]]) -> Stop:
    calls = tuple(
        ClientCall(row.effect_id, row.tool, row.arguments, row.position, row.is_begun)
        for row in rows
        if row.waits_for == "client"
    )
    asked = [row for row in rows if row.waits_for == "user"]
    present = next((row for row in asked if row.is_open), asked[0] if asked else None)
    question = None if present is None else _question(present)
    return Stop(number, calls, question, any(row.is_begun for row in rows), any(row.is_open for row in rows))


def _question(row: Row[Any]) -> str:
    problem = row.problem if row.is_open else None
    return "\n".join(each for each in (problem, load_object(row.arguments).get("question", "")) if each)
