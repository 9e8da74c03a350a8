"""Memories decay by the same formula in Python and in SQL. Repeated runs give the same values as one run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.ids import new_id
from perdure.memory.decay import (
    ARCHIVE_AFTER_DAYS,
    ARCHIVE_BELOW,
    FLOOR,
    KIND_RATES,
    NOTICEABLE,
    DecayResult,
    decay,
    decay_rate,
    decayed,
    is_faded,
)
from tests.turns.harness import Harness

DAY_S = 86_400

KINDS = st.sampled_from(sorted(KIND_RATES))
COUNTS = st.integers(0, 10_000)
IMPORTANCES = st.floats(0, 1)
HOURS = st.floats(0, 1e7)

FORM = """
    INSERT INTO memories (memory_id, user_id, kind, content, importance, value, access_count, last_accessed_at,
                          channels, origin, created_at, valid_from)
    VALUES (%(memory_id)s, 'ana', %(kind)s, 'something', %(importance)s, %(importance)s, %(accesses)s,
            %(accessed_at)s, %(channels)s, 'consolidation', perdure_now(), perdure_now())
"""


def form(harness: Harness, kind: str = "fact", importance: float = 0.5, **more: int) -> object:
    """Store a memory with the given numbers of `channels`, `accesses` and `connections`; returns its id."""
    memory_id = new_id(harness.clock)
    harness.sql("INSERT INTO users (user_id, created_at) VALUES ('ana', perdure_now()) ON CONFLICT DO NOTHING")
    harness.sql(
        FORM,
        memory_id=memory_id,
        kind=kind,
        importance=importance,
        accesses=more.get("accesses", 0),
        accessed_at=harness.clock.now() if more.get("accesses") else None,
        channels=[f"channel {number}" for number in range(more.get("channels", 1))],
    )
    entity = new_id(harness.clock)
    harness.sql(
        "INSERT INTO entities (entity_id, user_id, name, key, created_at) "
        "VALUES (%(entity)s, 'ana', 'it', %(key)s, perdure_now())",
        entity=entity,
        key=str(entity),
    )
    for number in range(more.get("connections", 0)):
        harness.sql(
            "INSERT INTO relations (source_id, predicate, target_id, memory_id, user_id, created_at) "
            "VALUES (%(entity)s, %(predicate)s, %(entity)s, %(memory_id)s, 'ana', perdure_now())",
            entity=entity,
            predicate=f"is {number}",
            memory_id=memory_id,
        )
    return memory_id


@given(KINDS, st.tuples(COUNTS, COUNTS, COUNTS), IMPORTANCES, HOURS)
def test_a_value_lies_between_the_floor_and_the_importance(
    kind: str, counts: tuple[int, int, int], importance: float, hours: float
) -> None:
    """A value lies between `FLOOR` times the importance and the importance, and never grows with age."""
    rate = decay_rate(kind, *counts)
    value = decayed(importance, rate, hours)
    assert FLOOR * importance <= value <= importance
    assert decayed(importance, rate, hours + 1) <= value
    assert decayed(importance, rate, 0) == importance


@given(KINDS, COUNTS, COUNTS, COUNTS)
def test_channels_accesses_and_connections_slow_decay(
    kind: str, channels: int, accesses: int, connections: int
) -> None:
    """More channels, accesses or connections never speed up decay. With ten connections, a memory does not decay."""
    rate = decay_rate(kind, channels, accesses, connections)
    assert 0 <= decay_rate(kind, channels + 1, accesses, connections) <= rate
    assert decay_rate(kind, channels, accesses + 1, connections) <= rate
    assert decay_rate(kind, channels, accesses, connections + 1) <= rate
    assert (rate == 0) == (connections >= 10)
    assert decay_rate("fact", channels, accesses, 0) < decay_rate("conversation", channels, accesses, 0)


def test_the_formula_agrees_with_a_manual_calculation() -> None:
    """The formula agrees with a manual calculation for two channels, three accesses and two connections."""
    rate = decay_rate("fact", 2, 3, 2)
    assert rate == pytest.approx(0.0001210, rel=1e-3)
    assert decayed(0.8, rate, 1000) == pytest.approx(0.7088, rel=1e-3)
    assert decayed(0.8, decay_rate("conversation", 0, 0, 0), 10_000) == pytest.approx(0.24)
    assert decayed(0.8, rate, -5) == 0.8


@given(st.floats(0, 1), st.floats(0, 100), st.floats(0, 100))
def test_only_old_unread_memories_of_low_value_are_archived(value: float, age: float, unread: float) -> None:
    """A memory is archived only if its value is low, it is old, and it was not read for a long time."""
    assert is_faded(value, age, unread) == (value < ARCHIVE_BELOW and min(age, unread) > ARCHIVE_AFTER_DAYS)


def test_sql_and_python_agree(harness: Harness) -> None:
    """SQL and Python compute the same value for each kind, age and count."""
    formed = {}
    for kind in KIND_RATES:
        for counts in ((1, 0, 0), (3, 7, 2), (0, 0, 9), (2, 1000, 10), (1, 0, 12)):
            channels, accesses, connections = counts
            made = form(harness, kind, 0.9, channels=channels, accesses=accesses, connections=connections)
            formed[made] = decay_rate(kind, channels, accesses, connections)
    for hours in (0.5, 200, 5_000, 1_500_000):
        harness.move(hours * 3600)
        decay(harness.database)
        for row in harness.sql(
            "SELECT memory_id, value, extract(epoch FROM decayed_at - created_at)::float8 / 3600 AS hours "
            "FROM memories WHERE decayed_at IS NOT NULL"
        ):
            assert math.isclose(row.value, decayed(0.9, formed[row.memory_id], row.hours), rel_tol=1e-9)


def test_a_hundred_runs_decay_like_one(harness: Harness) -> None:
    """A hundred runs give the same value as one, because each run computes it from the importance and the age.

    Values that have not changed noticeably since their last write may differ by that much.
    """
    for kind in KIND_RATES:
        form(harness, kind, 0.7, connections=3)
    values = "SELECT value FROM memories ORDER BY memory_id"
    for _ in range(100):
        harness.move(3600)
        decay(harness.database)
    often = [row.value for row in harness.sql(values)]
    harness.sql("UPDATE memories SET value = importance, decayed_at = NULL")
    decay(harness.database)
    assert often == pytest.approx([row.value for row in harness.sql(values)], abs=NOTICEABLE * 0.7)
    assert max(often) < 0.7


def test_unchanged_memories_are_not_written(harness: Harness) -> None:
    """A run does not write a memory whose value stays the same: one at its floor, or one with ten connections."""
    form(harness, connections=10)
    form(harness, importance=0.4)
    harness.move(50_000 * 3600)
    assert decay(harness.database) == DecayResult(looked_at=2, changed=1)
    assert decay(harness.database) == DecayResult(looked_at=2)


_MANY = """
    INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                          valid_from)
    SELECT gen_random_uuid(), 'ana', (ARRAY['fact', 'preference', 'insight', 'conversation'])[1 + n %% 4], 'it',
           0.3 + n %% 7 * 0.1, 0.3 + n %% 7 * 0.1, '{cli}', 'tool', perdure_now() - make_interval(days => n %% 400),
           perdure_now()
    FROM generate_series(1, 20000) AS n
"""


@pytest.mark.long
def test_a_second_run_writes_almost_nothing(harness: Harness) -> None:
    """A run minutes after another writes only values that have just become noticeably different: nearly no row.

    Six hours later, a run writes a minority of the rows, and each stored value stays close to the exact one.
    """
    form(harness)
    harness.sql(_MANY)
    decay(harness.database)
    harness.move(600)
    again = decay(harness.database)
    assert again.looked_at == 20_001
    assert again.changed < 100
    harness.move(6 * 3600)
    assert decay(harness.database).changed < 10_000
    for row in harness.sql("SELECT kind, importance, value, created_at FROM memories LIMIT 1000"):
        hours = (harness.clock.now() - row.created_at).total_seconds() / 3600
        exact = decayed(row.importance, decay_rate(row.kind, 1, 0, 0), hours)
        assert row.value == pytest.approx(exact, abs=1.01 * NOTICEABLE * row.importance)


def test_faded_memories_are_archived(harness: Harness) -> None:
    """A memory is archived only if its value is below 0.03, it is over 30 days old, and it was not read for 30 days."""
    faded = form(harness, "conversation", 0.05)
    form(harness, "conversation", 0.2)
    harness.move(20 * DAY_S)
    form(harness, "conversation", 0.05)
    read = form(harness, "conversation", 0.05, accesses=1)
    harness.sql("UPDATE memories SET created_at = created_at - interval '20 days' WHERE memory_id = %(id)s", id=read)
    harness.move(15 * DAY_S)
    harness.sql("UPDATE memories SET value = importance")
    assert decay(harness.database).archived == 1
    harness.move(16 * DAY_S)
    assert [row.memory_id for row in harness.sql("SELECT memory_id FROM memories WHERE archived_at IS NOT NULL")] == [
        faded
    ]
    assert decay(harness.database).archived == 2


def test_a_run_commits_page_by_page(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run commits after each page of memories and skips no memory."""
    monkeypatch.setattr("perdure.memory.decay._BATCH", 2)
    for _ in range(5):
        form(harness)
    harness.move(DAY_S)
    reported: list[int] = []
    assert decay(harness.database, reported.append) == DecayResult(looked_at=5, changed=5)
    assert reported == [2, 4, 5]
