"""The rules of the pruning policy, on both sides of each threshold."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.casebank.plan import policy
from perdure.casebank.plan.policy import Facts, Rule
from tests.casebank.bank import LIMITS, NOW, facts

MICROSECOND = timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("usage", "rate", "goes"),
    [
        (11, 29.999, True),
        (11, 30.0, False),
        (10, 0.0, False),
        (11, 0.0, True),
        (11, None, False),
        (0, 0.0, False),
    ],
)
def test_low_performance_boundaries(usage: int, rate: float | None, goes: bool) -> None:
    """A case with a rate below 30 % is removed after more than 10 uses. An unknown rate is not low."""
    assert (policy.low_performance(facts(usage=usage, rate=rate), LIMITS) is not None) is goes


@pytest.mark.parametrize(
    ("idle", "goes"),
    [(timedelta(days=90), False), (timedelta(days=90) + MICROSECOND, True), (-timedelta(days=1), False)],
)
def test_inactivity_boundaries(idle: timedelta, goes: bool) -> None:
    """A case is inactive if it was not accessed for more than 90 days."""
    assert (policy.inactivity(facts(last_accessed_at=NOW - idle), LIMITS, NOW) is not None) is goes


def test_a_case_that_was_never_accessed_counts_from_its_creation() -> None:
    """A case that was never accessed is inactive if it was created more than 90 days ago."""
    young = facts(last_accessed_at=None, created_at=NOW - timedelta(days=90))
    assert policy.inactivity(young, LIMITS, NOW) is None
    assert policy.inactivity(replace(young, created_at=young.created_at - MICROSECOND), LIMITS, NOW) is not None


@pytest.mark.parametrize(("usage", "stays"), [(100, False), (101, True)])
def test_the_exemption_from_inactivity(usage: int, stays: bool) -> None:
    """A case with more than 100 uses is exempt from the inactivity rule."""
    assert (policy.exemption(facts(usage=usage), LIMITS) is not None) is stays


@pytest.mark.parametrize(("usage", "stays"), [(500, False), (501, True)])
def test_protection_by_usage(usage: int, stays: bool) -> None:
    """More than 500 uses protect a case from every rule."""
    verdict = policy.protection(facts(usage=usage), LIMITS, NOW)
    assert (verdict is not None and verdict.rule is Rule.PROTECTED_USAGE) is stays


@pytest.mark.parametrize(
    ("idle", "stays"),
    [
        (timedelta(days=7), True),
        (timedelta(days=7) + MICROSECOND, False),
        (-timedelta(days=365), True),
    ],
)
def test_protection_by_access(idle: timedelta, stays: bool) -> None:
    """An access within the last 7 days protects a case. An access time in the future counts as now."""
    verdict = policy.protection(facts(last_accessed_at=NOW - idle), LIMITS, NOW)
    assert (verdict is not None and verdict.rule is Rule.RECENT_ACCESS) is stays


@pytest.mark.parametrize(("since", "stays"), [(timedelta(days=7), True), (timedelta(days=7) + MICROSECOND, False)])
def test_protection_by_restoring(since: timedelta, stays: bool) -> None:
    """A restored case is protected for 7 days, so that it can be used before a run archives it again."""
    verdict = policy.protection(facts(restored_at=NOW - since), LIMITS, NOW)
    assert (verdict is not None and verdict.rule is Rule.RECENTLY_RESTORED) is stays


def test_the_order_of_keepers() -> None:
    """The keeper of a group of duplicates is the case with the most uses.

    The higher rate breaks a tie, then the greater age, then the lower id. An unknown rate is the lowest.
    """
    old = NOW - timedelta(days=500)
    ranked = [
        facts("z", usage=9, rate=None),
        facts("y", usage=8, rate=90.0),
        facts("x", usage=8, rate=0.0),
        facts("w", usage=8, rate=None, created_at=old),
        facts("a", usage=8, rate=None),
        facts("b", usage=8, rate=None),
    ]
    assert sorted([*ranked[3:], *ranked[:3]], key=policy.keeper_order) == ranked


def test_a_merge_adds_usage_weighs_rates_and_takes_the_later_access() -> None:
    """The merged rate is the mean of the known rates, weighted by uses. An unknown rate does not count as 0."""
    keeper = facts("k", usage=30, rate=80.0, idle_days=50)
    merged = policy.merged(keeper, [facts("a", usage=10, rate=40.0, idle_days=20), facts("b", usage=5, idle_days=60)])
    assert (merged.usage_count, merged.success_rate) == (45, 70.0)
    assert merged.last_accessed_at == NOW - timedelta(days=20)
    assert policy.merged(facts(usage=50), [facts("a", usage=1, rate=20.0)]).success_rate == 20.0
    assert policy.merged(facts(usage=50), [facts("a", usage=1)]).success_rate is None
    assert policy.merged(facts(rate=10.0), [facts("a", rate=20.0)]).success_rate == 15.0
    assert policy.merged(facts(last_accessed_at=None), [facts("a", last_accessed_at=None)]).last_accessed_at is None


RATED = st.builds(
    facts,
    case_id=st.text(min_size=1, max_size=4),
    usage=st.integers(0, 10**6),
    rate=st.none() | st.floats(0, 100),
)


@given(RATED, st.lists(RATED, max_size=6), st.randoms(use_true_random=False))
def test_a_merge_is_the_same_in_any_order_and_stays_within_bounds(
    keeper: Facts, losers: list[Facts], shuffle: object
) -> None:
    """The order of the losers does not change a merge. The merged rate lies between the lowest and the highest rate."""
    merged = policy.merged(keeper, losers)
    shuffle.shuffle(losers)  # type: ignore[attr-defined]
    assert policy.merged(keeper, losers) == merged
    rates = [each.success_rate for each in (keeper, *losers) if each.success_rate is not None]
    assert (merged.success_rate is None) == (not rates)
    if merged.success_rate is not None:
        assert min(rates) <= merged.success_rate <= max(rates)
