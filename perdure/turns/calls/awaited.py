"""Calls that wait for a Celery task, a client, an agent or a time. The wait occupies no worker.

The intent of such a call is committed like that of any other call. The worker then sends the task, if there is one, and
records that the task was sent. The effect's id is the task's id. Finally the worker releases the session. The turn is
`parked` until the result arrives (`finish`) or the call is due. A task and a client's call are due at their time limit,
a timer at its time. The wait does not count as an attempt. The commit that releases the session also records the
results of the message's other calls in their rows. All results enter the transcript together.

If the worker crashes between committing the intent and recording that the task was sent, it is unknown whether the task
was sent. A `pure` or `idempotent` task is then sent again with the same id; an `unsafe` task is not.

The task's link callback delivers the result. If the callback is lost, the sweeper reads the result from the result
backend (`probe_due`). A task that has not ended by its time limit counts as lost: the model is shown that the outcome
is unknown, and the sweeper revokes the task.

The call of an agent is answered by a turn in another session (`children`). The sweeper's probe reads its answer, and
cancels the turn if no turn waits for it any more.

A client's call is one that someone outside runs. A request brings its result (`outside`); the first result counts. At
its time limit, the model is shown that the outcome is unknown. A question to the user waits in the same way (`asked`).

Recording a result, parking a turn, ending the session and cancelling a turn each lock the session's row first, so they
are serialised.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.agents import Agents
from perdure.database.engine import Database
from perdure.errors import NotFound, Unavailable
from perdure.ids import part_task_id
from perdure.runtime import Runtime, Waker
from perdure.text import untrusted
from perdure.tools.awaited.port import TaskCall, TaskCalls, TaskEnded, TaskRuns, TaskSent
from perdure.tools.awaited.task import CeleryTool
from perdure.tools.delegation import AgentTool
from perdure.tools.registry import MAX_RESULT_CHARS, Effect
from perdure.turns.calls import children, fan_out, queries
from perdure.turns.calls.plan import Planned
from perdure.turns.calls.result_values import Result, outcome_of, unknown_result, used_in
from perdure.turns.lease.tenure import TurnRow, TurnScope

log = logging.getLogger(__name__)

ENDED = "The conversation ended before this time."
UNSENT = "The task was not sent: the message broker cannot be reached."

MOST_PROBES = 50
"""One call of `probe_due` probes or revokes the tasks of at most this number of calls."""

LEAST_PROBE_S = 1.0
MOST_PROBE_S = 60.0
"""The longest pause between two probes of a task, in seconds. The shortest pause is `LEAST_PROBE_S`.

Between these bounds, the pause is a quarter of the task's age, so that the progress of a task of a few seconds is seen.
"""

FOLLOWED_S = 0.5
"""The pause between two probes of a task whose turn a client follows."""

_SEND_S = 5.0
"""Seconds allowed for sending or probing one task."""

_MAX_PROGRESS = 1_000


def send(runtime: Runtime, scope: TurnScope, planned: Planned) -> Result | None:
    """Send the task of a call whose intent is committed. Does nothing for a call without a task.

    Returns a failed result if the broker refused an `unsafe` task, otherwise `None`. A refused task that is not
    `unsafe` is sent again later.
    """
    tool = planned.tool
    if not isinstance(tool, CeleryTool):
        return None
    effect_id = planned.effect_id
    if tool.max_parallel is not None:
        parts = len(planned.arguments["calls"])
        scope.step_within(_SEND_S * parts)
        fan_out.begin(runtime, effect_id, parts)
        note_sent(runtime, effect_id)
        return None
    scope.step_within(_SEND_S)
    call = TaskCall(
        effect_id,
        tool.task,
        planned.arguments,
        tool.queue,
        planned.timeout_s,
        effect_id,
        headers=runtime.traces.headers(),
    )
    sent = TaskSent.NO if runtime.calls is None else runtime.calls.send(call)
    if sent is TaskSent.NO and tool.effect is Effect.UNSAFE:
        # The call fails at once. If it waited, a later worker would assume that the task may have been sent, and never
        # send it.
        return Result(planned.position, "failed", f"Error: {UNSENT}", planned.effect_id)
    if sent is TaskSent.YES or tool.effect is Effect.UNSAFE:
        note_sent(runtime, effect_id)
    return None


def note_sent(runtime: Runtime, effect_id: UUID) -> None:
    """Record that a task was, or may have been, sent. The next round probes it: it may report its progress at once."""
    runtime.database.run(queries.NOTE_SENT, {"effect_id": effect_id})


def resume(
    runtime: Runtime, scope: TurnScope, turn: TurnRow, row: Row[Any], planned: Planned
) -> Result | Planned | None:
    """The result of a call that an earlier worker began.

    Returns `None` if the call still waits, and the planned call if its task must be sent.
    """
    position = planned.position
    if row.undecided_s <= 0:
        limit = MAX_RESULT_CHARS if planned.tool is None else planned.tool.max_result_chars
        return _due(runtime, scope, row, position, limit)
    sessions = runtime.database.run(queries.IS_ENDING, {"session_id": turn.session_id})
    if sessions and sessions[0].ending:
        if row.waits_for == "timer":
            return Result(position, "denied", ENDED, row.effect_id)
        return _closed(runtime, row, position)
    return None if row.sent else _unsent(runtime, row, planned)


def _unsent(runtime: Runtime, row: Row[Any], planned: Planned) -> Planned | None:
    """The call, if its task must be sent or its agent asked. A task that may have been sent is sent again if it may."""
    if row.waits_for == "task" and row.effect == Effect.UNSAFE:
        # A call with a list of arguments stores its parts before it sends a task: without parts, no task was sent.
        is_list = isinstance(planned.tool, CeleryTool) and planned.tool.max_parallel is not None
        if row.parts is not None or not is_list:
            note_sent(runtime, row.effect_id)  # the task may have been sent: its result can still arrive
            return None
    if planned.refusal is not None or not isinstance(planned.tool, CeleryTool | AgentTool):
        return None
    if planned.tool.waits_for != row.waits_for:  # the agent has another tool of this name now
        return None
    return replace(planned, effect_id=row.effect_id, timeout_s=row.undecided_s)


def finish(runtime: Runtime, effect_id: UUID, ended: TaskEnded, part: int | None = None) -> bool:
    """Record the result of a task with `record`, and send the next waiting tasks of a call with a list of arguments.

    Returns False if the call already has a result, or does not exist.
    """
    row = record(runtime.database, runtime.wake, runtime.agents, effect_id, ended, part)
    if row is not None and row.parts is not None and row.waits:
        fan_out.advance(runtime, effect_id)
        _announce(runtime, row.turn_id)
    return row is not None


def record(  # noqa: PLR0917 (as `finish`, without the rest of a runtime)
    database: Database, wake: Waker | None, agents: Agents | None, effect_id: UUID, ended: TaskEnded,
    part: int | None = None,
) -> Row[Any] | None:  # fmt: skip
    """Record the result of a call. Wakes the turn's session if no call of the turn waits any more.

    For a call with a list of arguments, `part` is the number of the ended task. A result that arrives after the turn
    stopped waiting is recorded in the effect's row, but does not enter the transcript. `wake` is `None` if the broker
    cannot be reached: the sweeper wakes the session. `agents` is `None` in a process that has no agents.

    Returns the call as it was; `None` if it already had a result, or does not exist.
    """
    with database.transaction("turns.finish_task") as transaction:
        row = fan_out.locked_call(transaction, effect_id)
        if row is None:
            return None
        agent = None if agents is None else agents.find(row.agent)
        tool = None if agent is None else agent.find_tool(row.tool)
        limit = MAX_RESULT_CHARS if tool is None else tool.max_result_chars
        if row.parts is None:
            outcome: tuple[str, str] | None = _rendered(ended, limit)
        else:  # the call has its result when all of its tasks have ended
            rendered = _rendered(ended, fan_out.most_chars(limit, len(row.parts)))
            text = fan_out.end_part(transaction, row, -1 if part is None else part, rendered)
            outcome = None if text is None else ("done", text)
        woken: Sequence[object] = ()
        if outcome is not None:
            given = {"effect_id": effect_id, "status": outcome[0], "result": outcome[1]}
            transaction.run(queries.FINISH_TASK, given)
            woken = transaction.run(queries.RESUME_PARKED, {"session_id": row.session_id, "turn_id": row.turn_id})
    log.info("turn %s: a result of the call %s of %s has arrived", row.turn_id, effect_id, row.tool)
    if woken and wake is not None:
        wake.session(row.session_id, row.priority)
    return row


def report(runtime: Runtime, effect_id: UUID) -> None:
    """Record the answer of the agent that answers a call, if it has answered. It may be recorded already."""
    ended = children.answer_of(runtime.database, effect_id)
    if ended is not None:
        record(runtime.database, runtime.wake, runtime.agents, effect_id, ended)


def report_now(runtime: Runtime, effect_id: UUID) -> None:
    """As `report`, behind the commit that settled the agent's turn. The sweeper repeats what fails here."""
    try:
        report(runtime, effect_id)
    except Unavailable as error:
        log.warning("the answer to the call %s is reported later: %s", effect_id, error.message)


def probe_due(
    runtime: Runtime, cancel: Callable[[Runtime, UUID], None], stopped: Callable[[], bool] = lambda: False
) -> int:
    """Probe due tasks and agents, revoke the tasks and `cancel` the turns of agents for which no turn waits.

    Returns the number of calls that were due.
    """
    if runtime.calls is None:
        return 0
    limits = {
        "most": MOST_PROBES,
        "least_s": LEAST_PROBE_S,
        "most_s": MOST_PROBE_S,
        "followed": [] if runtime.events is None else runtime.events.followed(),
        "followed_s": FOLLOWED_S,
    }
    rows = runtime.database.run(queries.PROBE_DUE, limits)
    unwanted = [row for row in rows if not row.waits and row.waits_for != "agent"]
    task_ids = [task_id for row in unwanted for task_id in _task_ids(row)]
    if unwanted and (not task_ids or runtime.calls.revoke(task_ids)):
        runtime.database.run(queries.REVOKED, {"effect_ids": [row.effect_id for row in unwanted]})
    for row in rows:
        if stopped():
            break
        try:
            if row.waits:
                _probe(runtime, runtime.calls, row)
            elif row.waits_for == "agent":
                with suppress(NotFound):  # the intent was committed, and the agent was not asked
                    cancel(runtime, row.effect_id)
                runtime.database.run(queries.REVOKED, {"effect_ids": [row.effect_id]})
        except Unavailable as error:  # later rounds probe these tasks; the sweep continues
            log.warning("tasks are probed later: %s", error.message)
            break
    return len(rows)


def _task_ids(row: Row[Any]) -> list[UUID]:
    """The ids of a call's tasks that may be queued or running."""
    if row.parts is None:
        return [row.effect_id]
    return [part_task_id(row.effect_id, number) for number in fan_out.running(fan_out.load(row.parts))]


def _probe(runtime: Runtime, calls: TaskCalls, row: Row[Any]) -> None:
    """Record the results and the progress of a call's tasks that are in the result backend, or an agent's answer."""
    if row.waits_for == "agent":
        report(runtime, row.effect_id)
        return
    if row.parts is not None:
        for number in fan_out.running(fan_out.load(row.parts)):
            part = calls.ask(part_task_id(row.effect_id, number))
            if isinstance(part, TaskEnded):
                finish(runtime, row.effect_id, part, number)
        fan_out.advance(runtime, row.effect_id, again=True)
        return
    match calls.ask(row.effect_id):
        case TaskEnded() as ended:
            finish(runtime, row.effect_id, ended)
        case TaskRuns(progress) if progress is not None:
            shown = _as_progress(progress)
            if shown != row.progress:
                runtime.database.run(queries.NOTE_PROGRESS, {"effect_id": row.effect_id, "progress": shown})
                _announce(runtime, row.turn_id)
        case _:
            pass


def _announce(runtime: Runtime, turn_id: UUID) -> None:
    if runtime.events is not None:
        runtime.events.announce(turn_id)


def probe_in_rounds(runtime: Runtime, cancel: Callable[[Runtime, UUID], None], stopping: Event) -> None:
    """Call `probe_due` until `stopping` is set: every `FOLLOWED_S` seconds while a client follows a turn, else less.

    The pause has two parts, so that a client does not wait for the end of the longer one.
    """
    while not stopping.wait(FOLLOWED_S):
        is_followed = runtime.events is not None and bool(runtime.events.followed())
        if not is_followed and stopping.wait(LEAST_PROBE_S - FOLLOWED_S):
            return
        runtime.duties.run("running tasks", partial(probe_due, runtime, cancel, stopping.is_set))


def _due(runtime: Runtime, scope: TurnScope, row: Row[Any], position: int, limit: int) -> Result:
    """The result of a call at its time limit, or of a timer at its time. Tasks and agents are probed once more."""
    if row.waits_for == "timer":
        now = runtime.clock.now().isoformat(timespec="seconds")
        return Result(position, "done", f"The time has come: it is {now} now.", row.effect_id)
    if row.waits_for == "client":
        return _closed(runtime, row, position)
    scope.step_within(_SEND_S)
    if row.parts is not None:  # the next sweep revokes the unfinished tasks
        ended: dict[int, fan_out.Part] = {}
        for number in fan_out.running(fan_out.load(row.parts)):
            part = None if runtime.calls is None else runtime.calls.ask(part_task_id(row.effect_id, number))
            if isinstance(part, TaskEnded):
                ended[number] = fan_out.Part(*_rendered(part, fan_out.most_chars(limit, len(row.parts))))
        return _closed(runtime, row, position, ended)
    if row.waits_for == "agent":
        found: TaskEnded | TaskRuns | None = children.answer_of(runtime.database, row.effect_id) if row.sent else None
    else:
        found = None if runtime.calls is None else runtime.calls.ask(row.effect_id)
    if isinstance(found, TaskEnded):
        status, text = _rendered(found, limit)
        return Result(position, status, text if status == "done" else f"Error: {text}", row.effect_id, used_in(row))
    return _closed(runtime, row, position)


def _closed(runtime: Runtime, row: Row[Any], position: int, ended: Mapping[int, fan_out.Part] | None = None) -> Result:
    """The result of a call for which the turn no longer waits: an unknown outcome, or a result that has just arrived.

    Recorded under the lock that a result needs, so that none is accepted which the model does not read. A call with a
    list of arguments has the results of the tasks that have ended; `ended` are those that are not recorded.
    """
    given: dict[str, Any] = {"effect_id": row.effect_id, "status": "unknown", "result": None}
    with runtime.database.transaction("turns.close_call") as transaction:
        call = fan_out.locked_call(transaction, row.effect_id)
        if call is not None and ended is not None:
            parts = fan_out.load(call.parts)
            for number, part in ended.items():
                parts[number] = parts[number] if parts[number].ended else part
            given |= {"status": "done", "result": fan_out.rendered(parts)}
        [closed] = transaction.run(queries.CLOSE_CALL, given)
    if closed.status != "unknown":
        return Result(position, *outcome_of(closed.status, closed.result), row.effect_id, used_in(row))
    log.warning("the turn no longer waits for the %s %s: its outcome is unknown", row.waits_for, row.effect_id)
    return unknown_result(position, row)


def _rendered(ended: TaskEnded, limit: int) -> tuple[str, str]:
    """Status and text of a task's outcome, rendered as for a tool that runs in the worker (`registry.Tool.call`)."""
    if ended.failed:
        return "failed", untrusted.first_line(str(ended.value)) or "the task failed without a message."
    try:
        return "done", untrusted.dump(ended.value, limit)
    except ValueError as error:
        return "failed", f"the task ended, but its result cannot be shown: {error}"


def _as_progress(progress: Any) -> str | None:
    try:
        text = untrusted.dump(progress, _MAX_PROGRESS)
    except ValueError:
        return None
    return text
