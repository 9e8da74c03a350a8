"""The plan: what goes, what is spared, and why. One computation for the dry run and the run.

The same cases give the same plan, in the same order, whatever the order in which they come
and the size of the pages and batches. What it keeps in memory is some fifty bytes a case and
its id, a few blocks, and the plan itself; vectors and texts are in temporary files.
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
from perdure.casebank.plan.duplicates import Found, Group, Step
from perdure.casebank.plan.policy import Action, Facts, Rule, Verdict
from perdure.database.engine import Executor
from perdure.settings import CasebankSettings, CaseScope

_Key = tuple[str, int]
"""Of vectors that can be compared: their embedder and size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active case, as the planner reads it."""

    facts: Facts
    query: str
    embedder: str | None
    vector: Vector | None
    user_id: str | None = None
    bank: str = COMMON
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the plan. `facts` are what it was decided on, merges of this plan included.

    `keeper_weight` is the number of uses that the keeper's own rate speaks for.
    """

    action: Action
    facts: Facts
    rule: Rule
    reason: str
    keeper_id: str | None = None
    similarity: float | None = None
    keeper_weight: int | None = None


def read_candidates(executor: Executor, page: int) -> Iterator[list[Candidate]]:
    """The active cases, a page at a time. Each page is a statement of its own: nobody waits for the reader."""
    after = ""
    while rows := executor.run(queries.CANDIDATES, {"after": after, "most": page}):
        yield [_candidate(row) for row in rows]
        after = rows[-1].case_id


def seen_by(author: str | None, scope: CaseScope) -> str | None:
    """Who sees a case of this author: the author alone, or with the scope `all` the author's tenant."""
    return author if scope is CaseScope.USER else tenant_of(author)


def facts_of(row: queries.CaseRow) -> Facts:
    """What the policy knows of a case, from any row that has it."""
    return Facts(row.case_id, row.usage_count, row.success_rate, row.last_accessed_at, row.created_at, row.restored_at)


def compute(
    pages: Iterable[Sequence[Candidate]], limits: CasebankSettings, now: datetime, total: int, step: Step
) -> list[Item]:
    """The plan for these cases at the time `now`. `total` says roughly how many cases there are."""
    planner = _Planner(limits, now)
    with ExitStack() as files:
        groups: dict[_Key, Group] = {}
        read = 0
        for page in pages:
            for candidate in page:
                planner.consider(candidate, groups, files)
            read += len(page)
            step(read, total + read)
        for key in sorted(groups):
            found = groups[key].duplicates(limits, planner.protection, lambda done, of: step(read + done, read + of))
            planner.merge(groups[key], found)
    return planner.items()


class _Planner:
    """The three rules in their order, over cases that come one by one."""

    def __init__(self, limits: CasebankSettings, now: datetime) -> None:
        self._limits = limits
        self._now = now
        self._removed: list[Item] = []
        self._merged: list[Item] = []
        self._archived: list[Item] = []
        self._spared: list[Item] = []

    def protection(self, case: Facts) -> Verdict | None:
        """The safety rule that speaks for the case."""
        return policy.protection(case, self._limits, self._now)

    def consider(self, candidate: Candidate, groups: dict[_Key, Group], files: ExitStack) -> None:
        """Remove a low performer; put what is left with those that it can be compared with, if any."""
        case, vector = candidate.facts, candidate.vector
        verdict = policy.low_performance(case, self._limits)
        if verdict is not None:
            protected = self.protection(case)
            if protected is None:
                self._removed.append(Item(Action.REMOVE, case, verdict.rule, verdict.reason))
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
        """Whose prompts of which agents the case may enter: only cases with the same readers are compared."""
        readers = seen_by(candidate.user_id, self._limits.scope)
        shared = self._limits.scope is CaseScope.USER and candidate.shared
        return json.dumps([candidate.bank, readers, shared])

    def merge(self, group: Group, found: Found) -> None:
        """Take the group's duplicates into the plan, and judge what is left of it by its merged values."""
        roster = group.roster
        losers: dict[int, list[int]] = defaultdict(list)
        gone: set[int] = set()
        for pair in found.absorbed:
            losers[pair.keeper].append(pair.loser)
            gone.add(pair.loser)
            keeper = roster[pair.keeper]
            self._merged.append(
                Item(
                    Action.MERGE,
                    roster[pair.loser],
                    Rule.DUPLICATE,
                    f"a duplicate of {keeper.case_id} (similarity {pair.similarity:.4f})",
                    keeper.case_id,
                    pair.similarity,
                    policy.weight(keeper),
                )
            )
        for pair, why in found.spared:
            keeper_id = roster[pair.keeper].case_id
            reason = f"near {keeper_id} (similarity {pair.similarity:.4f}), but {why.reason}"
            self._spared.append(Item(Action.SPARE, roster[pair.loser], why.rule, reason, keeper_id, pair.similarity))
        for number in range(len(roster)):
            if number in losers:
                self.judge_activity(policy.merged(roster[number], [roster[loser] for loser in losers[number]]))
            elif number not in gone:
                self.judge_activity(roster[number])

    def judge_activity(self, case: Facts) -> None:
        """Archive a case that sleeps, unless something speaks for it."""
        verdict = policy.inactivity(case, self._limits, self._now)
        if verdict is None:
            return
        spared = self.protection(case) or policy.exemption(case, self._limits)
        if spared is None:
            self._archived.append(Item(Action.ARCHIVE, case, verdict.rule, verdict.reason))
        else:
            self._spare(case, verdict, spared)

    def items(self) -> list[Item]:
        """The plan in the order in which it is applied; what is spared comes last."""
        for part in (self._removed, self._archived):
            part.sort(key=lambda item: item.facts.case_id)
        self._spared.sort(key=lambda item: (item.facts.case_id, item.rule, item.reason))
        return [*self._removed, *self._merged, *self._archived, *self._spared]

    def _spare(self, case: Facts, verdict: Verdict, spared: Verdict) -> None:
        self._spared.append(Item(Action.SPARE, case, spared.rule, f"{verdict.reason}, but {spared.reason}"))


def _candidate(row: Row[Any]) -> Candidate:
    shared = row.shared_at is not None
    return Candidate(
        facts_of(row), row.query, row.embedder, _vector(row.vector), row.user_id, bank=row.bank, shared=shared
    )


def _vector(sent: memoryview | None) -> Vector | None:
    return None if sent is None else from_wire(sent)
