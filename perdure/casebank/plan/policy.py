"""The pruning policy: which cases are removed or archived, which are spared, and why. Pure functions.

Three pruning rules apply in order: low performance, duplicates, inactivity. Each rule applies to the cases that the
earlier rules left. The safety rules (`protection`) override all three. `compute` calls these functions to make the
plan. `runs.apply` calls them again for each case, while it holds a lock on the case's row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from perdure.settings import CasebankSettings


class Rule(StrEnum):
    """Why a case is removed or archived, or why it is spared."""

    LOW_PERFORMANCE = "low_performance"
    DUPLICATE = "duplicate"
    INACTIVE = "inactive"

    RECENT_ACCESS = "recent_access"
    RECENTLY_RESTORED = "recently_restored"
    PROTECTED_USAGE = "protected_usage"
    EXEMPT_USAGE = "exempt_usage"
    DIFFERENT = "different"
    CHANGED = "changed"


class Action(StrEnum):
    """What the plan does with a case."""

    REMOVE = "remove"
    MERGE = "merge"
    ARCHIVE = "archive"
    SPARE = "spare"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a case that the policy uses. `success_rate` is in percent; `None` while unknown."""

    case_id: str
    usage_count: int
    success_rate: float | None
    last_accessed_at: datetime | None
    created_at: datetime
    restored_at: datetime | None = None

    @property
    def last_active_at(self) -> datetime:
        return self.last_accessed_at or self.created_at


@dataclass(frozen=True, slots=True)
class Finding:
    """The decision of one rule on one case, and the reason as text."""

    rule: Rule
    reason: str


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

    @property
    def case_id(self) -> str:
        return self.facts.case_id


def low_performance(case: Facts, limits: CasebankSettings) -> Finding | None:
    """The verdict on a low performer; `None` for any other case.

    A low performer has more than `low_success_min_usage` uses, and a known rate below `low_success_percent`.
    """
    if case.success_rate is None or case.usage_count <= limits.low_success_min_usage:
        return None
    if case.success_rate >= limits.low_success_percent:
        return None
    return Finding(
        Rule.LOW_PERFORMANCE,
        f"succeeds in {case.success_rate:.4g} % of {case.usage_count} uses, under {limits.low_success_percent:g} %",
    )


def inactivity(case: Facts, limits: CasebankSettings, now: datetime) -> Finding | None:
    """The verdict if `case.last_active_at` is more than `inactive_days` ago; `None` otherwise."""
    if now - case.last_active_at <= timedelta(days=limits.inactive_days):
        return None
    since = "not accessed since" if case.last_accessed_at else "never accessed since it was created on"
    return Finding(
        Rule.INACTIVE, f"{since} {case.last_active_at.date().isoformat()}, more than {limits.inactive_days} days ago"
    )


def exemption(case: Facts, limits: CasebankSettings) -> Finding | None:
    """The verdict that spares an inactive case with more than `inactive_exempt_usage` uses; `None` otherwise."""
    if case.usage_count <= limits.inactive_exempt_usage:
        return None
    return Finding(Rule.EXEMPT_USAGE, f"used {case.usage_count} times, more than {limits.inactive_exempt_usage}")


def protection(case: Facts, limits: CasebankSettings, now: datetime) -> Finding | None:
    """The verdict of the safety rule that spares the case from all three pruning rules; `None` if no safety rule does.

    A time in the future counts as recent.
    """
    recent = timedelta(days=limits.recent_access_days)
    if case.usage_count > limits.protected_usage:
        return Finding(Rule.PROTECTED_USAGE, f"used {case.usage_count} times, more than {limits.protected_usage}")
    if case.last_accessed_at is not None and now - case.last_accessed_at <= recent:
        return Finding(Rule.RECENT_ACCESS, f"accessed within {limits.recent_access_days} days")
    if case.restored_at is not None and now - case.restored_at <= recent:
        return Finding(Rule.RECENTLY_RESTORED, f"restored within {limits.recent_access_days} days")
    return None


def keeper_order(case: Facts) -> tuple[int, bool, float, datetime, str]:
    """Sort key, best keeper first: higher usage, then higher rate (unknown last), then higher age, then case id."""
    known = case.success_rate is not None
    return -case.usage_count, not known, -(case.success_rate or 0.0), case.created_at, case.case_id


def weight(case: Facts) -> int:
    return case.usage_count if case.success_rate is not None else 0


def merged(keeper: Facts, losers: Iterable[Facts], keeper_weight: int | None = None) -> Facts:
    """The keeper's facts after the merge.

    The usage is the sum, the last access is the latest, and the rate is the mean of the known rates, weighted by usage.
    `keeper_weight` is the weight of the keeper's rate in the mean; the default is `weight(keeper)`.
    """
    absorbed = sorted(losers, key=keeper_order)
    rated = [(each.success_rate, weight(each)) for each in absorbed if each.success_rate is not None]
    if keeper.success_rate is not None:
        rated.append((keeper.success_rate, weight(keeper) if keeper_weight is None else keeper_weight))
    accesses = [each.last_accessed_at for each in (keeper, *absorbed) if each.last_accessed_at is not None]
    return replace(
        keeper,
        usage_count=keeper.usage_count + sum(each.usage_count for each in absorbed),
        success_rate=_mean(rated),
        last_accessed_at=max(accesses, default=None),
    )


def _mean(rated: list[tuple[float, int]]) -> float | None:
    """The mean of the rates, weighted by the counts; unweighted if all counts are 0. The order does not matter."""
    if not rated:
        return None
    uses = sum(count for _, count in rated)
    if uses == 0:
        mean = math.fsum(rate for rate, _ in rated) / len(rated)
    else:
        mean = math.fsum(rate * count for rate, count in rated) / uses
    return min(max(mean, min(rate for rate, _ in rated)), max(rate for rate, _ in rated))


def unchanged(planned: Facts, current: Facts) -> bool:
    """Whether a case's usage, last access and rate equal the planned values. Rates may differ by a rounding error."""
    if (planned.success_rate is None) != (current.success_rate is None):
        return False
    return (
        planned.usage_count == current.usage_count
        and planned.last_accessed_at == current.last_accessed_at
        and math.isclose(planned.success_rate or 0.0, current.success_rate or 0.0, rel_tol=1e-9, abs_tol=1e-9)
    )
