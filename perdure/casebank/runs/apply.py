"""Applying a plan: that very plan, batch by batch, each row asked again under its lock.

A batch is one transaction: the archive rows, the cases' status, the keepers' counts, the
history, and the plan's own lines, which say that they are done. So a run that is killed
goes on behind the last batch, and nothing is done twice or by halves. What has changed since
the plan was made is spared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any, assert_never

from sqlalchemy import Row

from perdure.casebank import queries as casebank_queries
from perdure.casebank.plan import policy
from perdure.casebank.plan.compute import facts_of, seen_by
from perdure.casebank.plan.cosines import cosine, from_wire
from perdure.casebank.plan.policy import Action, Facts, Rule, Verdict
from perdure.casebank.runs import queries as runs_queries
from perdure.casebank.runs import state
from perdure.casebank.runs.state import Held, RunLost
from perdure.database.engine import Database, Transaction, as_json
from perdure.settings import CasebankSettings, CaseScope
from perdure.text import contradiction


def apply(database: Database, run: Held, limits: CasebankSettings, step: Callable[[int, int], None]) -> None:
    """Do what is left of the run's plan, at most `limits.duplicate_batch` lines a transaction.

    After each transaction it calls `step` with the lines done and their total.

    Raises:
        RunLost: the run is somebody else's.
    """
    total, done = state.count_planned(database, run.run_id)
    after = -1
    while (last := _apply_batch(database, run, limits, after)) is not None:
        after, handled = last
        done += handled
        state.progress(database, run, done, total)
        step(done, total)


def _apply_batch(database: Database, run: Held, limits: CasebankSettings, after: int) -> tuple[int, int] | None:
    """One batch: the position of its last line and how many lines it had; None if nothing was left."""
    with database.transaction("casebank.apply") as transaction:
        fence = transaction.run(runs_queries.FENCE, run.fence)
        if not fence:
            raise RunLost
        lines = transaction.run(
            runs_queries.PENDING, {"run_id": run.run_id, "after": after, "most": limits.duplicate_batch}
        )
        if not lines:
            return None
        # A keeper's counts are written at the end of a batch, and archiving it looks at them.
        pending = list(takewhile(lambda line: line.action == lines[0].action, lines))
        batch = _Batch(pending, _locked(transaction, pending), limits, fence[0].now)
        batch.judge()
        batch.write(transaction, run)
    return pending[-1].position, len(pending)


def _locked(transaction: Transaction, pending: Sequence[Row[Any]]) -> dict[str, Row[Any]]:
    """The cases that these lines name, locked, their uses counted; with their vectors where they are compared.

    Three statements: only one that begins after the locks are held sees what was counted before.
    """
    merges = [line for line in pending if line.action == Action.MERGE]
    compared = {line.case_id for line in merges} | {line.keeper_id for line in merges}
    wanted = compared | {line.case_id for line in pending}
    named = {"case_ids": sorted(wanted), "compared": sorted(compared)}
    transaction.run(runs_queries.LOCK_CASES, named)
    transaction.run(casebank_queries.COUNT_USES_OF, named)
    rows = transaction.run(runs_queries.LOCKED_CASES, named)
    return {row.case_id: row for row in rows}


@dataclass(frozen=True, slots=True)
class _Merge:
    line: Row[Any]
    loser: Facts


class _Batch:
    """Some lines of the plan, the rows that they speak of, and what becomes of each."""

    def __init__(
        self, lines: Sequence[Row[Any]], rows: Mapping[str, Row[Any]], limits: CasebankSettings, now: datetime
    ) -> None:
        self._lines = lines
        self._rows = rows
        self._limits = limits
        self._now = now
        self._going: list[Row[Any]] = []
        self._spared: list[tuple[Row[Any], Verdict]] = []
        self._merges: dict[str, list[_Merge]] = defaultdict(list)

    def judge(self) -> None:
        """Ask again about each line."""
        for line in self._lines:
            spared = self._speaks_against(line)
            if spared is not None:
                self._spared.append((line, spared))
                continue
            self._going.append(line)
            if line.action == Action.MERGE:
                self._merges[line.keeper_id].append(_Merge(line, facts_of(self._rows[line.case_id])))

    def write(self, transaction: Transaction, run: Held) -> None:
        """Do it."""
        keepers = self._merged_keepers(transaction, run)
        if keepers:
            transaction.run(runs_queries.ABSORB, {"run_id": run.run_id, "keepers": as_json(keepers)})
        if self._going:
            going = [_going(line) for line in self._going]
            transaction.run(runs_queries.ARCHIVE, {"run_id": run.run_id, "going": as_json(going)})
        if self._spared:
            spared = [{"position": line.position, "rule": why.rule, "reason": why.reason} for line, why in self._spared]
            transaction.run(runs_queries.SPARE, {"run_id": run.run_id, "spared": as_json(spared)})

    def _speaks_against(self, line: Row[Any]) -> Verdict | None:
        """Why a line of the plan is not carried out, if anything speaks against it now."""
        row = self._rows.get(line.case_id)
        if row is None or row.status != "active":
            return _changed("it is not active any more")
        case = facts_of(row)
        protected = policy.protection(case, self._limits, self._now)
        if protected is not None:
            return Verdict(protected.rule, f"{protected.reason} by now")
        planned = Facts(case.case_id, line.usage_count, line.success_rate, line.last_accessed_at, case.created_at)
        if not policy.unchanged(planned, case):
            return _changed("it was used or rated since the plan was made")
        return self._rule_fails(Action(line.action), line, case)

    def _rule_fails(self, action: Action, line: Row[Any], case: Facts) -> Verdict | None:
        match action:
            case Action.REMOVE:
                held = policy.low_performance(case, self._limits) is not None
                return None if held else _changed("it is no low performer any more")
            case Action.ARCHIVE:
                held = policy.inactivity(case, self._limits, self._now) is not None
                exempt = policy.exemption(case, self._limits)
                return exempt if held else _changed("it is not inactive any more")
            case Action.MERGE:
                return self._no_duplicate(self._rows[line.case_id], self._rows.get(line.keeper_id))
            case Action.SPARE:
                raise AssertionError("what is spared is never applied")
            case _:
                assert_never(action)

    def _no_duplicate(self, loser: Row[Any], keeper: Row[Any] | None) -> Verdict | None:
        if keeper is None or keeper.status != "active":
            return _changed("its keeper is not active any more")
        if (apart := self._readers_differ(loser, keeper)) is not None:
            return _changed(apart)
        if keeper.vector is None or loser.vector is None or keeper.embedder != loser.embedder:
            return _changed("its vector or its keeper's was changed")
        ours, theirs = from_wire(loser.vector), from_wire(keeper.vector)
        if len(ours) != len(theirs) or cosine(theirs, ours) <= self._limits.duplicate_similarity:
            return _changed("its vector or its keeper's was changed")
        if self._limits.duplicate_guard and (found := contradiction.difference(keeper.query, loser.query)):
            return Verdict(Rule.DIFFERENT, str(found))
        return None

    def _readers_differ(self, loser: Row[Any], keeper: Row[Any]) -> str | None:
        """Why the keeper would not enter the same prompts as the loser, if that is so."""
        if keeper.bank != loser.bank:
            return "its keeper is in another bank"
        scope = self._limits.scope
        if seen_by(keeper.user_id, scope) != seen_by(loser.user_id, scope):
            return "its keeper is another user's"
        if scope is CaseScope.USER and (keeper.shared_at is None) != (loser.shared_at is None):
            return "only one of it and its keeper is shared"
        return None

    def _merged_keepers(self, transaction: Transaction, run: Held) -> list[dict[str, Any]]:
        """The keepers' new counts. A batch may continue what an earlier one began for the same keeper."""
        if not self._merges:
            return []
        so_far = transaction.run(runs_queries.TAKEN_OVER, {"run_id": run.run_id, "keeper_ids": sorted(self._merges)})
        taken = {row.keeper_id: (row.uses, row.rated) for row in so_far}
        return [self._merged_keeper(keeper_id, *taken.get(keeper_id, (0, 0))) for keeper_id in sorted(self._merges)]

    def _merged_keeper(self, keeper_id: str, uses: int, rated: int) -> dict[str, Any]:
        """The keeper, of whose uses so many are taken over in this run, with a rate for so many of these."""
        keeper, merges = facts_of(self._rows[keeper_id]), self._merges[keeper_id]
        own = policy.weight(keeper) - uses  # as it is now: it may have been used or rated since the plan was made
        if rated and not merges[0].line.keeper_weight:
            own = 0  # its rate is that of what it took over, and it had none of its own
        merged = policy.merged(keeper, [merge.loser for merge in merges], max(own, 0) + rated)
        return {
            "case_id": keeper_id,
            **_values(merged),
            "before": _values(keeper),
            "losers": [merge.line.case_id for merge in merges],
        }


def _changed(reason: str) -> Verdict:
    return Verdict(Rule.CHANGED, reason)


def _values(case: Facts) -> dict[str, Any]:
    accessed = case.last_accessed_at
    return {
        "usage_count": case.usage_count,
        "success_rate": case.success_rate,
        "last_accessed_at": None if accessed is None else accessed.isoformat(),
    }


def _going(line: Row[Any]) -> dict[str, Any]:
    names = ("position", "case_id", "rule", "reason", "keeper_id", "similarity")
    return {name: getattr(line, name) for name in names}
