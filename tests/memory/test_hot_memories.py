"""A user's hot memories are the memories with the most recalls in the last `PATTERN_DAYS` days."""

from __future__ import annotations

from uuid import UUID

import pytest

from perdure.ids import new_id
from perdure.memory.hot_memories import MOST_HOT, PATTERN_DAYS, refresh_hot
from tests.turns.harness import Harness

DAY_S = 86_400

KNOW = """
    WITH known AS (INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now()) ON CONFLICT DO NOTHING)
    INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                          valid_from)
    VALUES (%(memory_id)s, %(user_id)s, 'fact', 'something', 0.5, 0.5, '{cli}', 'consolidation', perdure_now(),
            perdure_now())
"""
RECALL = """
    INSERT INTO memory_accesses (memory_id, accessed_at, access_id, user_id)
    SELECT memory_id, perdure_now(), gen_random_uuid(), user_id FROM memories, generate_series(1, %(times)s)
    WHERE memory_id = %(memory_id)s
"""


def recalled(harness: Harness, times: int, user_id: str = "ana") -> UUID:
    """Store a memory with `times` recent recalls; returns its id."""
    memory_id = new_id(harness.clock)
    harness.sql(KNOW, memory_id=memory_id, user_id=user_id)
    harness.sql(RECALL, memory_id=memory_id, times=times)
    return memory_id


def hot(harness: Harness, user_id: str = "ana") -> list[UUID]:
    """The ids of the user's hot memories, in order of rank."""
    rows = harness.sql("SELECT memory_id FROM hot_memories WHERE user_id = %(user_id)s ORDER BY rank", user_id=user_id)
    return [row.memory_id for row in rows]


def test_hot_memories_are_ordered_by_recent_recalls(harness: Harness) -> None:
    """A user's hot memories are ordered by their number of recent recalls. A second refresh changes nothing."""
    seldom, often = recalled(harness, 1), recalled(harness, 3)
    recalled(harness, 0)
    other = recalled(harness, 2, "bo")
    for _ in range(2):
        assert refresh_hot(harness.database) == 3
        assert (hot(harness), hot(harness, "bo")) == ([often, seldom], [other])


def test_a_refresh_writes_only_what_has_changed(harness: Harness) -> None:
    """A refresh rewrites no row whose memory, rank and score are the same, and memories may swap their ranks."""
    rows = "SELECT rank, xmin::text AS written FROM hot_memories WHERE user_id = 'ana' ORDER BY rank"
    third, second, first = (recalled(harness, times) for times in (1, 3, 4))
    refresh_hot(harness.database)
    before = harness.sql(rows)
    refresh_hot(harness.database)
    assert harness.sql(rows) == before
    harness.sql(RECALL, memory_id=second, times=2)
    refresh_hot(harness.database)
    assert hot(harness) == [second, first, third]
    after = harness.sql(rows)
    assert after[2] == before[2]
    assert after[0] != before[0]


def test_a_memory_without_recent_recalls_is_no_longer_hot(harness: Harness) -> None:
    """A memory is not hot if all its recalls are older than `PATTERN_DAYS` days. Such recalls are deleted."""
    recalled(harness, 2)
    refresh_hot(harness.database)
    harness.move((PATTERN_DAYS - 1) * DAY_S)
    fresh = recalled(harness, 1)
    harness.move(2 * DAY_S)
    assert refresh_hot(harness.database) == 1
    assert hot(harness) == [fresh]
    assert harness.sql("SELECT count(*) FROM memory_accesses")[0][0] == 1


@pytest.mark.parametrize("change", ["archived_at = perdure_now()", "valid_to = perdure_now()"])
def test_an_invalid_memory_is_not_hot(harness: Harness, change: str) -> None:
    """An archived or superseded memory is not hot, however often it was recalled."""
    recalled(harness, 5)
    harness.sql(f"UPDATE memories SET {change}")  # noqa: S608 (a constant of this test)
    assert refresh_hot(harness.database) == 0


def test_the_number_of_hot_memories_is_bounded(harness: Harness) -> None:
    """A user has at most `MOST_HOT` hot memories."""
    harness.sql("INSERT INTO users (user_id, created_at) VALUES ('ana', perdure_now())")
    harness.sql(
        "INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at, "
        "valid_from) SELECT gen_random_uuid(), 'ana', 'fact', 'something', 0.5, 0.5, '{cli}', 'consolidation', "
        "perdure_now(), perdure_now() FROM generate_series(1, 120)"
    )
    harness.sql(
        "INSERT INTO memory_accesses (memory_id, accessed_at, access_id, user_id) "
        "SELECT memory_id, perdure_now(), gen_random_uuid(), user_id FROM memories"
    )
    assert refresh_hot(harness.database) == MOST_HOT


def test_every_user_is_refreshed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh covers all users, even if it needs several transactions."""
    monkeypatch.setattr("perdure.memory.hot_memories._USERS_PER_COMMIT", 2)
    for number in range(5):
        recalled(harness, 1, f"user {number}")
    assert refresh_hot(harness.database) == 5
