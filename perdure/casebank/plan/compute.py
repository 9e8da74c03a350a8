"""Computes the plan of a run or a dry run.

The plan depends only on the cases, the settings and the time. The order of the cases and the sizes of pages and batches
do not affect the plan.

Memory holds the plan and a few blocks of vectors. For each case, it also holds the id and about fifty bytes of other
data. Vectors and texts are in temporary files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from perdure.access.tenants import tenant_of
from perdure.casebank import COMMON
from perdure.casebank.plan import policy, queries
from perdure.casebank.plan.cosines import Vector, from_wire, has_direction
from perdure.casebank.plan.duplicates import Duplicates, Group, OnProgress
from perdure.casebank.plan.policy import Action, Facts, Rule, Verdict
from perdure.database.engine import Executor
from perdure.settings import CasebankSettings, CaseScope

_Key = tuple[str, int]
"""An embedder and a number of dimensions. Only vectors with the same key can be compared."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active case, with the values that the planner needs."""

    facts: Facts
    query: str
    embedder: str | None
    vector: Vector | None
    user_id: str | None = None
    bank: str = COMMON
    shared: bool = False


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One decision of the plan about one case.

    `facts` are the case's facts. If other cases are merged into the case, `facts` include the results of these merges.
    If the case itself is merged into another case, `keeper_id` is the other case, called the keeper. `keeper_weight` is
    the keeper's `policy.weight` before the merge.
    """

    action: Action
    facts: Facts
    rule: Rule
    reason: str
    keeper_id: str | None = None
    similarity: float | None = None
    keeper_weight: int | None = None


def read_candidates(executor: Executor, page: int) -> Iterator[list[Candidate]]:
    """The active cases, a page at a time. Each page is a separate statement, so no transaction stays open."""
    after = ""
    while rows := executor.run(queries.CANDIDATES, {"after": after, "most": page}):
        yield [_candidate(row) for row in rows]
        after = rows[-1].case_id


def seen_by(author: str | None, scope: CaseScope) -> str | None:
    """Who sees an unshared case: the user key of its author or, with the scope `all`, the author's tenant."""
    return author if scope is CaseScope.USER else tenant_of(author)


def facts_of(row: queries.CaseRow) -> Facts:
    """The `Facts` of the case in `row`."""
    return Facts(row.case_id, row.usage_count, row.success_rate, row.last_accessed_at, row.created_at, row.restored_at)


def compute(
    pages: Iterable[Sequence[Candidate]], limits: CasebankSettings, now: datetime, total: int, on_progress: OnProgress
) -> list[PlanItem]:
    """The plan for the cases in `pages` at the time `now`. `on_progress` gets `total`, an estimated number of cases."""
    planner = _Planner(limits, now)
    with ExitStack() as files:
        groups: dict[_Key, Group] = {}
        read = 0
        for page in pages:
            for candidate in page:
                planner.consider(candidate, groups, files)
            read += len(page)
            on_progress(read, total + read)
        for key in sorted(groups):
            duplicates = groups[key].duplicates(
                limits, planner.protection, lambda done, of: on_progress(read + done, read + of)
            )
            planner.merge(groups[key], duplicates)
    return planner.items()


class _Planner:
    """Applies the three rules of `policy`, in order, to a stream of cases."""

    def __init__(self, limits: CasebankSettings, now: datetime) -> None:
        self._limits = limits
        self._now = now
        self._removed: list[PlanItem] = []
        self._merged: list[PlanItem] = []
        self._archived: list[PlanItem] = []
        self._spared: list[PlanItem] = []

    def protection(self, case: Facts) -> Verdict | None:
        """The safety rule that protects the case; `None` if no rule does."""
        return policy.protection(case, self._limits, self._now)

    def consider(self, candidate: Candidate, groups: dict[_Key, Group], files: ExitStack) -> None:
        """Plan to remove a low performer. Add any other case to a group, or judge its activity if it has no vector."""
        case, vector = candidate.facts, candidate.vector
        verdict = policy.low_performance(case, self._limits)
        if verdict is not None:
            protected = self.protection(case)
            if protected is None:
                self._removed.append(PlanItem(Action.REMOVE, case, verdict.rule, verdict.reason))
                return
            self._spare(case, verdict, protected)
        if candidate.embedder is None or vector is None or not has_direction(vector):
            self.judge_activity(case)
            return
        key = (candidate.embedder, len(vector))
        if key not in groups:
            groups[key] = files.enter_context(Group(len(vector)))
        groups[key].add(case, candidate.query, vector, self._readers(candidate))

    def _readers(self, candidate: Candidate) -> str:
        """A key for the users and agents whose prompts the case may enter; only cases with equal keys are compared."""
        readers = seen_by(candidate.user_id, self._limits.scope)
        shared = self._limits.scope is CaseScope.USER and candidate.shared
        return json.dumps([candidate.bank, readers, shared])

    def merge(self, group: Group, duplicates: Duplicates) -> None:
        """Add the group's duplicates to the plan, and judge the activity of the remaining cases."""
        cases = group.cases
        losers: dict[int, list[int]] = defaultdict(list)
        gone: set[int] = set()
        for pair in duplicates.absorbed:
            losers[pair.keeper].append(pair.loser)
            gone.add(pair.loser)
            keeper = cases[pair.keeper]
            self._merged.append(
                PlanItem(
                    Action.MERGE,
                    cases[pair.loser],
                    Rule.DUPLICATE,
                    f"a duplicate of {keeper.case_id} (similarity {pair.similarity:.4f})",
                    keeper.case_id,
                    pair.similarity,
                    policy.weight(keeper),
                )
            )
        for pair, why in duplicates.spared:
            keeper_id = cases[pair.keeper].case_id
            reason = f"near {keeper_id} (similarity {pair.similarity:.4f}), but {why.reason}"
            self._spared.append(PlanItem(Action.SPARE, cases[pair.loser], why.rule, reason, keeper_id, pair.similarity))
        for number in range(len(cases)):
            if number in losers:
                self.judge_activity(policy.merged(cases[number], [cases[loser] for loser in losers[number]]))
            elif number not in gone:
                self.judge_activity(cases[number])

    def judge_activity(self, case: Facts) -> None:
        """Plan to archive an inactive case, unless it is protected or exempt."""
        verdict = policy.inactivity(case, self._limits, self._now)
        if verdict is None:
            return
        spared = self.protection(case) or policy.exemption(case, self._limits)
        if spared is None:
            self._archived.append(PlanItem(Action.ARCHIVE, case, verdict.rule, verdict.reason))
        else:
            self._spare(case, verdict, spared)

    def items(self) -> list[PlanItem]:
        """The plan in the order in which it is applied; spared cases come last."""
        for part in (self._removed, self._archived):
            part.sort(key=lambda item: item.facts.case_id)
        self._spared.sort(key=lambda item: (item.facts.case_id, item.rule, item.reason))
        return [*self._removed, *self._merged, *self._archived, *self._spared]

    def _spare(self, case: Facts, verdict: Verdict, spared: Verdict) -> None:
        self._spared.append(PlanItem(Action.SPARE, case, spared.rule, f"{verdict.reason}, but {spared.reason}"))


def _candidate(row: Row[Any]) -> Candidate:
    shared = row.shared_at is not None
    return Candidate(
        facts_of(row), row.query, row.embedder, _vector(row.vector), row.user_id, bank=row.bank, shared=shared
    )


def _vector(sent: memoryview | None) -> Vector | None:
    return None if sent is None else from_wire(sent)
