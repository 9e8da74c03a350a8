"""Query plans: the sweeper's statements read a limited number of rows, even with a large backlog.

PostgreSQL may switch a prepared statement to a generic plan. So each test checks the custom and the generic plan.
"""

from __future__ import annotations

from typing import Any

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement
from perdure.sessions.queries import COUNT_FROM_NOW, ENDINGS_DUE, EXPIRE_IDLE
from perdure.settings import Settings
from perdure.turns.calls.queries import PROBE_DUE
from perdure.turns.lease.queries import ADMIT, ADMIT_DUE
from perdure.turns.outbox_queries import DELIVERIES_DUE
from perdure.turns.queries import WAKE_DUE
from tests.conftest import RecordingWaker
from tests.plans import outline, plans, rows_read
from tests.turns.harness import Harness

BACKLOG = 10_000
MOST = 200

_FILL = """
    INSERT INTO users VALUES ('ana', now());
    INSERT INTO users SELECT 'user ' || n, now() FROM generate_series(1, 100) AS n;
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          last_turn_seq, unsettled, woken_at, priority)
    SELECT gen_random_uuid(), 'ana', 's' || n, true, 'assistant', 'active', now(), now(), ARRAY['http'], 1, 1,
           now() - interval '1 hour' + n * interval '1 millisecond', n %% 3 * 4
    FROM generate_series(1, %(backlog)s) AS n;
    INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, accepted_at)
    SELECT gen_random_uuid(), session_id, 1, 'ana', 'assistant', 'http', 5, 'accepted', now() FROM sessions;
    INSERT INTO deliveries (delivery_id, turn_id, user_id, target, status, due_at, created_at)
    SELECT gen_random_uuid(), turn_id, user_id, '{}', 'pending', now() - interval '1 hour', now() FROM turns;
    INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, intended_at,
                              decide_at, waits_for)
    SELECT gen_random_uuid(), turn_id, 1, 0, 'export', '{}', 'pure', 'intended', now(), now() + interval '1 hour',
           'task' FROM turns;
"""

RESET = """
    UPDATE turns SET settled_at = NULL, status = 'accepted';
    UPDATE sessions SET unsettled = 1, end_requested_at = NULL, not_before = NULL, paced = false, wakes = 0,
           woken_at = now() - interval '1 hour', queued_at = NULL, user_id = 'ana';
    UPDATE deliveries SET due_at = now() - interval '1 hour', wake_at = NULL, wakes = 0;
    UPDATE tool_effects SET probe_at = now() - interval '1 minute';
"""

QUEUED = "UPDATE sessions SET not_before = now() + interval '1 hour', queued_at = now() - interval '1 minute'"
ALL_BUT_TEN_QUEUED = f"{QUEUED} WHERE scope NOT IN ('s1', 's2', 's3', 's4', 's5', 's6', 's7', 's8', 's9', 's10')"
QUEUED_OF_MANY_USERS = f"{QUEUED}, user_id = 'user ' || substr(scope, 2)::int %% 100 + 1"

SETTLED = "UPDATE turns SET settled_at = now(), status = 'done'; UPDATE sessions SET unsettled = 0"
ENDING = f"{SETTLED}, end_requested_at = now()"

BACKLOGS = {
    "due": (WAKE_DUE, "SELECT 1", MOST),
    "woken just now": (WAKE_DUE, "UPDATE sessions SET woken_at = now()", 0),
    "backing off": (WAKE_DUE, "UPDATE sessions SET woken_at = now() - interval '4 minutes', wakes = 9", 0),
    "waiting for approval": (WAKE_DUE, "UPDATE sessions SET not_before = now() + interval '1 hour'", 0),
    "approvals expired": (WAKE_DUE, "UPDATE sessions SET not_before = now() - interval '1 minute'", MOST),
    "waiting for a model": (WAKE_DUE, "UPDATE sessions SET not_before = now() - interval '1 minute', paced = true", 10),
    "clock set back": (WAKE_DUE, "UPDATE sessions SET woken_at = now() + interval '1 day'", MOST),
    "idle": (WAKE_DUE, SETTLED, 0),
    "endings due": (ENDINGS_DUE, ENDING, MOST),
    "endings woken just now": (ENDINGS_DUE, f"{ENDING}, woken_at = now()", 0),
    "endings backing off": (ENDINGS_DUE, f"{ENDING}, woken_at = now() - interval '4 minutes', wakes = 9", 0),
    "deliveries due": (DELIVERIES_DUE, "SELECT 1", MOST),
    "deliveries postponed": (DELIVERIES_DUE, "UPDATE deliveries SET due_at = now() + interval '5 minutes'", 0),
    "deliveries published": (DELIVERIES_DUE, "UPDATE deliveries SET wake_at = now() + interval '1 minute'", 0),
    "tasks to probe": (PROBE_DUE, "SELECT 1", MOST),
    "tasks probed just now": (PROBE_DUE, "UPDATE tool_effects SET probe_at = now() + interval '1 minute'", 0),
    "tasks with results": (PROBE_DUE, "UPDATE tool_effects SET probe_at = NULL", 0),
    "tasks, clock set back": (PROBE_DUE, "UPDATE tool_effects SET probe_at = now() + interval '1 day'", MOST),
}  # fmt: skip

OPEN = "UPDATE turns SET settled_at = now(), status = 'done'; UPDATE sessions SET unsettled = 0, last_activity_at ="

IDLE = {
    "sessions in use": (EXPIRE_IDLE, f"{OPEN} now()", 0),
    "idle sessions": (EXPIRE_IDLE, f"{OPEN} now() - interval '1 day'", MOST),
    "no session is ahead": (COUNT_FROM_NOW, f"{OPEN} now()", 0),
}

MANY_SERVICES = {
    "deliveries of many users to one service": (
        DELIVERIES_DUE,
        "UPDATE deliveries SET user_id = md5(delivery_id::text)",
        MOST,
    ),
    "deliveries of many users, published": (
        DELIVERIES_DUE,
        "UPDATE deliveries SET user_id = md5(delivery_id::text), wake_at = now() + interval '1 minute'",
        0,
    ),
    "deliveries to many hosts": (
        DELIVERIES_DUE,
        """UPDATE deliveries SET target = jsonb_build_object('url', 'https://' || md5(delivery_id::text) || '/')""",
        MOST,
    ),
    "deliveries to a few channels": (
        DELIVERIES_DUE,
        "UPDATE deliveries SET target = jsonb_build_object('channel', left(md5(delivery_id::text), 1))",
        MOST,
    ),
}

SHARES = {
    "queued behind their user's turns": (WAKE_DUE, QUEUED, 0),
    "admitted": (ADMIT_DUE, QUEUED, 10),
    "admitted of many users": (ADMIT_DUE, QUEUED_OF_MANY_USERS, MOST),
    "all places are taken": (ADMIT_DUE, ALL_BUT_TEN_QUEUED, 0),
    "no session to admit": (ADMIT_DUE, SETTLED, 0),
    "next of a user": (ADMIT, QUEUED, 1),
}  # fmt: skip


@pytest.fixture
def large(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Harness:
    """A harness with a backlog: every session has a turn to run and a pending delivery."""
    made = Harness(settings, clock, database, waker)
    made.sql(_FILL, backlog=BACKLOG)
    return made


@pytest.mark.exhaustive
def test_a_round_reads_no_more_than_its_limit(large: Harness) -> None:
    """With 10,000 sessions, each statement of a round reads at most 1,400 rows and scans no table sequentially."""
    _check(large, BACKLOGS)


@pytest.mark.exhaustive
def test_admitting_reads_no_more_than_the_places(large: Harness) -> None:
    """With 10,000 queued sessions, each statement that admits sessions reads at most 1,400 rows.

    No statement scans a table sequentially.
    """
    _check(large, SHARES)


@pytest.mark.exhaustive
def test_idle_sessions_are_found_by_their_last_activity(large: Harness) -> None:
    """With 10,000 open sessions, the task that ends idle ones reads only these."""
    _check(large, IDLE)


@pytest.mark.exhaustive
def test_the_shares_of_receivers_read_no_more_than_the_limit(large: Harness) -> None:
    """With 10,000 due deliveries, the shares of few or many hosts and users are found without reading the others.

    With many hosts, a round also reads one user of each host, and the user's first delivery.
    """
    _check(large, MANY_SERVICES, most_rows=8 * MOST)


def _check(large: Harness, backlogs: dict[str, tuple[Statement, str, int]], most_rows: int = 7 * MOST) -> None:
    for name, (statement, arranged, found) in backlogs.items():
        large.sql(RESET)
        large.sql(arranged)
        large.sql("VACUUM ANALYZE sessions")
        large.sql("VACUUM ANALYZE deliveries")
        large.sql("VACUUM ANALYZE tool_effects")
        for nodes in plans(large.database, statement, _parameters()):
            scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
            assert not scanned - {"pauses"}, (name, outline(nodes))
            # Up to MOST rows are selected for each of three priorities. MOST rows are then locked and updated by key,
            # and the time of MOST turns is read.
            assert rows_read(nodes) <= most_rows, (name, outline(nodes))
        assert len(large.database.run(statement, _parameters())) == found, name


def _parameters() -> dict[str, Any]:
    share: dict[str, Any] = {"user_id": "ana", "user_concurrency": 10, "most_users": MOST, "start": "8"}
    share |= {
        "followed": [],
        "followed_s": 0.5,
        "least_s": 5.0,
        "most_s": 60.0,
        "aging_s": 30.0,
        "drained": False,
        "paces": "{}",
        "idle_s": 1_800.0,
        "reason": "idle",
    }
    return {"most": MOST, "most_paced": 10, "backoff_s": 5.0, "lease_s": 30.0, "furthest_s": 3_600.0, **share}
