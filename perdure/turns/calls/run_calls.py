"""Runs the tool calls of a message, and resumes them after a crash.

The loop commits the calls' intents with the message, and later all of their results as one step. If a message
has several calls, each result is also recorded in its call's row as soon as it is known (`execute`, `awaited`).

After a crash, a lost lease or a timeout, a call with an intent and no result is in doubt: it may or may not have taken
effect. Its effect class decides whether it runs. Calls that wait for approval have not begun, so they are not in
doubt (`approvals`). Calls that wait for a task, a client or a time are resumed by `awaited`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row

from perdure.agents import Agent
from perdure.errors import PerdureError, Unavailable
from perdure.runtime import Runtime
from perdure.tools.delegation import AgentTool
from perdure.tools.registry import Effect
from perdure.tools.sources import Toolset
from perdure.tools.variables import VariableSet
from perdure.turns.calls import approvals, asked, awaited
from perdure.turns.calls.execute import CallExecutor
from perdure.turns.calls.hooked import ToolHooks
from perdure.turns.calls.ledger import CallLedger
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
    results_to_dicts,
    unbegun_result,
    with_edited_arguments,
)
from perdure.turns.lease.tenure import LeaseLost, Tenure, TurnScope
from perdure.turns.outcome import AwaitsCalls, AwaitsDecision, Failed, Lacking
from perdure.turns.transcript import Entry


class Interrupted(Exception):
    """The turn must stop. The tenure has the reason."""


class CallRunner:
    """Runs and resumes the tool calls of the turn at hand, one message at a time."""

    def __init__(
        self, runtime: Runtime, tenure: Tenure, agent: Agent, variables: VariableSet, *, screen: asked.Screen
    ) -> None:
        self._runtime = runtime
        self._screen = screen
        self._scope: TurnScope = tenure
        self._turn = tenure.at_hand
        self._is_overdue = tenure.overdue
        self._agent = agent
        self._variables = variables
        self._ledger = CallLedger(runtime, tenure)
        self._hooks = ToolHooks(runtime, tenure, self._turn, agent)
        self._executor = CallExecutor(
            runtime, tenure, self._turn, hooks=self._hooks, ledger=self._ledger, variables=variables
        )

    def intended(self, planned: Sequence[Planned], sent_at: float | None) -> None:
        """Start the time limits of calls whose intents were just committed.

        `sent_at` is the monotonic time at which the commit was sent. `None`: it is not known which try has committed
        the intents, so the time limits are restarted in the calls' rows.

        Raises:
            LeaseLost: another worker has the session.
        """
        runnable = [each for each in planned if each.refusal is None]
        if sent_at is not None:
            self._ledger.intended(runnable, sent_at)
            return
        for each in runnable:
            self._ledger.extend(each)

    def answer(
        self, open_reply: Entry, planned: Sequence[Planned] | None
    ) -> list[Result] | AwaitsDecision | AwaitsCalls | Lacking | Failed:
        """Run the calls that the message `open_reply` requests; returns their results, in the order of the calls.

        `planned` are the calls whose intents this process has just committed (`intended`). If it is `None`, the calls
        are resumed: another worker began them, or they waited for approval.

        If there is not a result for each call, returns the outcome that stops the turn. A hook that is to announce a
        call to a person may fail the turn.

        Raises:
            LeaseLost: another worker has the session.
            Interrupted: the turn must stop before a call in doubt can be resolved.
        """
        if planned is not None:
            refused = [refused_result(each) for each in planned if each.refusal is not None]
            return self._run(open_reply, refused, [each for each in planned if each.refusal is None])
        rows = effect_rows(self._runtime.database, self._turn.turn_id, open_reply)
        undecided = any(row.status == "asked" and row.undecided_s > 0 for row in rows.values())
        needed = [open_reply.tool_calls[position].name for position, row in rows.items() if _needs_tool(row)]
        if needed and not undecided and not self._is_overdue:
            tools = self._tools()
            for name in needed:
                if tools.find(name) is None:
                    return Lacking(f"the tool {name!r} of the agent {self._agent.name!r}")
        if approvals.none_begun(row.status for row in rows.values()):
            return self._begin(open_reply, rows)
        return self._take_over(open_reply, rows)

    def _run(
        self,
        open_reply: Entry,
        results: list[Result],
        begun: Sequence[Planned],
        *,
        rows: Mapping[int, Row[Any]] | None = None,
        still_wait: bool = False,
    ) -> list[Result] | AwaitsCalls:
        """Run the calls in `begun`; returns their results together with `results`, in the order of the calls.

        `rows` are the rows of resumed calls, whose arguments a person may have edited. `still_wait` tells whether a
        call that an earlier worker began still waits for a task, a client, an agent or a time.
        """
        here = [each for each in begun if each.waits_for is None]
        if len(here) == len(begun) and not still_wait:
            return in_call_order(with_edited_arguments(open_reply, rows or {}, results + self._executor.run(here)))
        for each in begun:
            if each.waits_for is not None:
                results += self._send(each)
        results += self._executor.run(here, record=True)
        return AwaitsCalls(open_reply.seq or 0, results_to_dicts(results))

    def _send(self, planned: Planned) -> list[Result]:
        """Begin a call that waits for a task, a client, an agent or a time; returns its result if it has failed.

        Raises:
            LeaseLost: another worker has the session.
        """
        if planned.waits_for == "user" and self._turn.answers_call and self._turn.channel == asked.UNSEEN_ON:
            return [Result(planned.position, "failed", f"Error: {asked.UNSEEN}", planned.effect_id)]
        checked = self._hooks.before(planned)
        if isinstance(checked, Result):
            return [checked]
        if checked is not planned and not self._ledger.change(checked):
            raise LeaseLost
        if checked.timeout_s != planned.timeout_s or not self._scope.still_valid():
            self._ledger.extend(checked)
        if isinstance(checked.tool, AgentTool):
            failed = self._ledger.delegate(checked, checked.tool, awaited.LEAST_PROBE_S)
        else:
            turn = self._turn
            with self._runtime.traces.calling(turn.turn_id, turn.traceparent, effect_id=checked.effect_id):
                failed = awaited.send(self._runtime, self._scope, checked)
        return [failed] if failed else []

    def _begin(
        self, open_reply: Entry, rows: Mapping[int, Row[Any]]
    ) -> list[Result] | AwaitsDecision | AwaitsCalls | Failed:
        """Begin calls that waited for approval, and run them. If they still wait, call the agent's hooks."""
        planned = plan(self._tools(), calls_as_decided(open_reply, rows), self._runtime)
        calls = [
            replace(each, effect_id=rows[each.position].effect_id) if each.position in rows else each
            for each in planned
        ]
        database, turn_id, message_seq = self._runtime.database, self._turn.turn_id, open_reply.seq or 0
        if not self._ledger.begin(message_seq, [each for each in calls if each.refusal is None]):
            waiting = effect_rows(database, turn_id, open_reply) if self._agent.on_approval_waiting else {}
            try:
                self._hooks.waiting(open_reply, waiting)
            except Unavailable:
                raise
            except PerdureError as error:
                return Failed(error)
            return AwaitsDecision(message_seq)
        begun = effect_rows(database, turn_id, open_reply)
        again = [each for each in calls if each.refusal is None and is_intended(begun.get(each.position))]
        running = {each.position for each in again}
        unbegun = [unbegun_result(each, begun.get(each.position)) for each in calls if each.position not in running]
        return self._run(open_reply, unbegun, again, rows=rows)

    def _take_over(self, open_reply: Entry, rows: dict[int, Row[Any]]) -> list[Result] | AwaitsCalls:
        """Take over calls that another worker began: run or send again those that may be, and wait for the others.

        Raises:
            Interrupted: the turn must stop before the time limits of the calls in doubt have passed.
        """
        in_doubt = [row for row in rows.values() if row.status == "intended" and row.waits_for is None]
        wait_s = max((row.undecided_s for row in in_doubt), default=0.0)
        if wait_s > 0:
            self._scope.step_within(wait_s)
            if self._scope.stopping.wait(wait_s):
                raise Interrupted
            rows = effect_rows(self._runtime.database, self._turn.turn_id, open_reply)
        self._variables.replay(recorded_changes(rows))
        results: list[Result] = []
        again: list[Planned] = []
        waited: list[tuple[Planned, Result]] = []
        still_wait = False
        for fresh in plan(self._tools(), calls_as_decided(open_reply, rows), self._runtime):
            row = rows.get(fresh.position)
            found = self._found(fresh, row)
            results += [found] if isinstance(found, Result) else []
            again += [found] if isinstance(found, Planned) else []
            if row is not None and row.waits_for is not None:
                waited += [(replace(fresh, effect_id=row.effect_id), found)] if isinstance(found, Result) else []
                still_wait = still_wait or not isinstance(found, Result)
        for each in again:
            if each.waits_for is None:
                self._ledger.extend(each)
        if not still_wait:
            seen = {found.position: self._hooks.after(each, found) for each, found in waited}
            results = [seen.get(result.position, result) for result in results]
        return self._run(open_reply, results, again, rows=rows, still_wait=still_wait)

    def _found(self, fresh: Planned, row: Row[Any] | None) -> Result | Planned | None:
        """The result of a call that another worker began, or the call, if it runs or is sent again.

        Returns `None` if the call still waits for a task, a client or a time.
        """
        if row is None:
            return recorded_result(fresh.position, None) if fresh.refusal is None else refused_result(fresh)
        if row.status != "intended":
            return recorded_result(fresh.position, row)
        if row.waits_for == "user":
            return asked.resume(self._runtime, self._turn, row, fresh, self._screen)
        if row.waits_for is not None:
            return awaited.resume(self._runtime, self._scope, self._turn, row, fresh)
        if fresh.tool is None:
            return Result(fresh.position, "unknown", UNKNOWN_OUTCOME, row.effect_id)
        same = replace(fresh, effect_id=row.effect_id, approver=None, repeated=True)
        return self._executor.decide(same, Effect(row.effect)) or same

    def _tools(self) -> Toolset:
        return equip(self._runtime, self._scope, self._agent, self._turn.additions)


def _needs_tool(row: Row[Any]) -> bool:
    """Whether a call must run, be probed or be sent. The result of a task that was sent arrives without its tool."""
    if row.status == "approved":
        return True
    if row.waits_for == "user":
        return bool(row.status == "intended" and row.payload)
    is_unsent = row.waits_for in {"task", "agent"} and not row.sent
    return bool(row.status == "intended" and (row.waits_for is None or is_unsent))
