"""A turn's time, and the rows that PostgreSQL reads for the turn, with a short and with a long history.

One half of the history is in earlier sessions, which are imported with their vectors. The other half is in the current
session. The number of rows is PostgreSQL's own count for perdure's tables: rows read by sequential scans plus rows
fetched through indexes.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median

from sqlalchemy import text
from sqlalchemy.engine import URL

from benchmarks.report import Section
from benchmarks.setup import Setup, connected, scalar
from benchmarks.statements import bench
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.memory.embedding import build_index, embed_sessions, register
from perdure.memory.import_export import import_messages
from perdure.models.embedders.hashing import HashEmbedder
from perdure.settings import MemorySettings

NAME = "context"

_SHORT = 100
_LONG = 10_000
_SAMPLED = 20
_SESSION = 100
"""Turns of each earlier session."""

_USER = "ana"
_EMBEDDER = HashEmbedder(384)
_BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
_WORDS = ("twice", "double", "number", "sum", "work", "lemon", "river", "orchard", "kettle", "violin", "harbour")
_READ = "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables"

_CONTINUED = text("""
    WITH grown AS (
        UPDATE sessions SET last_turn_seq = last_turn_seq + :turns, turn_count = turn_count + :turns,
                            message_count = message_count + 2 * :turns, tick = tick + :turns
        WHERE user_id = :user_id AND ended_at IS NULL
        RETURNING session_id, user_id, last_turn_seq - :turns AS turn, message_count - 2 * :turns AS message,
                  tick - :turns AS tick
    ), done AS (
        INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, attempts, steps,
                           first_seq, reply_seq, accepted_at, settled_at, settled_tick)
        SELECT gen_random_uuid(), session_id, turn + n, user_id, 'assistant', 'cli', 5, 'done', 1, 1,
               message + 2 * n - 1, message + 2 * n, now(), now(), tick + n
        FROM grown, generate_series(1, :turns) AS n
        RETURNING turn_id, session_id, first_seq, reply_seq
    )
    INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)
    SELECT session_id, first_seq, turn_id, 'user', 'and what about number ' || first_seq, 'cli', 8, now() FROM done
    UNION ALL
    SELECT session_id, reply_seq, turn_id, 'assistant', 'that is ' || reply_seq, 'cli', 5, now() FROM done
""")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one turn: median milliseconds, and the mean number of rows that PostgreSQL read."""

    ms: float
    rows: float


def measure(setup: Setup) -> Section:
    """Measure turns with a short and a long history; returns the section."""
    long = setup.scaled(_LONG)
    short_cost, long_cost = _cost(setup, _SHORT), _cost(setup, long)
    return Section(
        name=NAME,
        title=f"A turn's context with {_SHORT} and with {long:,} turns of history",
        method=(
            "Half of the history is in ended sessions, with vectors, half in the current session. Whole turns "
            "including recall, in one process. Rows are those of pg_stat_user_tables (read by sequential scans or "
            f"fetched through indexes), the mean of {_SAMPLED} turns; milliseconds are the median."
        ),
        columns=["", f"{_SHORT} turns", f"{long:,} turns", "ratio"],
        rows=[
            [
                "rows read",
                f"{short_cost.rows:,.0f}",
                f"{long_cost.rows:,.0f}",
                f"{long_cost.rows / short_cost.rows:.2f}",
            ],
            ["ms", f"{short_cost.ms:.1f}", f"{long_cost.ms:.1f}", f"{long_cost.ms / short_cost.ms:.2f}"],
        ],
        figures={
            "short_rows": short_cost.rows,
            "long_rows": long_cost.rows,
            "short_ms": short_cost.ms,
            "long_ms": long_cost.ms,
        },
    )


def _cost(setup: Setup, turns: int) -> Cost:
    setup.progress(f"a history of {turns:,} turns")
    with setup.database("bench_context") as url:
        _fill(url, turns)
        before, took = scalar(url, _READ), []
        with bench(url) as made:
            for _ in range(_SAMPLED):
                began = time.perf_counter()
                made.turn(_USER)
                took.append((time.perf_counter() - began) * 1000)
        return Cost(median(took), (scalar(url, _READ) - before) / _SAMPLED)


def _fill(url: URL, turns: int) -> None:
    database = Database(url)
    for imported in import_messages(database, SystemClock(), "assistant", _lines(turns // 2)):
        assert not imported.bad, imported.bad[0]
    embed_sessions(database, _EMBEDDER, imported.sessions)
    # Builds the index only if there are enough vectors, as the sweeper does.
    build_index(database, register(database, _EMBEDDER.name, _EMBEDDER.dimensions), MemorySettings().index_rows)
    database.close()
    with bench(url) as made:
        made.turn(_USER)
    with connected(url) as admin:
        admin.execute(_CONTINUED, {"turns": turns // 2, "user_id": _USER})
        admin.execute(text("VACUUM ANALYZE"))


def _lines(turns: int) -> Iterator[str]:
    chance = random.Random(3)  # noqa: S311 (no secret)
    for number in range(2 * turns):
        yield json.dumps(
            {
                "user_id": _USER,
                "session": f"session {number // (2 * _SESSION)}",
                "message_id": f"m{number}",
                "role": "assistant" if number % 2 else "user",
                "content": " ".join(chance.choices(_WORDS, k=12)),
                "occurred_at": (_BEGIN + timedelta(minutes=number)).isoformat(),
            }
        )
