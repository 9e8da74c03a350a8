"""The tasks of turns.

`turns.submit` accepts a message, `turns.route` routes messages that an application inserted, `turns.tool_result`
records the result of a Celery tool, and `turns.run` runs a session's turns.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey, parse_tenant
from perdure.errors import InvalidRequest
from perdure.ids import part_task_id
from perdure.observe.current import working_on
from perdure.tasks.task import PerdureTask, declare
from perdure.tools.awaited.port import TaskEnded
from perdure.turns.calls.awaited import finish
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.inbox.route_unrouted import route_user
from perdure.turns.run.child_watch import count_failed_start
from perdure.turns.sweep import postpone

log = logging.getLogger(__name__)

_MOST_SHOWN = 5
"""The most ids of turns in the result of `turns.run`."""
_FAILED = "The task failed. Its error is not known here: the task has no result backend, or another one."


@declare(
    "turns.submit",
    base=PerdureTask,
    hint=False,
    ignore_result=False,
    acks_late=True,
    reject_on_worker_lost=True,
)
def submit(self: PerdureTask, *positional: Any, **message: Any) -> dict[str, Any]:
    """Accept a message; returns the ids of its turn and session, and whether the message is a duplicate.

    `message_id` identifies duplicates; by default, `message_id` is the task's id.
    """
    if positional:
        raise InvalidRequest("Give the message's members as keyword arguments.")
    message.setdefault("message_id", self.request.id)
    tenant = parse_tenant(message.pop("tenant", None))
    incoming = parse_incoming(message, channel="celery", tenant=tenant)
    runtime = self.process.runtime
    with runtime.traces.joined(self.request.headers or {}):
        accepted = accept(runtime, incoming, any_agent=True)
    return {
        "turn_id": str(accepted.turn_id),
        "session_id": str(accepted.session_id),
        "duplicate": accepted.duplicate,
    }


@declare("turns.route", base=PerdureTask)
def route(self: PerdureTask, user: str) -> None:
    """Route the messages that applications inserted for the user with the key `user`."""
    if not isinstance(user, str):
        raise InvalidRequest("user: must be text.")
    route_user(self.process.runtime, UserKey(user))


@declare("turns.tool_result", base=PerdureTask, hint=False, acks_late=True, reject_on_worker_lost=True)
def tool_result(
    self: PerdureTask, value: Any = None, effect_id: str = "", *, failed: bool = False, part: int | None = None
) -> None:
    """Record the result of a Celery tool's task. This task is the callback and the errback of the tool's task.

    A repeated result changes nothing. If the tool's task `failed`, Celery passes the id of that task as `value`. The
    error is then read from the result backend.
    """
    runtime = self.process.runtime
    wanted = _effect_id(effect_id)
    if part is not None and (isinstance(part, bool) or not isinstance(part, int)):
        raise InvalidRequest("part: must be an integer.")
    ended = TaskEnded(failed=False, value=value)
    if failed:
        task_id = wanted if part is None else part_task_id(wanted, part)
        found = None if runtime.calls is None else runtime.calls.ask(task_id)
        ended = found if isinstance(found, TaskEnded) and found.failed else TaskEnded(failed=True, value=_FAILED)
    finish(runtime, wanted, ended, part)


def _effect_id(text: object) -> UUID:
    try:
        return UUID(str(text))
    except ValueError:
        raise InvalidRequest("effect_id: must be a UUID.") from None


@declare("turns.run", base=PerdureTask)
def run(self: PerdureTask, session_id: str) -> dict[str, Any]:
    """Run the turns of due sessions, the given one among them, until none is due or the task's time is over.

    Returns what Celery logs and Flower shows: the number of sessions, how many turns were settled with which status and
    error code, and the ids of the first ones, for `perdure turns show`. An example is
    `{"sessions": 2, "turns": {"done": 1, "failed PROVIDER_ERROR": 1}, "turn_ids": ["0198…", "0198…"]}`.
    """
    process, named = self.process, UUID(session_id)
    drained = process.runner.drain(named, process.leaving.is_set)
    shown: dict[str, Any] = {
        "sessions": drained.sessions,
        "turns": dict(Counter(drained.outcomes)),
        "turn_ids": [str(each) for each in drained.turn_ids[:_MOST_SHOWN]],
    }
    if (refused := drained.refused) is None:
        return shown
    with working_on(session_id=named):
        log.warning("session %s: its turn was claimed %d times and must run in a child process", named, refused.claims)
        ended = process.isolate(named)
    if ended is None:
        postpone(process.runtime, named)
        return {**shown, "why": "no child process is free"}
    if ended.left is not None:
        process.runner.child_left(named, ended.left)
    elif ended.error is not None and refused.fence is not None:
        count_failed_start(process.runtime, process.runner, named, refused.fence, ended)
    turns = dict(Counter([*drained.outcomes, *ended.outcomes]))
    return {**shown, "turns": turns, "why": "a child process ran" if ended.error is None else "no start"}
