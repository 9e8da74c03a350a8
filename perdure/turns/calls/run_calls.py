"""Runs the tool calls of a message, and resumes them after a crash.

The loop commits the calls' intents with the message, and later all of their results as one step. If a message
has several calls, each result is also recorded in its call's row as soon as it is known (`execute`, `awaited`).

After a crash, a lost lease or a timeout, a call with an intent and no result is in doubt: it may or may not have taken
effect. Its effect class decides whether it runs again. Calls that wait for approval have not begun, so they are not in
doubt (`approvals`). Calls that wait for a task or a time are resumed by `awaited`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row

from perdure.agents import Agent
from perdure.errors import PerdureError, Unavailable
from perdure.runtime import Runtime
from perdure.tools.registry import Effect
from perdure.tools.sources import Toolset
from perdure.tools.variables import VariableSet
from perdure.turns.calls import approvals, awaited
from perdure.turns.calls.approvals import Undecided
from perdure.turns.calls.awaited import Awaiting
from perdure.turns.calls.execute import CallExecutor
from perdure.turns.calls.hooked import ToolHooks
from perdure.turns.calls.plan import Planned, equip, plan
from perdure.turns.calls.result_values import (
    UNKNOWN_OUTCOME,
    Result,
    calls_as_decided,
    effect_rows,
    in_call_order,
    is_intended,
    recorded_changes,
    recorded_result,
    refused_result,
    unbegun_result,
    with_edited_arguments,
)
from perdure.turns.lease.tenure import Tenure
from perdure.turns.outcome import AwaitsCalls, AwaitsDecision, Failed, Lacking
from perdure.turns.transcript import Entry


class Interrupted(Exception):
    """The turn must stop. The tenure has the reason."""


class _MissingTool(Exception):
    """This process lacks the tool of a call that an earlier worker committed. Another worker may have the tool."""


class CallRunner:
    """Runs and resumes the tool calls of the turn at hand, one message at a time."""

    def __init__(self, runtime: Runtime, tenure: Tenure, agent: Agent, variables: VariableSet) -> None:
        self._runtime = runtime
        self._tenure = tenure
        self._turn = tenure.at_hand
        self._agent = agent
        self._variables = variables
        self._hooks = ToolHooks(runtime, tenure, agent)
        self._executor = CallExecutor(runtime, tenure, agent, self._variables)

    def answer(
        self, asking: Entry, planned: Sequence[Planned] | None, intended_at: float
    ) -> list[Result] | AwaitsDecision | AwaitsCalls | Lacking | Failed:
        """Run the calls that the message `asking` requests; returns their results, in the order of the calls.

        If `planned` is `None`, the calls are resumed. `intended_at` is the monotonic time at which the intents of
        `planned` were sent to the database.

        If there is not a result for each call, returns the outcome that stops the turn. A hook that is to announce a
        call to a person may fail the turn.

        Raises:
            LeaseLost: another worker has the session.
            Interrupted: the turn must stop before a call in doubt can be resolved.
        """
        message_seq = asking.seq or 0
        try:
            return self._resume(asking) if planned is None else self._perform(planned, intended_at)
        except Undecided:
            return self._announce(asking) or AwaitsDecision(message_seq)
        except Awaiting as awaiting:
            return AwaitsCalls(message_seq, awaited.results_to_dicts(awaiting.results))
        except _MissingTool as missing:
            return Lacking(str(missing))

    def _announce(self, asking: Entry) -> Failed | None:
        """Call the agent's hooks for the calls of the message `asking` that wait for approval."""
        if not self._agent.on_approval_waiting:
            return None
        rows = effect_rows(self._runtime.database, self._turn.turn_id, asking)
        try:
            for position, row in rows.items():
                if row.status == "asked":
                    self._hooks.waiting(asking.tool_calls[position], row.effect_id, row.approver)
        except Unavailable:
            raise
        except PerdureError as error:
            return Failed(error)
        return None

    def _perform(self, planned: Sequence[Planned], intended_at: float) -> list[Result]:
        """Run calls whose intents were just committed; returns the results in call order."""
        runnable = [each for each in planned if each.refusal is None]
        refused = [refused_result(each) for each in planned if each.refusal is not None]
        self._executor.intended((each.effect_id for each in runnable), intended_at)
        return in_call_order(self._run(refused, runnable))

    def _run(self, results: list[Result], begun: Sequence[Planned], *, still_wait: bool = False) -> list[Result]:
        """Run the calls in `begun`; returns their results together with `results`.

        `still_wait` tells whether a call that an earlier worker began still waits for a task or a time.

        Raises:
            Awaiting: a call waits for a task or a time.
        """
        here = [each for each in begun if each.waits_for is None]
        if len(here) == len(begun) and not still_wait:
            return results + self._executor.run(here)
        for each in begun:
            failed = None if each.waits_for is None else self._send(each)
            results += [failed] if failed else []
        raise Awaiting([*results, *self._executor.run(here, record=True)])

    def _send(self, planned: Planned) -> Result | None:
        """Call the hooks, then send a call's task.

        Returns a failed result if a hook rejects the call, or if `awaited.send` returns one.
        """
        refused = self._hooks.before(planned)
        if refused is not None:
            return refused
        if not self._tenure.still_valid():
            self._executor.extend(planned)
        return awaited.send(self._runtime, self._tenure, planned)

    def extend(self, planned: Sequence[Planned]) -> None:
        """Restart the time limits of calls that have not begun. Their intents are already committed.

        Raises:
            LeaseLost: another worker has the session.
        """
        for each in planned:
            if each.refusal is None:
                self._executor.extend(each)

    def _resume(self, asking: Entry) -> list[Result]:
        """Resume calls that another worker began or that waited for approval; returns results in call order."""
        rows = effect_rows(self._runtime.database, self._turn.turn_id, asking)
        self._require_tools(asking, rows)
        if approvals.none_begun(row.status for row in rows.values()):
            results, again, still_wait = *self._begin(asking, rows), False
        else:
            results, again, still_wait = self._take_over(asking, rows)
        results = self._run(results, again, still_wait=still_wait)
        return in_call_order(with_edited_arguments(asking, rows, results))

    def _require_tools(self, asking: Entry, rows: Mapping[int, Row[Any]]) -> None:
        """Check that this process has the tools of the calls that must run or be decided here.

        Raises:
            _MissingTool: it lacks one of them.
        """
        undecided = any(row.status == "asked" and row.undecided_s > 0 for row in rows.values())
        needed = [asking.tool_calls[position].name for position, row in rows.items() if _needs_tool(row)]
        if self._tenure.overdue or undecided or not needed:
            return
        tools = self._tools()
        for name in needed:
            if tools.find(name) is None:
                raise _MissingTool(f"the tool {name!r} of the agent {self._agent.name!r}")

    def _begin(self, asking: Entry, rows: Mapping[int, Row[Any]]) -> tuple[list[Result], list[Planned]]:
        """Begin calls that waited for approval. Returns the results of calls that do not run, and the calls to run."""
        planned = plan(self._tools(), calls_as_decided(asking, rows), self._runtime)
        calls = [
            replace(each, effect_id=rows[each.position].effect_id) if each.position in rows else each
            for each in planned
        ]
        runnable = [(each.effect_id, each.timeout_s) for each in calls if each.refusal is None]
        asked_at = self._runtime.clock.monotonic()
        approvals.begin(self._runtime.database, self._tenure, message_seq=asking.seq or 0, calls=runnable)
        begun = effect_rows(self._runtime.database, self._turn.turn_id, asking)
        again = [each for each in calls if each.refusal is None and is_intended(begun.get(each.position))]
        self._executor.intended((each.effect_id for each in again), asked_at)
        running = {each.position for each in again}
        return [unbegun_result(each, begun.get(each.position)) for each in calls if each.position not in running], again

    def _take_over(self, asking: Entry, rows: dict[int, Row[Any]]) -> tuple[list[Result], list[Planned], bool]:
        """Take over calls that another worker began.

        Returns the known results, the calls to run or send again, and whether some calls wait for a task or a time.
        """
        in_doubt = [row for row in rows.values() if row.status == "intended" and row.waits_for is None]
        wait_s = max((row.undecided_s for row in in_doubt), default=0.0)
        if wait_s > 0:
            self._wait(wait_s)
            rows = effect_rows(self._runtime.database, self._turn.turn_id, asking)
        self._variables.replay(recorded_changes(rows))
        results: list[Result] = []
        again: list[Planned] = []
        waited, still_wait = [], False
        for fresh in plan(self._tools(), calls_as_decided(asking, rows), self._runtime):
            row = rows.get(fresh.position)
            if row is not None and row.waits_for is not None:
                found = self._recorded_or_waiting(fresh, row)
                waited.append((replace(fresh, effect_id=row.effect_id), found))
                still_wait = still_wait or not isinstance(found, Result)
            else:
                found = self._recorded_or_planned(fresh, row)
            results += [found] if isinstance(found, Result) else []
            again += [found] if isinstance(found, Planned) else []
        for each in again:
            if each.waits_for is None:
                self._executor.extend(each)
        if not still_wait:
            seen = {
                found.position: self._hooks.after(each, found) for each, found in waited if isinstance(found, Result)
            }
            results = [seen.get(result.position, result) for result in results]
        return results, again, still_wait

    def _recorded_or_waiting(self, fresh: Planned, row: Row[Any]) -> Result | Planned | None:
        """The result of a call whose tool is a Celery task or a timer.

        Returns `None` if the call still waits, and the planned call if its task must be sent.
        """
        if row.status != "intended":
            return recorded_result(fresh.position, row)
        return awaited.resume(self._runtime, self._tenure, row, fresh)

    def _recorded_or_planned(self, fresh: Planned, row: Row[Any] | None) -> Result | Planned:
        if fresh.refusal is not None and row is None:
            return refused_result(fresh)
        if row is None or row.status != "intended":
            return recorded_result(fresh.position, row)
        if fresh.tool is None:
            return Result(fresh.position, "unknown", UNKNOWN_OUTCOME, row.effect_id)
        same = replace(fresh, effect_id=row.effect_id, approver=None, repeated=True)
        return self._executor.decide(same, Effect(row.effect)) or same

    def _wait(self, seconds: float) -> None:
        self._tenure.step_within(seconds)
        if self._tenure.stopping.wait(seconds):
            raise Interrupted

    def _tools(self) -> Toolset:
        return equip(self._runtime, self._tenure, self._agent)


def _needs_tool(row: Row[Any]) -> bool:
    """Whether a call must run, be probed or be sent. The result of a task that was sent arrives without its tool."""
    if row.status == "approved":
        return True
    return bool(row.status == "intended" and (row.waits_for is None or (row.waits_for == "task" and not row.sent)))
