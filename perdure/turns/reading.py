"""Reading turns in the form of the API, and waiting until a turn is settled.

A process in which callers wait looks for settled turns in rounds. Each round runs one small statement, however many
callers wait. Workers announce settled turns through Redis, and an announcement begins a round at once. Without Redis,
rounds are more frequent.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, decider_of
from perdure.clock import iso
from perdure.database.bodies import body
from perdure.database.engine import Database, Executor
from perdure.errors import BudgetExhausted, NotFound, TurnCancelled, Unavailable, loggable
from perdure.models.endings import LENGTH
from perdure.sessions.routing import conversation_of
from perdure.text.untrusted import load_object
from perdure.turns import queries
from perdure.turns.inbox import route_queries

log = logging.getLogger(__name__)

SETTLED = frozenset({"done", "failed", "cancelled"})

DELAYED = "The answer is delayed: no model is available at present. The answer is sent as soon as one is."
"""The message of a turn that is parked until a model may answer."""

OVER_BUDGET = "The answer is delayed: it would exceed a budget. The answer is sent as soon as the budget allows it."
"""The message of a turn that is parked until a budget allows its next model call."""

_WAITS = "The answer waits for {name}, until {until} at the latest."
"""The message of a turn that is parked until a task ends, a client brings a result or a time comes."""

_UNROUTED_STATUS = {None: "accepted", TurnCancelled.code: "cancelled"}
_ROUND_S = 0.05
_ROUND_IF_NOTIFIED_S = 0.5
_ANNOUNCED = 100


def read_turn(executor: Executor, turn_id: UUID) -> dict[str, Any]:
    """The body of `GET /v1/turns/{id}`.

    Raises:
        NotFound: there is no such turn.
    """
    given = {"turn_id": turn_id}
    if rows := executor.run(queries.READ, given):
        return _whole_body(executor, rows[0])
    if unrouted := executor.run(route_queries.READ, given):
        return _unrouted_body(executor, unrouted[0])
    rows = executor.run(queries.READ, given)  # again: the message may have been routed between the two statements
    if not rows:
        raise NotFound("There is no such turn.")
    return _whole_body(executor, rows[0])


def _unrouted_body(executor: Executor, row: Row[Any]) -> dict[str, Any]:
    """The body for a message that is not routed yet, was refused, or joined the turn of an earlier message."""
    if row.routed_to is not None:
        return read_turn(executor, row.routed_to)
    error = _error(row)
    return {
        "turn_id": str(row.turn_id),
        "session_id": None,
        "seq": None,
        "status": _UNROUTED_STATUS.get(row.error_code, "failed"),
        "attempts": 0,
        "resumed": None,
        "steps": 0,
        "reply": None if error is None else {"text": error["message"], "format": "text"},
        "error": error,
        "delayed": None,
        "waiting_for": None,
        "usage": None,
        "pending_approvals": [],
        "pending_calls": [],
        "decisions": [],
        "accepted_at": iso(row.accepted_at),
        "started_at": None,
        "settled_at": iso(row.settled_at),
        **_metadata(row.message.get("metadata")),
    }


def owner(executor: Executor, turn_id: UUID) -> UserKey:
    """The key of the turn's user.

    Raises:
        NotFound: there is no such turn.
    """
    found = find_owner(executor, turn_id)
    if found is None:
        raise NotFound("There is no such turn.")
    return found[0]


def find_owner(executor: Executor, turn_id: UUID) -> tuple[UserKey, bool] | None:
    """The key of the turn's user, and whether the turn's message is routed; `None` if there is no such turn."""
    given = {"turn_id": turn_id}
    # The third statement repeats the first, because the message may be routed between the first two statements.
    for statement in (queries.OWNER, route_queries.READ, queries.OWNER):
        if rows := executor.run(statement, given):
            return UserKey(rows[0].user_id), statement is queries.OWNER
    return None


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """The user's key, the agent and the conversation of a turn."""

    user: UserKey
    agent: str
    conversation: str | None


def read_place(executor: Executor, turn_id: UUID) -> TurnPlace:
    """The user, the agent and the conversation of a turn.

    Raises:
        NotFound: there is no such turn.
    """
    rows = executor.run(queries.PLACE, {"turn_id": turn_id})
    if not rows:
        raise NotFound("There is no such turn.")
    return TurnPlace(UserKey(rows[0].user_id), rows[0].agent, conversation_of(rows[0].scope))


def list_turns(
    executor: Executor,
    *,
    user: UserKey | None = None,
    tenant: str | None = None,
    session_id: UUID | None = None,
    status: str | None = None,
    limit: int = 100,
) -> list[dict[str, Any]]:
    """The turns that match all filters, newest first; `user` is a user's key."""
    if session_id is not None:
        statement = queries.LIST_OF_SESSION
    elif user is not None:
        statement = queries.LIST_OF_USER
    elif tenant is not None:
        statement = queries.LIST_OF_TENANT
    elif status in ("failed", "cancelled"):
        statement = queries.LIST_ERRORS
    elif status is not None and status not in SETTLED:
        statement = queries.LIST_UNSETTLED
    else:
        statement = queries.LIST
    given = {"user_id": user, "tenant": tenant, "session_id": session_id, "status": status, "limit": limit}
    return [body(row) for row in executor.run(statement, given)]


def read_attempt_error(executor: Executor, turn_id: UUID) -> str | None:
    """The error of the turn's last failed attempt, for the operator. It may quote texts of the user."""
    return next((row.attempt_error for row in executor.run(queries.ATTEMPT_ERROR, {"turn_id": turn_id})), None)


def unsaved_turns(executor: Executor, session_id: UUID) -> list[dict[str, str]]:
    """The unsettled turns of a session whose snapshot the store refused, each with the store's error."""
    rows = executor.run(queries.HELD_TURNS, {"session_id": session_id})
    return [{"turn_id": str(row.turn_id), "error": row.unsaved_error} for row in rows]


def _whole_body(executor: Executor, row: Row[Any]) -> dict[str, Any]:
    """The body of a turn, with what the agents need from a person that answer its calls, if there are any."""
    body = _body(row)
    if row.children is not None:
        found: dict[str, list[Any]] = {}
        for each in executor.run(queries.READ_BELOW, {"turn_id": row.turn_id}):
            found.setdefault(each.member, []).append(each.item)
        body["pending_approvals"] += _calls(found.get("pending_approvals"))
        body["pending_calls"] += _calls(found.get("pending_calls"))
        body["decisions"] += _decisions(found.get("decisions"))
        if "waiting_for" in found and body["waiting_for"] is not None and body["waiting_for"]["kind"] != "user":
            body["waiting_for"] = _waiting_for(found["waiting_for"][0])
    return body


def _body(row: Row[Any]) -> dict[str, Any]:
    return {
        "turn_id": str(row.turn_id),
        "session_id": str(row.session_id),
        "seq": row.seq,
        "status": row.status,
        "attempts": row.attempts,
        "resumed": row.resumed,
        "steps": row.steps,
        "reply": None if row.reply is None else _reply(row),
        "error": _error(row) if row.settled_at is not None else None,
        "delayed": _delay(row) if row.settled_at is None else None,
        "usage": row.usage,
        "pending_approvals": _calls(row.pending_approvals),
        "pending_calls": _calls(row.pending_calls),
        "decisions": _decisions(row.decisions),
        "waiting_for": None if row.waiting_for is None else _waiting_for(row.waiting_for),
        "accepted_at": iso(row.accepted_at),
        "started_at": iso(row.started_at),
        "settled_at": iso(row.settled_at),
        **({} if row.tools_left_out is None else {"tools_left_out": row.tools_left_out}),
        **({} if row.parent_turn_id is None else {"parent_turn_id": str(row.parent_turn_id)}),
        **({} if row.children is None else {"children": row.children}),
        **_metadata(row.metadata),
    }


def _calls(stored: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [{**each, "arguments": load_object(each["arguments"])} for each in stored or ()]


def _decisions(stored: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [{**each, "decided_by": decider_of(each["decided_by"])} for each in stored or ()]


def _waiting_for(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a parked turn waits for. A question to the user has the text of the model."""
    found = dict(stored)
    if "arguments" in found:
        found["question"] = load_object(found.pop("arguments")).get("question", "")
    return found


def question_of(turn: Mapping[str, Any]) -> str | None:
    """The question to the user for which a turn waits, after the sentence about an answer that did not fit."""
    waiting = turn.get("waiting_for")
    if waiting is None or waiting["kind"] != "user":
        return None
    return "\n".join(each for each in (waiting["problem"], waiting["question"]) if each)


def cut_off(turn: Mapping[str, Any]) -> str | None:
    """What a person is told of a reply that the model's limit of tokens cut off; `None` of any other."""
    is_cut = (turn["reply"] or {}).get("stop_reason") == LENGTH and turn.get("error") is None
    return "The answer was cut off at the model's limit of tokens." if is_cut else None


def _reply(row: Row[Any]) -> dict[str, Any]:
    """The reply's text, its data, and how the model ended it. The reply of a hook or of an import has no end."""
    end = {} if row.stop_reason is None else {"stop_reason": row.stop_reason}
    data = {} if row.data is None else {"data": row.data}
    return {"text": row.reply, "format": "text", **data, **end}


def _metadata(given: object) -> dict[str, object]:
    """The member `metadata` of a turn whose message has metadata."""
    return {"metadata": given} if isinstance(given, dict) else {}


def _error(row: Row[Any]) -> dict[str, str] | None:
    return None if row.error_code is None else {"code": row.error_code, "message": row.error_message}


def _delay(row: Row[Any]) -> dict[str, str | None] | None:
    """The error that delays a turn, and the latest time at which the next try begins; `None` if no error delays it."""
    if row.error_code is None or row.steps != row.steps_when_parked:
        return None
    message = OVER_BUDGET if row.error_code == BudgetExhausted.code else DELAYED
    return {"code": row.error_code, "message": message, "until": iso(row.not_before)}


def delay_message(turn: Mapping[str, Any]) -> str | None:
    """The reason why a parked turn's answer is delayed, as text for its user; `None` if no delay is known."""
    waiting = turn.get("waiting_for")
    if (question := question_of(turn)) is not None:
        return question
    if waiting is not None:
        return _WAITS.format(
            name=waiting["name"], until=datetime.fromisoformat(waiting["until"]).isoformat(" ", "seconds")
        )
    delayed = turn.get("delayed")
    return None if delayed is None else str(delayed["message"])


class Delays:
    """Reports to a waiting caller that a turn's answer is delayed: once for each delay."""

    def __init__(self, executor: Executor, turn_id: UUID) -> None:
        self._executor = executor
        self._turn_id = turn_id
        self._reported = False

    def look(self) -> str | None:
        """The message for a waiting caller; `None` if the turn is not delayed, or this delay was already reported."""
        message = delay_message(read_turn(self._executor, self._turn_id))
        reported, self._reported = self._reported, message is not None
        return None if reported else message


class SettlementWatch:
    """Notifies the waiting callers of this process when a turn is settled. Uses one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[UUID, list[Future[None]]] = {}
        self._asking: dict[UUID, list[Future[None]]] = {}
        """The futures that are also done when the turn waits for the client of a request."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None
        self._look_now = threading.Event()
        self._announced: deque[UUID] = deque(maxlen=_ANNOUNCED)
        """The newest announced turns. A turn may be announced after a caller reads it and before the caller waits."""
        self.is_notified = False
        """Whether workers announce settled turns through Redis. If they do, rounds are less frequent."""

    def notify(self, turn_ids: Sequence[UUID]) -> None:
        """Record that these turns are settled; start a round at once if a caller waits for one of them."""
        self._announced.extend(turn_ids)
        if any(turn_id in self._waiting or turn_id in self._asking for turn_id in turn_ids):
            self._look_now.set()

    def settled(self, turn_id: UUID, *, or_asks: bool = False) -> Future[None]:
        """A future that is done when `turn_id` is settled, or erased. Cancel it to stop waiting.

        `or_asks`: also when the turn waits for the client of a request (`calls.client`).
        """
        future: Future[None] = Future()
        with self._lock:
            (self._asking if or_asks else self._waiting).setdefault(turn_id, []).append(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="perdure-watch", daemon=True)
                self._thread.start()
            self._changed.notify()
        if turn_id in self._announced:
            self._look_now.set()
        return future

    def close(self) -> None:
        """Stop the thread, and cancel the futures of waiting callers."""
        with self._lock:
            self._closed = True
            self._look_now.set()
            futures = [each for waiting in (self._waiting, self._asking) for some in waiting.values() for each in some]
            self._waiting.clear()
            self._asking.clear()
            self._changed.notify()
        for future in futures:
            future.cancel()

    def _run(self) -> None:
        while not self._closed:
            self._look_now.clear()
            try:
                self._look()
            except Unavailable as error:
                log.warning("settled turns cannot be read; waiting callers are notified later: %s", loggable(error))
            except Exception:
                log.exception("the watch for settled turns raised an error and continues")
            self._look_now.wait(_ROUND_IF_NOTIFIED_S if self.is_notified else _ROUND_S)

    def _look(self) -> None:
        with self._lock:
            self._drop_cancelled()
            while not (self._waiting or self._asking) and not self._closed:
                self._changed.wait()
            asking = list(self._asking)
            turn_ids = [*self._waiting, *asking]
        rows = self._database.run(queries.SETTLED_AMONG, {"turn_ids": turn_ids, "asking": asking})
        with self._lock:
            futures = [future for row in rows for future in self._asking.pop(row.turn_id, ())]
            futures += [future for row in rows if row.settled for future in self._waiting.pop(row.turn_id, ())]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _drop_cancelled(self) -> None:
        for waiting in (self._waiting, self._asking):
            for turn_id, futures in list(waiting.items()):
                left = [future for future in futures if not future.cancelled()]
                if left:
                    waiting[turn_id] = left
                else:
                    del waiting[turn_id]
