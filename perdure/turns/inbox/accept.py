"""Accepting messages. A message is accepted when its row is committed.

Accepting is idempotent by `(user_id, channel, message_id)`. In the common case, a message to an existing session is
accepted by one statement. In these cases, a transaction that locks the session's row is needed:

- The session is new or was idle for too long, or it is busy and `on_busy` is neither `enqueue` nor `steer`.
- The message was accepted before.
- The session's turn may wait for the message, as the answer to a question.
- A rate limit is set (`rate_limit`).
- The message has files. They are stored before, and referred to in this transaction.
- The message comes from a stored row (`Source`).

After the commit, a wake-up for a worker is published. If the wake-up is lost, the sweeper publishes another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError

from perdure.database.engine import Executor, Transaction, as_json
from perdure.errors import Conflict, InvalidRequest, NotFound, TooLarge, Unavailable
from perdure.files import queries as files
from perdure.files.parts import files_in, places, record
from perdure.files.store import take_in, use
from perdure.ids import new_id
from perdure.network import egress
from perdure.network.queues import reply_queue
from perdure.runtime import AcceptingRuntime
from perdure.sessions import queries as sessions
from perdure.sessions.ending import IDLE
from perdure.sessions.routing import scope_of
from perdure.settings import OnBusy, Settings
from perdure.text.titles import title_of
from perdure.turns.additions import NO_ADDITIONS, Additions
from perdure.turns.calls import queries as calls
from perdure.turns.calls.hastening import hasten
from perdure.turns.inbox import queries, rate_limit
from perdure.turns.inbox.incoming import Incoming, ReplyTo

log = logging.getLogger(__name__)

_TRIES = 3
_MOST_WOKEN = 10
"""Accepting a message publishes wake-ups for at most this number of deliveries; the sweeper publishes the others."""

_CHANGED = "The session changed while the message was being accepted; please send it again."


@dataclass(frozen=True, slots=True)
class Accepted:
    """The turn of an accepted message. `duplicate` tells that the message had been accepted before.

    `joined` tells that the turn had an earlier message: this one answers its question, or was merged into it.
    """

    turn_id: UUID
    session_id: UUID
    seq: int
    status: str
    duplicate: bool
    joined: bool = False


@dataclass(frozen=True, slots=True)
class _Commit:
    """The result of an accepting transaction, and the wake-ups to publish after it.

    `drains`: any drain takes the session, so that it needs no wake-up of its own (`lease.queries.DRAINABLE`). `asking`
    is the session to wake, if it is another than that of the message: that of an agent whose question was answered.
    """

    accepted: Accepted
    wake: bool
    asking: UUID | None = None
    drains: bool = False
    deliveries: tuple[UUID, ...] = ()
    ending: UUID | None = None


class Source(Protocol):
    """The stored row that a message comes from. The transaction that accepts the message also updates the row."""

    def begin(self, transaction: Transaction) -> None:
        """Reserve the row for this process, if necessary. Called first in the accepting transaction.

        Raises:
            SourceTaken: another process is accepting the message.
        """
        ...

    def end(self, transaction: Transaction, accepted: Accepted) -> None:
        """Record in the row that its message is accepted. Called last, before the commit.

        Raises:
            SourceTaken: the row has changed, or was erased with its user; nothing is committed.
        """
        ...


_Looked = tuple[Sequence[Row[Any]], Sequence[Row[Any]]]
"""The rows of a message's session and of an earlier copy of the message. Each is empty if there is none."""


class SourceTaken(Exception):
    """The message is not accepted: another process has its row, or the row was changed or erased."""


def accept(
    runtime: AcceptingRuntime,
    message: Incoming,
    *,
    target: Mapping[str, Any] | None = None,
    turn_id: UUID | None = None,
    source: Source | None = None,
    any_agent: bool = False,
    answers: bool = True,
    said: str | None = None,
    additions: Additions = NO_ADDITIONS,
) -> Accepted:
    """Accept a message: commit its row, so that the message is answered even after a crash.

    `any_agent` is for messages whose sender does not wait for this call: an agent that this process does not know is no
    reason to refuse the message, because another worker may know the agent. The turn waits for such a worker.

    The user's next message is the answer to a question for which the session's turn waits (`calls.asked`), unless
    `answers` is false or the message interrupts: the message's turn then is the one that waits.

    `said` is the text without what the channel has added, such as the author's name in a group: it is the answer, and
    gives a new conversation its title. By default, it is the text of the message.

    `target` is the chat that the reply goes to, in place of the message's `reply_to`. `turn_id` is the id of the new
    turn; by default, a new id. `additions` are what the message's client adds to the agent, for the new turn.

    Raises:
        SourceTaken: another process accepts the message of `source`, or the row of `source` was changed or erased.
        InvalidRequest, TooLarge: the message is invalid or too long, or a file of it cannot be used.
        NotFound: the user has no session `session_id`, or no file `file_id`.
        Conflict: `message_id` was used for another text or other files, or the session is busy or has ended.
        RateLimited: the user has reached a rate limit.
        ProviderError: a file cannot be stored where `PERDURE_FILES__URL` says.
        Unavailable: the database cannot be reached. Sending the same `message_id` again is safe.
    """
    check_settings(runtime.settings, message)
    if not any_agent:
        _check_agent(runtime, message)
    said = message.text if said is None else said
    parameters = _parameters(runtime, message, said, target, turn_id)
    parameters["answers"] = answers and parameters["on_busy"] is not OnBusy.INTERRUPT
    parameters["answer"] = said
    additions = replace(additions, remember=additions.remember and message.remember)
    added = additions.to_dict()
    parameters["additions"] = None if added is None else as_json(added)
    parameters["file_ids"] = take_in(runtime.files, message.user, files_in(message.parts or ()))
    parameters["remember"] = additions.remember
    with runtime.traces.accepting(parameters["turn_id"]) as traceparent:
        commit = _retried(runtime, message, {**parameters, "traceparent": traceparent}, source)
    for delivery_id in commit.deliveries[:_MOST_WOKEN]:
        runtime.wake.delivery(delivery_id)
    if commit.wake:
        wake = runtime.wake.drain if commit.drains else runtime.wake.session
        wake(commit.asking or commit.accepted.session_id, message.priority)
    if commit.ending is not None:
        runtime.wake.ending(commit.ending)
    return commit.accepted


def check(runtime: AcceptingRuntime, message: Incoming) -> None:
    """Check a message against this installation's settings and agents.

    Raises:
        InvalidRequest, TooLarge: the message is invalid or too long.
    """
    check_settings(runtime.settings, message)
    _check_agent(runtime, message)


def _check_agent(runtime: AcceptingRuntime, message: Incoming) -> None:
    if message.agent is not None:
        runtime.agents.get(message.agent)


def check_settings(settings: Settings, message: Incoming) -> None:
    """Check a message against the settings only, for processes that have not loaded the agents.

    Raises:
        InvalidRequest, TooLarge: the message is invalid or too long.
    """
    longest = settings.guard.max_chars
    if len(message.text) > longest:
        raise TooLarge(f"The text has {len(message.text)} characters; at most {longest} are accepted.")
    for part in files_in(message.parts or ()):
        if len(part.data or "") * 3 // 4 > settings.files.max_bytes + 1_000:  # a `data:` URL has a head
            raise TooLarge(f"parts: a file is longer than {settings.files.max_bytes} bytes.")
    if message.reply_to is not None:
        _check_receiver(settings, message.reply_to)


def _check_receiver(settings: Settings, reply_to: ReplyTo) -> None:
    if reply_to.url is not None:
        try:
            egress.check(reply_to.url, settings.reachable())
        except egress.EgressRefused as error:
            raise InvalidRequest(f"reply_to: {error.message} PERDURE_REPLY_URLS does not allow it.") from None
    elif reply_to.task is not None:
        allowed = settings.allowed_reply_tasks()
        if reply_queue(allowed, reply_to.task, None) is None:
            raise InvalidRequest(
                f"reply_to: the task {reply_to.task!r} is not among those that PERDURE_REPLY_TASKS allows."
            )
        if reply_queue(allowed, reply_to.task, reply_to.queue) is None:
            raise InvalidRequest(
                f"reply_to: the queue {reply_to.queue!r} is not one that PERDURE_REPLY_TASKS allows for the task "
                f"{reply_to.task!r}."
            )


def _parameters(
    runtime: AcceptingRuntime, message: Incoming, said: str, target: Mapping[str, Any] | None, turn_id: UUID | None
) -> dict[str, Any]:
    # The id is created before the first try, so that repeating a try with an unknown outcome is idempotent.
    turn_id = turn_id or new_id(runtime.clock)
    reply_to = target or (message.reply_to.model_dump(exclude_none=True) if message.reply_to else None)
    return {
        "user_id": message.user,
        "channel": message.channel,
        "message_id": message.message_id or str(turn_id),
        "text": message.text,
        "session_id": message.session_id,
        "conversation": message.conversation,
        "title": None if message.conversation is None else title_of(said or _names_in(message)),
        "scope": scope_of(runtime.settings.session.scope, message.channel, message.conversation),
        "idle_s": runtime.settings.session.idle_timeout_s,
        "agent": message.agent,
        "agents": [agent.name for agent in runtime.agents],
        "default_agent": runtime.agents.default.name,
        "on_busy": OnBusy(message.on_busy or runtime.settings.turn.on_busy),
        "sweep_s": runtime.settings.turn.sweep_s,
        "max_chars": runtime.settings.guard.max_chars,
        "user_concurrency": runtime.settings.turn.user_concurrency,
        "turn_id": turn_id,
        "priority": message.priority,
        "reply_to": as_json(reply_to) if reply_to else None,
        "metadata": as_json(message.metadata) if message.metadata is not None else None,
        "parts": None,
        "additions": None,
    }


def _names_in(message: Incoming) -> str:
    return ", ".join(each.name or each.type for each in files_in(message.parts or ()))


def _retried(
    runtime: AcceptingRuntime, message: Incoming, parameters: dict[str, Any], source: Source | None
) -> _Commit:
    needs_lock = source is not None or message.parts is not None or rate_limit.is_on(runtime.settings.guard)
    for tries_left in reversed(range(_TRIES)):
        try:
            at_once = None if needs_lock else _enqueue(runtime.database, {**parameters, "alone": True})
            return at_once or _accept_in_transaction(runtime, message, parameters, source)
        except IntegrityError:
            if not tries_left:
                raise
            log.debug("the same message is being accepted concurrently; retrying")
        except Unavailable:
            # A pooled connection may be dead; the next try uses a new one.
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _enqueue(executor: Executor, parameters: dict[str, Any]) -> _Commit | None:
    rows = executor.run(queries.ENQUEUE, parameters)
    if not rows:
        return None
    row = rows[0]
    if row.lacking is not None:
        log.warning(
            "turn %s is for the default agent, %r: this process lacks the agent %r of session %s",
            parameters["turn_id"], parameters["default_agent"], row.lacking, row.session_id,
        )  # fmt: skip
    accepted = Accepted(parameters["turn_id"], row.session_id, row.seq, "accepted", duplicate=False)
    return _Commit(accepted, wake=not row.is_woken, drains=row.is_drainable)


def _accept_in_transaction(
    runtime: AcceptingRuntime, message: Incoming, parameters: dict[str, Any], source: Source | None
) -> _Commit:
    with runtime.database.transaction("turns.accept") as transaction:
        if source is not None:
            source.begin(transaction)
        commit = _accept_under_lock(runtime, transaction, message, parameters)
        if source is not None:
            source.end(transaction, commit.accepted)
        return commit


def _accept_under_lock(
    runtime: AcceptingRuntime, transaction: Transaction, message: Incoming, parameters: dict[str, Any]
) -> _Commit:
    rate_limit.queue_up(transaction, runtime.settings.guard, message.user)
    targets, earlier = _look(transaction, parameters)
    ending = targets[0].session_id if targets and targets[0].idle and message.session_id is None else None
    if ending is not None and not earlier:
        transaction.run(sessions.REQUEST_END, {"session_ids": [ending], "reason": IDLE})
    if (ending is not None or not targets) and not earlier:
        targets, earlier = _open_session(runtime, transaction, message, parameters)
    if earlier:
        _require_same_files(transaction, earlier[0], parameters["file_ids"])
        return _repeated(earlier[0], parameters)
    rate_limit.check(transaction, runtime.settings.guard, message.user)
    if not targets:
        raise Unavailable(_CHANGED)
    if targets[0].over:
        raise Conflict("That session has ended. Send the message without session_id to begin the next one.")
    parameters = {
        **parameters,
        "parts": _used(runtime, transaction, message, targets[0].session_id, parameters["file_ids"]),
    }
    if targets[0].unsettled:
        answered = _answer_question(transaction, targets[0].session_id, parameters) if parameters["answers"] else None
        if answered is not None:
            return answered
        commit = _accept_into_busy(runtime, transaction, targets[0].session_id, parameters)
        hasten(transaction, targets[0].session_id)
        return commit
    return replace(_enqueue_locked(transaction, parameters), ending=ending)


def _look(transaction: Transaction, parameters: dict[str, Any]) -> _Looked:
    """The message's session, locked, and an earlier copy of the message.

    In this order, because another process may be accepting the same message, or opening the session.
    """
    return transaction.run(sessions.LOCK_TARGET, parameters), transaction.run(queries.FIND_ACCEPTED, parameters)


def _repeated(row: Row[Any], parameters: dict[str, Any]) -> _Commit:
    # A text that a hook changed is no longer in the inbox: the message is recognized by its id.
    if row.text and row.text != parameters["text"]:
        raise Conflict(f"message_id {parameters['message_id']!r} was used for another text.")
    mine = row.turn_id == parameters["turn_id"]  # committed by an earlier try of this call
    accepted = Accepted(row.turn_id, row.session_id, row.seq, row.status, duplicate=not mine, joined=row.position > 1)
    return _Commit(accepted, wake=row.status == "accepted" and not row.is_woken)


def _require_same_files(transaction: Transaction, row: Row[Any], file_ids: Sequence[UUID]) -> None:
    sent = [each["sha256"] for each in row.parts or ()]
    if sent or file_ids:
        found = {each.file_id: each.sha256 for each in transaction.run(files.READ, {"file_ids": list(file_ids)})}
        if sent != [bytes(found.get(file_id, b"")).hex() for file_id in file_ids]:
            raise Conflict("This message_id was used for another message, with other files.")


def _used(
    runtime: AcceptingRuntime,
    transaction: Transaction,
    message: Incoming,
    session_id: UUID,
    file_ids: Sequence[UUID],
) -> str | None:
    """Mark the message's files as used; returns their records as JSON, or `None` if it has none."""
    given = message.parts or ()
    if not file_ids:
        return None
    rows = use(transaction, runtime.clock, message.user, session_id, file_ids)
    placed = zip(files_in(given), rows, places(given), strict=True)
    return as_json([record(part, row, at) for part, row, at in placed])


def _open_session(
    runtime: AcceptingRuntime, transaction: Transaction, message: Incoming, parameters: dict[str, Any]
) -> _Looked:
    """Open the user's next session, unless another process has done so. Returns what `_look` does."""
    if message.session_id is not None:
        raise NotFound("There is no such session.")
    agent = message.agent or runtime.agents.default.name
    opened = {**parameters, "session_id": new_id(runtime.clock), "agent": agent}
    targets = transaction.run(sessions.OPEN, opened)
    return (targets, ()) if targets else _look(transaction, parameters)


def _answer_question(transaction: Transaction, session_id: UUID, parameters: dict[str, Any]) -> _Commit | None:
    """Record the message as the answer to the question for which the session's turn waits, if it asks one.

    If an agent asks that answers a call of the turn, the question is read again once its session is locked, too.
    """
    given = {**parameters, "session_id": session_id, "said": as_json([{"text": parameters["answer"]}])}
    locked = [session_id]
    while rows := transaction.run(calls.ANSWER_QUESTION, {**given, "locked": locked}):
        row = rows[0]
        if row.asking_session in locked:
            break
        transaction.run(calls.LOCK_OF_CALL, {"effect_id": row.effect_id})
        locked.append(row.asking_session)
    else:
        return None
    if not parameters["remember"]:
        transaction.run(calls.FORGET_TURN, {"turn_id": row.turn_id})
    accepted = Accepted(row.turn_id, session_id, row.seq, row.status, duplicate=False, joined=True)
    return _Commit(accepted, wake=bool(row.wakes), asking=row.asking_session)


def _accept_into_busy(
    runtime: AcceptingRuntime, transaction: Transaction, session_id: UUID, parameters: dict[str, Any]
) -> _Commit:
    match OnBusy(parameters["on_busy"]):
        case OnBusy.REJECT:
            raise Conflict("The session is busy with an earlier message.")
        case OnBusy.MERGE:
            rows = transaction.run(queries.MERGE, {**parameters, "session_id": session_id})
            if rows:
                row = rows[0]
                accepted = Accepted(row.turn_id, session_id, row.seq, row.status, duplicate=False, joined=True)
                return _Commit(accepted, wake=not row.is_woken)
            return _enqueue_locked(transaction, parameters)
        case OnBusy.INTERRUPT:
            deliveries = _interrupt(runtime, transaction, session_id)
            return replace(_enqueue_locked(transaction, parameters), deliveries=deliveries)
        case OnBusy.STEER:
            return _enqueue_locked(transaction, parameters, OnBusy.STEER)
        case OnBusy.ENQUEUE:
            return _enqueue_locked(transaction, parameters)


def _enqueue_locked(transaction: Transaction, parameters: dict[str, Any], on_busy: OnBusy = OnBusy.ENQUEUE) -> _Commit:
    commit = _enqueue(transaction, {**parameters, "on_busy": on_busy, "answers": False, "alone": False})
    if commit is None:
        raise Unavailable(_CHANGED)
    return commit


def _interrupt(runtime: AcceptingRuntime, transaction: Transaction, session_id: UUID) -> tuple[UUID, ...]:
    """Raise the session's fence, and settle its unsettled turns as cancelled. Returns the ids of the turns' deliveries.

    The number of statements does not depend on the number of queued turns.
    """
    # Imported only when needed: few messages interrupt, and `perdure send` starts faster without these modules.
    from perdure.database.fencing import Fence  # noqa: PLC0415
    from perdure.turns.lease.tenure import TurnRow  # noqa: PLC0415
    from perdure.turns.outcome import CANCELLED  # noqa: PLC0415
    from perdure.turns.run.leave import settle_begun  # noqa: PLC0415

    [seized] = transaction.run(queries.SEIZE, {"session_id": session_id})
    fence = Fence(seized.token, seized.nonce)
    settled = [
        settle_begun(transaction, runtime.clock, fence, TurnRow.begun(session_id, row), runtime.agents).delivery_id
        for row in transaction.run(queries.BEGUN, {"session_id": session_id})
    ]
    owing = [row.turn_id for row in transaction.run(queries.OWING, {"session_id": session_id})]
    delivery_ids = [new_id(runtime.clock) for _ in owing]
    parameters = {"session_id": session_id, "message": CANCELLED, "turn_ids": owing, "delivery_ids": delivery_ids}
    transaction.run(queries.CANCEL_QUEUED, parameters)
    return tuple(delivery_id for delivery_id in settled if delivery_id is not None) + tuple(delivery_ids)
