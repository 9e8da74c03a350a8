"""Computes the plan of a run or a dry run.

The plan depends only on the cases, the settings and the time. The order of the cases and the sizes of pages and batches
do not affect the plan.

Memory holds the plan and a few hundred bytes for each case. Questions and vectors are read when they are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from perdure.access.tenants import UserKey, tenant_of
from perdure.casebank import COMMON
from perdure.casebank.plan import policy, queries
from perdure.casebank.plan.cosines import from_wire
from perdure.casebank.plan.duplicates import Content, Duplicates, Group, Pair, Read, find
from perdure.casebank.plan.policy import Action, Facts, Finding, PlanItem, Rule
from perdure.database.engine import Executor
from perdure.settings import CasebankSettings, CaseScope

OnProgress = Callable[[int, int], None]
"""Called after each piece of work with the work done and the total. May report, pause, or raise to stop the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCandidate:
    """An active case, with the values that the planner needs. `dimensions` is the size of its vector."""

    facts: Facts
    embedder: str | None
    dimensions: int | None
    user_id: UserKey | None = None
    bank: str = COMMON
    shared: bool = False


def read_candidates(executor: Executor, page: int) -> Iterator[list[PruneCandidate]]:
    """The active cases, a page at a time. Each page is a separate statement, so no transaction stays open."""
    after = ""
    while rows := executor.run(queries.CANDIDATES, {"after": after, "most": page}):
        yield [
            PruneCandidate(
                facts=facts_of(row),
                embedder=row.embedder,
                dimensions=row.dimensions,
                user_id=None if row.user_id is None else UserKey(row.user_id),
                bank=row.bank,
                shared=row.shared_at is not None,
            )
            for row in rows
        ]
        after = rows[-1].case_id


def read_contents(executor: Executor, case_ids: Sequence[str]) -> dict[str, Content]:
    """The questions and vectors of the active cases with these ids, by id."""
    rows = executor.run(queries.CONTENTS, {"case_ids": list(case_ids)})
    return {
        row.case_id: Content(row.query, row.embedder, None if row.vector is None else from_wire(row.vector))
        for row in rows
    }


def seen_by(author: UserKey | None, scope: CaseScope) -> str | None:
    """Who sees an unshared case: the user key of its author or, with the scope `all`, the author's tenant."""
    return author if scope is CaseScope.USER else tenant_of(author)


def facts_of(row: queries.CaseRow) -> Facts:
    return Facts(row.case_id, row.usage_count, row.success_rate, row.last_accessed_at, row.created_at, row.restored_at)


def compute(
    pages: Iterable[Sequence[PruneCandidate]],
    read: Read,
    limits: CasebankSettings,
    now: datetime,
    *,
    total: int,
    on_progress: OnProgress,
) -> list[PlanItem]:
    """The plan for the cases in `pages` at the time `now`. `total` is an estimated number of cases."""
    planner = _Planner(limits, now)
    left: list[PruneCandidate] = []
    seen = 0
    for page in pages:
        left += [candidate for candidate in page if not planner.removes(candidate.facts)]
        seen += len(page)
        on_progress(seen, max(total, seen) + len(left))
    total = seen + len(left)

    def on_compared(compared: int) -> None:
        on_progress(seen + compared, total)

    for group in _groups(left, limits.scope):
        planner.merge(find(group, read, limits, planner.protection, on_compared))
        seen += len(group.cases)
    for candidate in left:
        planner.judge_activity(candidate.facts)
    return planner.items()


def _groups(candidates: Iterable[PruneCandidate], scope: CaseScope) -> list[Group]:
    """The cases with a vector, by embedder and size of the vectors, bank, and the users whose prompts they may enter.

    Merging cases of two groups would hide a case from some users. A group of one case is left out.
    """
    groups: dict[tuple[object, ...], Group] = {}
    for each in candidates:
        if each.embedder is not None and each.dimensions is not None:
            readers = (each.bank, seen_by(each.user_id, scope), scope is CaseScope.USER and each.shared)
            empty = Group(each.embedder, each.dimensions, [])
            groups.setdefault((each.embedder, each.dimensions, *readers), empty).cases.append(each.facts)
    return [group for group in groups.values() if len(group.cases) > 1]


class _Planner:
    """Collects the plan's items."""

    def __init__(self, limits: CasebankSettings, now: datetime) -> None:
        self._limits = limits
        self._now = now
        self._removed: list[PlanItem] = []
        self._pairs: list[Pair] = []
        self._absorbed: dict[str, list[Facts]] = defaultdict(list)
        self._gone: set[str] = set()
        self._archived: list[PlanItem] = []
        self._spared: list[PlanItem] = []

    def protection(self, case: Facts) -> Finding | None:
        return policy.protection(case, self._limits, self._now)

    def removes(self, case: Facts) -> bool:
        """Plan to remove a low performer, unless it is protected; returns whether the case is removed."""
        verdict = policy.low_performance(case, self._limits)
        if verdict is None:
            return False
        if (protected := self.protection(case)) is not None:
            self._spare(case, verdict, protected)
            return False
        self._removed.append(PlanItem(Action.REMOVE, case, verdict.rule, verdict.reason))
        return True

    def merge(self, duplicates: Duplicates) -> None:
        """Add a group's duplicates to the plan."""
        self._pairs += duplicates.absorbed
        for pair in duplicates.absorbed:
            self._absorbed[pair.keeper.case_id].append(pair.loser)
            self._gone.add(pair.loser.case_id)
        for pair, why in duplicates.spared:
            keeper_id = pair.keeper.case_id
            reason = f"near {keeper_id} (similarity {pair.similarity:.4f}), but {why.reason}"
            self._spared.append(PlanItem(Action.SPARE, pair.loser, why.rule, reason, keeper_id, pair.similarity))

    def judge_activity(self, case: Facts) -> None:
        """Plan to archive an inactive case that is not merged, unless it is protected or exempt."""
        if case.case_id in self._gone:
            return
        if case.case_id in self._absorbed:
            case = policy.merged(case, self._absorbed[case.case_id])
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
        self._pairs.sort(key=lambda pair: (policy.keeper_order(pair.keeper), policy.keeper_order(pair.loser)))
        self._spared.sort(key=lambda item: (item.facts.case_id, item.rule, item.reason))
        return [*self._removed, *map(_merge, self._pairs), *self._archived, *self._spared]

    def _spare(self, case: Facts, verdict: Finding, spared: Finding) -> None:
        self._spared.append(PlanItem(Action.SPARE, case, spared.rule, f"{verdict.reason}, but {spared.reason}"))


def _merge(pair: Pair) -> PlanItem:
    keeper, similarity = pair.keeper, pair.similarity
    reason = f"a duplicate of {keeper.case_id} (similarity {similarity:.4f})"
    weight = policy.weight(keeper)
    return PlanItem(Action.MERGE, pair.loser, Rule.DUPLICATE, reason, keeper.case_id, similarity, weight)
