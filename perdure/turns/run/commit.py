"""Commits that survive a transient database error, and the commit of a step.

A step is committed by one statement: its messages, intents, tool results and changed working variables. An intent
records that a tool call may have begun. The statement (`queries.STEP`) is conditional on the fence and on the session's
tick. A reply is committed with the intents of its tool calls before a tool begins. Results are committed before the
model is called again.

A model's reply or a tool's result must not be lost if its commit fails because of a lock timeout, a deadlock, a restart
or a lost connection. The process keeps the reply or result in memory, and reads the session's state. If the fence, the
turn and the tick are unchanged, the process commits again. If the session has advanced, the commit had succeeded
despite the error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Row

from perdure.database.engine import Statement, as_json
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.text.titles import title_of
from perdure.tools.variables import VariableSet
from perdure.turns.calls.result_values import Result
from perdure.turns.lease.claim import read_again
from perdure.turns.lease.leave_queries import LOCK
from perdure.turns.lease.tenure import LeaseLost, Tenure, TurnRow
from perdure.turns.run import queries
from perdure.turns.transcript import Entry, Transcript, heard

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_LONGEST_PAUSE_REFUSED_S = 30.0

Committed = TypeVar("Committed")


@dataclass(frozen=True, slots=True)
class Step:
    """The content of one commit, except working variables.

    `runs_tools`: the last entry requests tool calls. `agent` is the agent to whom the step hands the session and the
    turn over. `joins`: the commit also takes in the waiting messages that steer the turn.
    """

    entries: Sequence[Entry]
    runs_tools: bool = False
    joins: bool = False
    intents: Sequence[dict[str, object]] = ()
    results: Sequence[Result] = ()
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class StepCommit:
    """A committed step. `joined` is the number of messages that joined the turn with it.

    `sent_at` is the monotonic time at which the statement was sent; `None` if a try raised an error although it had
    committed the step.
    """

    sent_at: float | None
    joined: int = 0


def commit_step(
    runtime: Runtime, tenure: Tenure, transcript: Transcript, variables: VariableSet, step: Step
) -> StepCommit:
    """Commit a step, and add it to the transcript, with the messages that joined the turn.

    Raises:
        LeaseLost: another worker has the session.
        Unavailable: the database refuses the commit.
    """
    turn, changed, sent_at = tenure.at_hand, variables.changed(), 0.0
    parameters = {
        **tenure.fenced,
        "tick": tenure.tick,
        "lease_s": tenure.lease_s,
        "turn_id": turn.turn_id,
        "channel": turn.channel,
        "runs_tools": step.runs_tools,
        "joins": step.joins,
        "max_chars": runtime.settings.guard.max_chars,
        "added": len(step.entries),
        "messages": as_json([entry.to_dict(position) for position, entry in enumerate(step.entries, start=1)]),
        "intents": as_json(list(step.intents)),
        "results": as_json([result.to_dict() for result in step.results if result.effect_id]),
        "variables": None if changed is None else as_json(changed),
    }
    statement, more = _statement(runtime, transcript, step)

    def write() -> Row[Any]:
        nonlocal sent_at
        sent_at = runtime.clock.monotonic()
        given = {**parameters, **more, "spent_s": tenure.spent_s}
        if step.agent is None:
            rows = runtime.database.run(statement, given)
        else:
            with runtime.database.transaction(statement.name) as transaction:
                transaction.run(LOCK, tenure.fenced)  # so that the statement sees each turn that is queued before it
                rows = transaction.run(statement, given)
        if not rows and step.joins:
            rows = runtime.database.run(queries.STEP_JOINING, given)
        if not rows:
            raise LeaseLost
        tenure.renewed(sent_at)
        return rows[0]

    row = persist(runtime, tenure, write)
    if row is not None:
        tenure.tick += 1
        base, cancelled_at = row.base, row.cancel_requested_at
        tenure.turn = turn if step.agent is None else replace(turn, agent=step.agent)
    elif tenure.turn is None or tenure.turn.turn_id != turn.turn_id:
        raise LeaseLost  # another runner has settled the turn
    else:
        base, cancelled_at = transcript.last_seq(turn.first_seq), tenure.turn.cancel_requested_at
    joined = _joined(runtime, turn, row, base + len(step.entries)) if step.joins else []
    transcript.committed([*step.entries, *joined], base)
    variables.committed(changed)
    if cancelled_at is not None:
        tenure.cancel(turn.turn_id)
    return StepCommit(None if row is None else sent_at, len(joined))


def _statement(runtime: Runtime, transcript: Transcript, step: Step) -> tuple[Statement, dict[str, object]]:
    """The statement that commits a step, and the parameters that only this statement has."""
    if step.agent is not None:
        return queries.STEP_HANDING_OFF, {
            "agent": step.agent, "fingerprint": runtime.agents.fingerprints.get(step.agent),
        }  # fmt: skip
    if transcript.original is not None:  # a hook has changed what the user said
        titles: dict[str, object] = {
            "title": title_of(transcript.asked),
            "former_title": title_of(transcript.original),
        }
        return queries.STEP_REPLACED, titles
    return queries.STEP, {}


def _joined(runtime: Runtime, turn: TurnRow, row: Row[Any] | None, after: int) -> list[Entry]:
    """The messages that joined the turn with a step, whose own messages end with the `seq` `after`.

    Their metadata is added to the turn's. `row` is the result of the step's statement; `None`: it was lost.
    """
    if row is None:
        given = {"session_id": turn.session_id, "turn_id": turn.turn_id, "after": after}
        [row] = runtime.database.run(queries.JOINED, given)
    found = heard(turn.turn_id, row.joined)
    if found:
        turn.metadata.update(row.metadata or {})
    return found


def leave_out_tools(runtime: Runtime, tenure: Tenure, names: Sequence[str]) -> None:
    """Store with the turn at hand the names of the tools that do not fit its prompts.

    Raises:
        Unavailable: the database cannot be reached.
    """
    parameters = {**tenure.fenced, "turn_id": tenure.at_hand.turn_id, "names": as_json(list(names))}
    runtime.database.run(queries.LEAVE_OUT_TOOLS, parameters)


def persist(runtime: Runtime, tenure: Tenure, commit: Callable[[], Committed]) -> Committed | None:
    """Retry `commit` until it succeeds; returns its result.

    Returns `None` if a try raised an error although it had committed: `tenure` is then up to date. Retries for at most
    the time limit of a turn. A process that shuts down tries at most twice.

    Raises:
        LeaseLost: another worker has the session, or the database is unavailable for the duration of a lease.
        Unavailable: the database answers, but refuses each try.
    """
    turn_id, tick = tenure.at_hand.turn_id, tenure.tick
    until = runtime.clock.monotonic() + runtime.settings.turn.timeout_s
    refused, lost = 0, None
    while True:
        try:
            return commit()
        except Unavailable as error:
            if runtime.clock.monotonic() >= until or (tenure.shutting_down and refused):
                raise
            refused += 1
            log.warning("turn %s: a commit was refused and is retried: %s", turn_id, error.message)
        except LeaseLost as error:
            if not refused:
                raise
            lost = error  # raised below, unless the session's state shows that an earlier try had committed
        read_patiently(runtime, tenure)
        if tenure.turn is None or tenure.turn.turn_id != turn_id or tenure.tick != tick:
            return None
        if lost is not None:
            raise lost
        _pause(tenure, refused - 1, _LONGEST_PAUSE_S)


def insist(runtime: Runtime, tenure: Tenure, write: Callable[[], None]) -> None:
    """Retry `write`, which may be repeated, until it succeeds. Retries for at most the duration of a lease.

    Unlike `persist`, this gives `write` a last try if the session is lost. A process that shuts down tries at most
    twice.

    Raises:
        LeaseLost: another worker has the session, or the database is unavailable for the duration of a lease.
        Unavailable: the database refuses each try.
    """
    until = runtime.clock.monotonic() + tenure.lease_s
    refused = 0
    while True:
        try:
            write()
        except Unavailable:
            if runtime.clock.monotonic() >= until or (tenure.shutting_down and refused):
                raise
        else:
            return
        try:
            wait_for_database(runtime, tenure, refused)
        except LeaseLost:
            write()
            raise
        refused += 1


def read_patiently(runtime: Runtime, tenure: Tenure) -> None:
    """Begin or read again the session's oldest unsettled turn, and renew the lease.

    Retries while the database is unavailable.

    Raises:
        LeaseLost: another worker has the session, or the database is unavailable for the duration of a lease.
    """
    until = runtime.clock.monotonic() + tenure.lease_s
    pause_s = _FIRST_PAUSE_S
    while not tenure.lost:
        tenure.step_within(pause_s)
        asked_at = runtime.clock.monotonic()
        try:
            read_again(runtime, tenure)
        except Unavailable:
            if runtime.clock.monotonic() >= until:
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        else:
            tenure.renewed(asked_at)
            return
    raise LeaseLost


def wait_for_database(runtime: Runtime, tenure: Tenure, losses: int) -> None:
    """Read the session's state again: at once after the first loss, after a growing pause for each later one.

    Without a pause, the loop would call the model endlessly while the database answers but refuses each commit, for
    example because its disk is full.

    Raises:
        LeaseLost: another worker has the session, or the database is unavailable for the duration of a lease.
    """
    _pause(tenure, losses, _LONGEST_PAUSE_REFUSED_S)
    read_patiently(runtime, tenure)


def _pause(tenure: Tenure, failures: int, longest_s: float) -> None:
    """Pause after a repeated failure, but not after the first one (0): perhaps only a connection has failed."""
    if failures:
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), longest_s)
        tenure.step_within(pause_s)
        time.sleep(pause_s)
