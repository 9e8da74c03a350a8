"""Applies a plan batch by batch. Locks the cases of a batch, and checks each case again before changing it.

A keeper is a case into which the plan merges duplicates. Each batch is one transaction, which writes the archive rows,
the cases' status, the keepers' counts, the history, and the outcome of the plan's items. After a crash, a run continues
after the last committed batch, so no item is applied twice or in part. A case that changed since the plan was made is
spared.
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
from perdure.casebank.plan.policy import Action, Facts, Finding, Rule
from perdure.casebank.runs import queries as runs_queries
from perdure.casebank.runs import state
from perdure.casebank.runs.state import ClaimedRun
from perdure.clock import iso
from perdure.database.engine import Database, Transaction, as_json
from perdure.settings import CasebankSettings, CaseScope
from perdure.text import contradiction


def apply(
    database: Database, run: ClaimedRun, limits: CasebankSettings, on_progress: Callable[[int, int], None]
) -> None:
    """Apply the rest of the run's plan, at most `limits.duplicate_batch` items per transaction.

    After each transaction, calls `on_progress` with the number of items done and the total.

    Raises:
        RunLost: another process claimed the run.
    """
    shown = state.read_progress(database, run.run_id)
    done, total, after = shown["done"], shown["total"], -1
    while True:
        with database.transaction("casebank.apply") as transaction:
            parameters = {"run_id": run.run_id, "after": after, "most": limits.duplicate_batch}
            items = transaction.run(runs_queries.PENDING, parameters)
            if not items:
                return
            # One action per batch: an item that archives a keeper is checked against the keeper's counts, which a batch
            # of merges writes only at its end.
            pending = list(takewhile(lambda item: item.action == items[0].action, items))  # noqa: B023 (called at once)
            done += len(pending)
            now = state.progress(transaction, run, done, total)
            batch = _Batch(pending, _locked(transaction, pending), limits, now)
            batch.judge()
            batch.write(transaction, run)
        after = pending[-1].position
        on_progress(done, total)


def _locked(transaction: Transaction, pending: Sequence[Row[Any]]) -> dict[str, Row[Any]]:
    """Lock the items' cases and keepers, and count the uses of all of these cases. Returns the rows by case id.

    A row has a vector only if its case takes part in a merge.

    Locking is a separate statement: only a statement that begins after the lock is taken sees all uses that other
    transactions counted.
    """
    merges = [item for item in pending if item.action == Action.MERGE]
    compared = {item.case_id for item in merges} | {item.keeper_id for item in merges}
    wanted = compared | {item.case_id for item in pending}
    named = {"case_ids": sorted(wanted), "compared": sorted(compared)}
    transaction.run(runs_queries.LOCK_CASES, named)
    transaction.run(casebank_queries.COUNT_USES_OF, named)
    rows = transaction.run(runs_queries.LOCKED_CASES, named)
    return {row.case_id: row for row in rows}


@dataclass(frozen=True, slots=True)
class _Merge:
    item: Row[Any]
    loser: Facts


class _Batch:
    """Consecutive items of the plan, the locked rows of their cases, and the decision on each item."""

    def __init__(
        self, items: Sequence[Row[Any]], rows: Mapping[str, Row[Any]], limits: CasebankSettings, now: datetime
    ) -> None:
        self._items = items
        self._rows = rows
        self._limits = limits
        self._now = now
        self._accepted: list[Row[Any]] = []
        self._spared: list[tuple[Row[Any], Finding]] = []
        self._merges: dict[str, list[_Merge]] = defaultdict(list)

    def judge(self) -> None:
        for item in self._items:
            spared = self._objection(item)
            if spared is not None:
                self._spared.append((item, spared))
                continue
            self._accepted.append(item)
            if item.action == Action.MERGE:
                self._merges[item.keeper_id].append(_Merge(item, facts_of(self._rows[item.case_id])))

    def write(self, transaction: Transaction, run: ClaimedRun) -> None:
        """Write the batch: update the keepers, archive the accepted cases, and record the spared cases."""
        keepers = self._merged_keepers(transaction, run)
        if keepers:
            transaction.run(runs_queries.ABSORB, {"run_id": run.run_id, "keepers": as_json(keepers)})
        if self._accepted:
            accepted = [_accepted(item) for item in self._accepted]
            transaction.run(runs_queries.ARCHIVE, {"run_id": run.run_id, "going": as_json(accepted)})
        if self._spared:
            spared = [{"position": item.position, "rule": why.rule, "reason": why.reason} for item, why in self._spared]
            transaction.run(runs_queries.SPARE, {"run_id": run.run_id, "spared": as_json(spared)})

    def _objection(self, item: Row[Any]) -> Finding | None:
        """Why an item can no longer be applied; None if it can."""
        row = self._rows.get(item.case_id)
        if row is None or row.status != "active":
            return _changed("it is no longer active")
        case = facts_of(row)
        protected = policy.protection(case, self._limits, self._now)
        if protected is not None:
            return Finding(protected.rule, f"now {protected.reason}")
        planned = Facts(case.case_id, item.usage_count, item.success_rate, item.last_accessed_at, case.created_at)
        if not policy.unchanged(planned, case):
            return _changed("it was used or rated since the plan was made")
        return self._rule_objection(Action(item.action), item, case)

    def _rule_objection(self, action: Action, item: Row[Any], case: Facts) -> Finding | None:
        match action:
            case Action.REMOVE:
                held = policy.low_performance(case, self._limits) is not None
                return None if held else _changed("it is no longer a low performer")
            case Action.ARCHIVE:
                held = policy.inactivity(case, self._limits, self._now) is not None
                exempt = policy.exemption(case, self._limits)
                return exempt if held else _changed("it is no longer inactive")
            case Action.MERGE:
                return self._merge_objection(self._rows[item.case_id], self._rows.get(item.keeper_id))
            case Action.SPARE:
                raise AssertionError("spared items are not applied")
            case _:
                assert_never(action)

    def _merge_objection(self, loser: Row[Any], keeper: Row[Any] | None) -> Finding | None:
        if keeper is None or keeper.status != "active":
            return _changed("its keeper is no longer active")
        if (apart := self._readers_differ(loser, keeper)) is not None:
            return _changed(apart)
        if keeper.vector is None or loser.vector is None or keeper.embedder != loser.embedder:
            return _changed("its vector or its keeper's was changed")
        ours, theirs = from_wire(loser.vector), from_wire(keeper.vector)
        if len(ours) != len(theirs) or cosine(theirs, ours) <= self._limits.duplicate_similarity:
            return _changed("its vector or its keeper's was changed")
        if self._limits.duplicate_guard and (found := contradiction.difference(keeper.query, loser.query)):
            return Finding(Rule.DIFFERENT, str(found))
        return None

    def _readers_differ(self, loser: Row[Any], keeper: Row[Any]) -> str | None:
        """Why the keeper and the loser do not enter the same prompts; `None` if they do."""
        if keeper.bank != loser.bank:
            return "its keeper is in another bank"
        scope = self._limits.scope
        if seen_by(keeper.user_id, scope) != seen_by(loser.user_id, scope):
            return "its keeper is another user's"
        if scope is CaseScope.USER and (keeper.shared_at is None) != (loser.shared_at is None):
            return "only one of it and its keeper is shared"
        return None

    def _merged_keepers(self, transaction: Transaction, run: ClaimedRun) -> list[dict[str, Any]]:
        """The keepers' values after the merges. An earlier batch may have merged other cases into the same keepers."""
        if not self._merges:
            return []
        so_far = transaction.run(runs_queries.TAKEN_OVER, {"run_id": run.run_id, "keeper_ids": sorted(self._merges)})
        taken = {row.keeper_id: (row.uses, row.rated) for row in so_far}
        return [self._merged_keeper(keeper_id, *taken.get(keeper_id, (0, 0))) for keeper_id in sorted(self._merges)]

    def _merged_keeper(self, keeper_id: str, uses: int, rated: int) -> dict[str, Any]:
        """The keeper's values after the merges of this batch.

        `uses` is the number of uses that earlier batches of this run added to the keeper. `rated` is the number of
        these uses that came from cases with a known rate.
        """
        keeper, merges = facts_of(self._rows[keeper_id]), self._merges[keeper_id]
        own_weight = policy.weight(keeper) - uses  # from the locked row: the keeper may have changed since the plan
        if rated and not merges[0].item.keeper_weight:
            own_weight = 0  # the keeper had no rate; its current rate comes from the cases that it absorbed
        merged = policy.merged(keeper, [merge.loser for merge in merges], max(own_weight, 0) + rated)
        return {
            "case_id": keeper_id,
            **_values(merged),
            "before": _values(keeper),
            "losers": [merge.item.case_id for merge in merges],
        }


def _changed(reason: str) -> Finding:
    return Finding(Rule.CHANGED, reason)


def _values(case: Facts) -> dict[str, Any]:
    accessed = case.last_accessed_at
    return {
        "usage_count": case.usage_count,
        "success_rate": case.success_rate,
        "last_accessed_at": iso(accessed),
    }


def _accepted(item: Row[Any]) -> dict[str, Any]:
    names = ("position", "case_id", "rule", "reason", "keeper_id", "similarity")
    return {name: getattr(item, name) for name in names}
