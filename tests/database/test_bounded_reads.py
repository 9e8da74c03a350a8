"""Statements that list, find or delete rows read a bounded number of rows, whatever the size of the table."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from perdure import audit, retention
from perdure.database.engine import Database, Statement
from perdure.memory import embedding_queries as embedding
from perdure.memory import import_export_queries as exchange
from perdure.memory import queries as memory
from perdure.memory.consolidation import queries as consolidation
from perdure.observe import queries as observe
from perdure.sessions import queries as sessions
from perdure.timetable import reminder_queries
from perdure.turns import budgets, outbox_queries, timeline
from perdure.turns.inbox import queries as turns
from perdure.turns.inbox import route_queries
from tests.databases import engine_of
from tests.plans import outline, plans, rows_read

SMALL = {"sweeps", "pauses"}
"""A table of a few rows, for which a sequential scan is right."""

_MANY = 20_000
_OTHERS = 4_000

# One user with 20,000 sessions, all about 200 days old. The newest session is live and has 3,000 queued turns.
# Consolidation was abandoned for a third of the ended sessions. The other ended sessions wait for the next attempt to
# consolidate them.
_FILL = f"""
    INSERT INTO users SELECT 'user ' || n, now() FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO conversations SELECT 'user ' || n, 'a', 'A title', false, NULL, now()
    FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO metered_requests (request_id, user_id, kind, requested_at)
    SELECT gen_random_uuid(), 'user ' || n, 'fork', now() - n * interval '1 minute' FROM generate_series(1, 3000) AS n;
    INSERT INTO answered_requests SELECT 'user ' || n, 'a', gen_random_uuid(), now() - n * interval '1 minute'
    FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO unrouted (turn_id, user_id, message, accepted_at, due_at, error_code, settled_at)
    SELECT gen_random_uuid(), 'user ' || n, '{{}}', now(), now() + (n - 20) * interval '1 minute',
           CASE WHEN n % 2 = 0 THEN 'CONFLICT' END, CASE WHEN n % 2 = 0 THEN now() - n * interval '1 minute' END
    FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO reminders (schedule_id, user_id, text, cron, timezone, channel, created_at, next_due)
    SELECT gen_random_uuid(), 'user ' || n, 'text', '0 7 * * *', 'UTC', 'http', now(),
           now() + (n - 20) * interval '1 minute'
    FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO link_codes SELECT 'user ' || n, sha256(n::text::bytea), now() - n * interval '1 minute'
    FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO link_attempts SELECT '', 'telegram', n::text, 1, now() - n * interval '1 minute'
    FROM generate_series(0, {_OTHERS}) AS n;
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          ended_at, end_requested_at, message_count, consolidation_attempts, consolidation_due_at,
                          consolidation_given_up_at)
    SELECT ('01900000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid,
           CASE WHEN n <= {_MANY} THEN 'user 0' ELSE 'user ' || n - {_MANY} END, '', n >= {_MANY}, 'assistant',
           CASE WHEN n < {_MANY} THEN 'ended' ELSE 'active' END,
           now() - interval '200 days' + n * interval '1 second', now() - interval '200 days', ARRAY['http'],
           CASE WHEN n < {_MANY} THEN now() - interval '200 days' + n * interval '1 second' END,
           CASE WHEN n < {_MANY} THEN now() - interval '200 days' END, 1, CASE WHEN n % 3 = 0 THEN 5 ELSE 1 END,
           CASE WHEN n % 3 > 0 THEN now() + (n % 3 * 2 - 3) * interval '1 hour' END,
           CASE WHEN n < {_MANY} AND n % 3 = 0 THEN now() - n * interval '1 second' END
    FROM generate_series(0, {_MANY} + {_OTHERS}) AS n;
    INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, first_seq, accepted_at,
                       settled_at)
    SELECT session_id, session_id, 1, user_id, 'assistant', 'http', 5, 'cancelled', NULL::bigint,
           now() - interval '200 days', now() - interval '200 days'
    FROM sessions WHERE NOT routable
    UNION ALL
    SELECT gen_random_uuid(), '01900000-0000-7000-8000-0000000{_MANY}'::uuid, seq, 'user 0', 'assistant', 'http', 5,
           'accepted', NULL::bigint, now(), NULL::timestamptz
    FROM generate_series(1, 3000) AS seq;
    INSERT INTO turn_spendings SELECT turn_id, turn_id, '2020-01-01', 0, 0.01, 0.01 FROM turns;
    INSERT INTO day_spendings SELECT 'user', user_id, current_date - n, 0.01
    FROM users, generate_series(0, 3) AS n;
    INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, intended_at,
                              decide_at)
    SELECT gen_random_uuid(), turn_id, 1, 0, 'look', '{{}}', 'pure', 'done', now(), now()
    FROM turns WHERE settled_at IS NOT NULL;
    INSERT INTO inbox SELECT user_id, 'http', turn_id::text, turn_id, 1, 'hello', accepted_at FROM turns;
    INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)
    SELECT session_id, 1, session_id, 'user', 'hello there', 'http', 3, created_at FROM sessions;
    INSERT INTO forgotten_messages SELECT session_id, seq, now() FROM messages;
    INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)
    SELECT session_id, false, '{{}}', '[]', n, 1, now() - interval '200 days'
    FROM sessions, generate_series(1, 4) AS n WHERE routable;
    INSERT INTO deliveries (delivery_id, turn_id, user_id, target, status, due_at, created_at)
    SELECT gen_random_uuid(), turn_id, user_id, '{{"url": "https://a.example"}}',
           CASE WHEN settled_at IS NULL THEN 'pending' ELSE 'delivered' END, now(), now()
    FROM turns;
    INSERT INTO deliveries (delivery_id, turn_id, user_id, target, status, due_at, created_at)
    SELECT gen_random_uuid(), gen_random_uuid(), 'user ' || n, '{{"url": "https://a.example"}}', 'failed',
           now() - interval '2 hours' - n * interval '1 second', now() - interval '5 hours'
    FROM generate_series(1, {_OTHERS}) AS n;
    INSERT INTO cases (case_id, query, response_text, created_at)
    SELECT 'case ' || n, 'q', 'r', now() FROM generate_series(1, 3000) AS n;
    INSERT INTO case_executions (case_id, turn_id, succeeded, executed_at, counted)
    SELECT 'case ' || n, gen_random_uuid(), true, now() - m * interval '1 day', true
    FROM generate_series(1, 3000) AS n, generate_series(1, CASE WHEN n = 1 THEN 9000 ELSE 3 END) AS m;
    INSERT INTO case_runs (run_id, dry_run, phase, started_at, finished_at)
    SELECT gen_random_uuid(), n % 2 = 0, 'done', now() - interval '1 day', now() FROM generate_series(1, 500) AS n;
    INSERT INTO audit (audit_id, via, actor, action, user_id, began_at)
    SELECT turn_id, 'api', 'tests', 'turns.cancel', user_id, accepted_at FROM turns;
    WITH content AS (
        INSERT INTO file_contents (content_id, tenant, sha256, size) VALUES (gen_random_uuid(), '', '', 1)
        RETURNING content_id
    )
    INSERT INTO files (file_id, tenant, user_id, content_id, media_type, created_at, used_at, session_id)
    SELECT session_id, '', user_id, content_id, 'text/plain', now(), now(), session_id FROM sessions, content;
    INSERT INTO embedders (name, dimensions, created_at) VALUES ('none', 3, now());
    INSERT INTO message_vectors (session_id, seq, embedder_id, user_id)
    SELECT session_id, seq, embedder_id, user_id FROM message_words, embedders;
    WITH memory AS (
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                              valid_from)
        VALUES (gen_random_uuid(), 'user 0', 'fact', 'a fact', 0.5, 0.5, '{{cli}}', 'tool', now(), now())
        RETURNING memory_id
    )
    INSERT INTO memory_sources SELECT memory_id, session_id, seq FROM memory, messages;
    INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                          valid_from)
    SELECT gen_random_uuid(), 'user ' || n, 'fact', 'a fact', 0.5, 0.5, '{{cli}}', 'tool', now(), now()
    FROM generate_series(1, {_OTHERS}) AS n, generate_series(1, 3);
    INSERT INTO memory_accesses
    SELECT memory_id, now() - n * interval '1 minute', gen_random_uuid(), user_id
    FROM memories, generate_series(1, 3) AS n WHERE user_id <> 'user 0';
    UPDATE unembedded SET due_at = now() + interval '1 hour' WHERE hashtext(id::text) % 100 <> 0;
    INSERT INTO hot_memories
    SELECT DISTINCT ON (user_id) user_id, 1, memory_id, 1, now() FROM memories WHERE user_id <> 'user 0';
"""  # noqa: S608 (constants)
_LIVE = UUID(f"01900000-0000-7000-8000-0000000{_MANY}")


@pytest.fixture
def large(database: Database) -> Database:
    """A database in which one user has a long history."""
    engine = engine_of(database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(_FILL.replace("%", "%%"))
        connection.exec_driver_sql("ANALYZE")
    engine.dispose()
    return database


_GIVEN: dict[str, Any] = {
    "user_id": "user 0", "session_id": None, "scope": "", "idle_s": 1_800.0, "limit": 100,
    "most": 50, "max_runs": 5, "lease_s": 30.0, "backoff_s": 30.0,
    "days": 90, "after": "", "executions": 100,
    "after_session": UUID(int=0), "after_seq": 0, "session_ids": [UUID(int=1), _LIVE],
    "first": 10, "most_users": 100, "furthest_s": 7_200.0, "most_chars": 99, "vectors_days": 0,
    "own_id": UUID(int=1), "name": "imported", "message": "cancelled", "turn_ids": [], "delivery_ids": [],
}  # fmt: skip
_FIRST = {"after": str(UUID(int=0))}

BOUNDED: list[tuple[Statement, dict[str, Any], float]] = [
    (sessions.LOCK_TARGET, {}, 3),
    (sessions.LOCK_TARGET, {"session_id": _LIVE}, 3),
    (sessions.LIST, {}, 110),
    (sessions.LIST_OF_USER, {}, 110),
    (sessions.LIST_OF_USER, {"user_id": "user 7"}, 1),
    (sessions.LIST_OF_USER, {"user_id": "nobody"}, 0),
    (sessions.LIST_OF_SCOPE, {}, 110),
    (sessions.QUEUE, {"session_id": _LIVE}, 510),
    (sessions.CONVERSATION, {"conversation": "a"}, 3),
    (sessions.CONVERSATIONS, {"archived": False}, 3),
    (sessions.LIST_GIVEN_UP, {}, 110),
    (sessions.LIST_GIVEN_UP_OF_USER, {}, 110),
    (sessions.LIST_GIVEN_UP_OF_USER, {"user_id": "user 7"}, 0),
    (turns.BEGUN, {"session_id": _LIVE}, 2),
    (consolidation.DUE, {}, 60),
    (consolidation.TO_WAKE, {}, 150),
    (consolidation.RETRY, {"session_ids": [UUID(int=1), _LIVE]}, 2),
    (sessions.EXPIRE_IDLE, {"reason": "idle"}, 160),
    (sessions.COUNT_FROM_NOW, {}, 0),
    (consolidation.GIVEN_UP, {}, 60),
    (route_queries.DUE_USERS, {}, 60),
    (route_queries.NEXT_USERS, {}, 110),
    (reminder_queries.TAKE_DUE, {}, 210),
    (reminder_queries.ANY_DUE, {}, 110),
    (reminder_queries.LIST_OF_USER, {"user_id": "user 7"}, 1),
    (exchange.EXPORT, {}, 400),
    (exchange.EXPORT_OF_SESSIONS, {}, 10),
    (exchange.LOCK, {}, 2),
    (retention.DELIVERIES, {}, 0),
    (retention.SET_ASIDE, {}, 0),
    (retention.OF_ENDED_SESSIONS, _FIRST, 400),
    (retention.INBOX, _FIRST, 400),
    (retention.USES, {}, 400),
    (retention.DRY_RUNS, {}, 0),
    (embedding.CLAIM, {"most": 64}, 300),
    (embedding.CLAIM, {"most": 10_000}, 3_000),
    (embedding.MISSING_OF_SESSIONS, {}, 10),
    (memory.HOT_USERS, {"days": 7}, 400),
    (memory.FORGET_ACCESSES, {"days": -1}, 200),
    (budgets.TREE, {"root_id": _LIVE}, 2),
    (observe.DUE, {}, 400),
    (observe.AMOUNTS, {}, 600),
    (observe.UNSETTLED, {}, 110),
    (observe.FAILED, {"since": UUID(int=0)}, 110),
    (observe.PARKED, {}, 110),
    (observe.STUCK, {"stuck_s": 60.0}, 400),
    (audit.NEWEST, {"before": UUID(int=2**128 - 1)}, 110),
    (audit.NEWEST, {"before": _LIVE}, 110),
    (timeline.TURN, {"turn_id": UUID(int=1)}, 4),
    (timeline.STEPS, {"session_id": _LIVE, "turn_id": _LIVE, "first_seq": 1, "last_seq": 9}, 10),
    (timeline.CALLS, {"turn_id": UUID(int=1)}, 4),
    (timeline.DELIVERIES, {"turn_id": UUID(int=1)}, 4),
    (outbox_queries.DELIVERIES_FAILED, {}, 110),
    (outbox_queries.DELIVERIES_PENDING, {}, 110),
    *[(kept.delete, {"days": -1, "after": kept.start}, 400) for kept in retention.KEPT],
]
"""Each statement, its parameters, and the most rows that it may read."""


@pytest.mark.long
def test_statements_that_list_or_delete_use_an_index(large: Database) -> None:
    """With the custom plan and with the generic plan, no statement scans a whole table or reads too many rows."""
    for statement, given, most in BOUNDED:
        for nodes in plans(large, statement, {**_GIVEN, **given}):
            scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
            assert not scanned - SMALL, f"{statement.name} scans {scanned}"
            assert rows_read(nodes) <= most, (statement.name, given, rows_read(nodes), outline(nodes))
