"""The planner, tested against a slow reference implementation that compares every pair of cases."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import timedelta
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.access.tenants import UserKey
from perdure.casebank.plan import duplicates, policy
from perdure.casebank.plan.compute import compute
from perdure.casebank.plan.cosines import cosine
from perdure.casebank.plan.duplicates import Content
from perdure.casebank.plan.policy import Action, Facts, PlanItem, Rule
from perdure.settings import CasebankSettings, CaseScope
from perdure.text import contradiction
from tests.casebank.bank import LIMITS, NOW, KnownCase, candidate, facts, unit


def planned(cases: Sequence[KnownCase], limits: CasebankSettings = LIMITS, page: int = 100) -> list[PlanItem]:
    """The plan for these cases."""
    pages = (cases[start : start + page] for start in range(0, len(cases), page))
    by_id = {each.facts.case_id: each.content for each in cases}

    def read(case_ids: Sequence[str]) -> dict[str, Content]:
        assert len(case_ids) <= limits.duplicate_batch
        return {case_id: by_id[case_id] for case_id in case_ids}

    return compute(pages, read, limits, NOW, total=len(cases), on_progress=lambda _done, _total: None)


def summary(items: Sequence[PlanItem]) -> list[tuple[Action, str, Rule, str | None]]:
    """Each item's action, case, rule and keeper."""
    return [(item.action, item.facts.case_id, item.rule, item.keeper_id) for item in items]


def reference(cases: Sequence[KnownCase], limits: CasebankSettings) -> set[tuple[Action, str, Rule, str | None]]:
    """The plan as the policy defines it, made by a slow reference implementation.

    The reference compares every pair in exact fractions. It shares only the code of the rules with the planner.
    """
    expected_items: set[tuple[Action, str, Rule, str | None]] = set()
    left: list[KnownCase] = []
    for each in cases:
        low = policy.low_performance(each.facts, limits)
        protected = policy.protection(each.facts, limits, NOW)
        if low and not protected:
            expected_items.add((Action.REMOVE, each.facts.case_id, Rule.LOW_PERFORMANCE, None))
            continue
        if low and protected:
            expected_items.add((Action.SPARE, each.facts.case_id, protected.rule, None))
        left.append(each)
    for case in _after_merging(left, limits, expected_items):
        if policy.inactivity(case, limits, NOW):
            why = policy.protection(case, limits, NOW) or policy.exemption(case, limits)
            expected_items.add(
                (Action.SPARE, case.case_id, why.rule, None)
                if why
                else (Action.ARCHIVE, case.case_id, Rule.INACTIVE, None)
            )
    return expected_items


def _after_merging(
    cases: Sequence[KnownCase], limits: CasebankSettings, expected_items: set[tuple[Action, str, Rule, str | None]]
) -> list[Facts]:
    left = sorted(cases, key=lambda each: policy.keeper_order(each.facts))
    kept: list[Facts] = []
    spared: dict[str, tuple[Action, str, Rule, str | None]] = {}
    while left:
        keeper, *others = left
        left, absorbed = [], []
        for other in others:
            name = other.facts.case_id
            if not _alike(keeper, other, limits):
                left.append(other)
            elif limits.duplicate_guard and contradiction.difference(keeper.query, other.query):
                spared.setdefault(name, (Action.SPARE, name, Rule.DIFFERENT, keeper.facts.case_id))
                left.append(other)
            elif protected := policy.protection(other.facts, limits, NOW):
                if name not in spared or spared[name][2] is Rule.DIFFERENT:
                    spared[name] = (Action.SPARE, name, protected.rule, keeper.facts.case_id)
                left.append(other)
            else:
                absorbed.append(other.facts)
                spared.pop(name, None)
                expected_items.add((Action.MERGE, name, Rule.DUPLICATE, keeper.facts.case_id))
        kept.append(policy.merged(keeper.facts, absorbed) if absorbed else keeper.facts)
    expected_items.update(spared.values())
    return kept


def _alike(left: KnownCase, right: KnownCase, limits: CasebankSettings) -> bool:
    """Whether the cases' cosine is above the threshold, in exact arithmetic: (a.b)^2 > t^2 (a.a)(b.b) and a.b > 0."""
    if left.embedder != right.embedder or left.vector is None or right.vector is None:
        return False
    if limits.scope is CaseScope.USER and left.user_id != right.user_id:
        return False
    if len(left.vector) != len(right.vector):
        return False
    a, b = ([Fraction(float(each)) for each in vector] for vector in (left.vector, right.vector))
    inner = sum(x * y for x, y in zip(a, b, strict=True))
    squares = sum(x * x for x in a) * sum(y * y for y in b)
    return inner > 0 and inner * inner > Fraction(str(limits.duplicate_similarity)) ** 2 * squares


QUERIES = ("how to reset it", "how to not reset it", "reset it in 3 days", "reset it in 5 days", "how to restart it")
DIRECTIONS = [unit(random.Random(seed), 6) for seed in range(4)]  # noqa: S311 (test data)


@st.composite
def banks(draw: st.DrawFn) -> list[KnownCase]:
    """Up to 14 cases, with many ties, near duplicates, boundary values and incomparable cases."""
    made = []
    for number in range(draw(st.integers(0, 14))):
        idle = draw(st.sampled_from([0.5, 7, 8, 30, 90, 91, 200]))
        case = facts(
            f"case {number:02}",
            usage=draw(st.sampled_from([0, 10, 11, 60, 100, 101, 500, 501])),
            rate=draw(st.sampled_from([None, 0.0, 29.9, 30.0, 80.0])),
            idle_days=idle,
            created_at=NOW - timedelta(days=draw(st.sampled_from([300, 400]))),
            restored_at=draw(st.sampled_from([None, None, None, NOW - timedelta(days=3)])),
        )
        direction = np.array(draw(st.sampled_from(DIRECTIONS)))
        nudge = np.array(draw(st.sampled_from(DIRECTIONS)))
        amount = draw(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.35]))
        length = draw(st.sampled_from([1.0, 0.01, 7.0]))
        vector = None if draw(st.integers(0, 9)) == 0 else list(length * (direction + amount * nudge))
        embedder = draw(st.sampled_from(["hash:6", "hash:6", "hash:6", "other:6"]))
        author = draw(st.sampled_from([None, None, UserKey("ana"), UserKey("ana"), UserKey("bob")]))
        made.append(candidate(case, vector, draw(st.sampled_from(QUERIES)), embedder, author))
    return made


@pytest.mark.long
@settings(max_examples=100)
@given(banks(), st.booleans(), st.sampled_from(CaseScope))
def test_the_plan_equals_the_references(cases: list[KnownCase], guard: bool, scope: CaseScope) -> None:
    """The planner makes the same plan as the reference, despite its optimizations."""
    limits = CasebankSettings(duplicate_guard=guard, scope=scope)
    assert set(summary(planned(cases, limits))) == reference(cases, limits)


@pytest.mark.long
@settings(max_examples=60)
@given(banks(), st.randoms(use_true_random=False), st.integers(1, 100), st.integers(1, 20), st.integers(1, 14))
def test_the_same_data_give_the_same_plan(
    cases: list[KnownCase], shuffle: random.Random, batch: int, page: int, room: int
) -> None:
    """The order of rows, the page size, the batch size and the memory for vectors do not change the plan."""
    expected = planned(cases)
    shuffle.shuffle(cases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_KEPT_BYTES", room * 6 * 8)
        assert planned(cases, CasebankSettings(load_percent=100, duplicate_batch=batch), page) == expected


def test_0_95_is_no_duplicate_and_the_next_number_is() -> None:
    """Two cases with a cosine of exactly 0.95 are not duplicates. Two cases with a slightly higher cosine are."""
    keeper, at = [20.0, 0, 0, 0, 0], [19.0, 6, 1, 1, 1]
    over = [float(np.nextafter(np.float32(19), np.float32(20))), 6, 1, 1, 1]
    assert cosine(np.asarray(keeper, dtype=np.float32), np.asarray(at, dtype=np.float32)) == 0.95
    cases = [candidate(facts("k", usage=2), keeper), candidate(facts("a"), at)]
    assert planned(cases) == []
    cases[1] = candidate(facts("a"), over)
    assert summary(planned(cases)) == [(Action.MERGE, "a", Rule.DUPLICATE, "k")]


def test_a_chain_is_cut_where_the_keeper_is_no_longer_near() -> None:
    """A case stays if it is similar to a merged case but not to that case's keeper."""
    step = math.acos(0.96)
    chain = [
        candidate(facts(name, usage=usage), [math.cos(at * step), math.sin(at * step), 0, 0])
        for name, usage, at in [("a", 9, 0), ("b", 8, 1), ("c", 7, 2)]
    ]
    assert summary(planned(chain)) == [(Action.MERGE, "b", Rule.DUPLICATE, "a")]


def test_what_cannot_be_compared_is_no_duplicate() -> None:
    """Cases with different embedders, different vector sizes or no usable vector are never duplicates."""
    vector = [1.0, 2.0, 3.0, 4.0]
    cases = [
        candidate(facts("a", usage=9), vector),
        candidate(facts("b"), vector, embedder="other:4"),
        candidate(facts("c"), [*vector, 0.0]),
        candidate(facts("d"), None),
        candidate(facts("e"), [0.0] * 4),
        candidate(facts("f"), [math.nan, 0, 0, 0]),
        candidate(facts("g"), [0.0] * 4),
    ]
    assert planned(cases) == []


@pytest.mark.parametrize(
    "now", [None, Content("how to do it", "other:4", np.ones(4, np.float32)), Content("how to do it", "hash:4", None)]
)
def test_a_case_that_changes_while_the_plan_is_made_is_not_compared(now: Content | None) -> None:
    """The planner reads a case's vector after the case itself, when the vector may be gone or another embedder's."""
    cases = [candidate(facts(name, usage=usage), [1.0] * 4) for name, usage in [("a", 9), ("b", 8), ("c", 7)]]
    contents = {each.facts.case_id: each.content for each in cases} | ({"b": now} if now else {})
    if now is None:
        del contents["b"]
    items = compute([cases], lambda _ids: contents, LIMITS, NOW, total=3, on_progress=lambda _done, _total: None)
    assert summary(items) == [(Action.MERGE, "c", Rule.DUPLICATE, "a")]


@pytest.mark.long
def test_ten_thousand_identical_cases_collapse_to_one() -> None:
    """Ten thousand identical cases merge into one, without comparing or storing their 50 million pairs one by one."""
    cases = [candidate(facts(f"{number:05}", usage=1, rate=50.0), [1.0, 2.0, 3.0, 4.0]) for number in range(10_000)]
    items = planned(cases)
    assert len(items) == 9_999
    assert {item.keeper_id for item in items} == {"00000"}


LETTERS = "abcfghijkl"  # without d, e and s, so that no spelt number ends in an English suffix


def _spelt(number: int) -> str:
    return "".join(LETTERS[int(digit)] for digit in f"{number:03}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["numbers", "names", "protected"])
def test_near_cases_that_all_stay_are_not_compared_pair_by_pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If none of 700 similar cases is merged, the planner computes one exact cosine per case, not one per pair."""
    question = {
        "numbers": "where is order {0}".format,
        "names": "who is X{1}".format,
        "protected": "how to do it".format,
    }[kind]
    idle_days = 1 if kind == "protected" else 30
    cases = [
        candidate(facts(f"{number:04}", idle_days=idle_days), [1.0, 2.0, 3.0, 4.0], question(number, _spelt(number)))
        for number in range(700)
    ]
    compared = Mock(wraps=cosine)
    monkeypatch.setattr(duplicates, "cosine", compared)
    items = planned(cases)
    assert {(item.action, item.keeper_id) for item in items} == {(Action.SPARE, "0000")}
    assert len(items) == 699
    assert compared.call_count == 699
    if kind != "protected":
        assert planned(cases, CasebankSettings(duplicate_guard=False, load_percent=100))[0].action is Action.MERGE


def test_merged_values_decide_about_inactivity() -> None:
    """An inactive keeper is not archived if a merge gives it a more recent access or enough uses for the exemption."""
    vector = [1.0, 2.0, 3.0, 4.0]
    sleepers = [facts("a", usage=60, idle_days=100), facts("b", usage=50, idle_days=100)]
    items = planned([candidate(each, vector) for each in sleepers])
    assert summary(items) == [
        (Action.MERGE, "b", Rule.DUPLICATE, "a"),
        (Action.SPARE, "a", Rule.EXEMPT_USAGE, None),
    ]
    waker = facts("c", usage=1, idle_days=60)
    items = planned([candidate(sleepers[0], vector), candidate(waker, vector)])
    assert summary(items) == [(Action.MERGE, "c", Rule.DUPLICATE, "a")]


def test_a_removed_case_takes_part_in_nothing_further() -> None:
    """A case that is removed as a low performer is neither merged nor a keeper."""
    vector = [1.0, 2.0, 3.0, 4.0]
    low = candidate(facts("low", usage=50, rate=10.0), vector)
    good = candidate(facts("good", usage=5, rate=90.0), vector)
    assert summary(planned([low, good])) == [(Action.REMOVE, "low", Rule.LOW_PERFORMANCE, None)]


@pytest.mark.long
@pytest.mark.parametrize("room", [50, 240])
@pytest.mark.parametrize("dimensions", [2, 64, 130, 384, 1_536])
def test_products_of_blocks_rule_out_nothing_that_is_near(
    dimensions: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing blocks in float32 misses no pair above the threshold, even if not all kept vectors are in memory."""
    monkeypatch.setattr(duplicates, "_COLUMNS", 64)
    monkeypatch.setattr(duplicates, "_KEPT_BYTES", room * dimensions * 8)
    rng = np.random.default_rng(dimensions)
    count = 240
    centres = rng.normal(size=(count // 4, dimensions))
    centres[: count // 8] += 3  # half of the vectors lie on one side of space, as real embeddings do
    vectors = np.concatenate(
        [centres + rng.normal(size=centres.shape) * spread for spread in (0.0, 0.1, 0.3, 0.34)]
    ).astype(np.float32)
    cases = [candidate(facts(f"{number:04}", usage=number), vector.tolist()) for number, vector in enumerate(vectors)]
    wide = vectors.astype(np.float64)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    near = wide @ wide.T > 0.95
    left, expected = np.ones(count, dtype=bool), set()
    for keeper in range(count - 1, -1, -1):  # in keeper order: the most used first
        if left[keeper]:
            for loser in np.flatnonzero(near[keeper, :keeper] & left[:keeper]).tolist():
                left[loser] = False
                expected.add((f"{loser:04}", f"{keeper:04}"))
    items = planned(cases, CasebankSettings(protected_usage=10_000, duplicate_batch=16))
    assert {(item.facts.case_id, item.keeper_id) for item in items if item.action is Action.MERGE} == expected
    assert len(expected) > count // 10
