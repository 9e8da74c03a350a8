"""On large tables, the frequent statements use indexes and read a bounded number of rows."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure.channels.services import queries as chats
from perdure.clock import MovedClock
from perdure.database.engine import Database, as_json
from perdure.sessions import running_queries
from perdure.settings import Settings
from perdure.turns import outbox_queries
from perdure.turns import queries as turns_queries
from perdure.turns.calls import queries as calls_queries
from perdure.turns.inbox import queries as inbox_queries
from perdure.turns.lease import leave_queries
from perdure.turns.lease import queries as lease_queries
from perdure.turns.prompt.first_read import FIRST_READ
from perdure.turns.run import queries as run_queries
from perdure.turns.transcript import READ_HISTORY
from tests.conftest import RecordingWaker
from tests.plans import outline, plans, rows_read
from tests.turns.harness import Harness

TURNS_OF_THE_LONG_SESSION = 2_000
OTHERS = 9_000

_FILL = f"""
    INSERT INTO users SELECT 'user ' || n, now() FROM generate_series(0, {OTHERS}) AS n;
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          last_turn_seq, message_count, turn_count, unsettled, token)
    SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'user ' || n, '', true, 'assistant',
           CASE WHEN n = 0 THEN 'thinking' ELSE 'active' END,
           now(), now(), ARRAY['http'], 2, 4, 2, (n %% 300 = 0)::int, 1
    FROM generate_series(0, {OTHERS}) AS n;
    INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, first_seq, accepted_at,
                       settled_at)
    SELECT gen_random_uuid(), session_id, seq, user_id, 'assistant', 'http', 5,
           CASE WHEN seq = 2 AND unsettled = 1 THEN 'accepted' ELSE 'done' END,
           CASE WHEN seq = 2 AND unsettled = 1 THEN NULL ELSE seq * 2 - 1 END, now(),
           CASE WHEN seq = 2 AND unsettled = 1 THEN NULL ELSE now() END
    FROM sessions, generate_series(1, 2) AS seq WHERE session_id <> %(long)s
    UNION ALL
    SELECT gen_random_uuid(), %(long)s, seq, 'user 0', 'assistant', 'http', 5,
           CASE WHEN seq = {TURNS_OF_THE_LONG_SESSION} THEN 'running' ELSE 'done' END, seq * 4 - 3, now(),
           CASE WHEN seq = {TURNS_OF_THE_LONG_SESSION} THEN NULL ELSE now() END
    FROM generate_series(1, {TURNS_OF_THE_LONG_SESSION}) AS seq;
    UPDATE sessions SET last_turn_seq = {TURNS_OF_THE_LONG_SESSION}, turn_count = {TURNS_OF_THE_LONG_SESSION} - 1,
           message_count = {TURNS_OF_THE_LONG_SESSION} * 4 - 4, unsettled = 1
    WHERE session_id = %(long)s;
    INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)
    SELECT t.session_id, t.first_seq + n, t.turn_id, CASE WHEN n %% 2 = 0 THEN 'user' ELSE 'assistant' END,
           repeat('word ', 20), 'http', 30, now()
    FROM turns AS t, generate_series(0, CASE WHEN t.session_id = %(long)s THEN 3 ELSE 1 END) AS n
    WHERE t.settled_at IS NOT NULL;
    INSERT INTO inbox SELECT user_id, 'http', turn_id::text, turn_id, 1, 'hello', now() FROM turns;
    INSERT INTO metered_requests (request_id, user_id, kind, requested_at)
    SELECT turn_id, user_id, 'side_request', now() FROM turns;
    INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)
    SELECT session_id, false, '{{}}', '[]', seq, 1, now() FROM turns;
    INSERT INTO running_summaries (session_id, from_seq, to_seq, summary, extractive)
    SELECT session_id, 1, 1, repeat('They talked. ', 50), false FROM sessions WHERE session_id <> %(long)s;
    UPDATE sessions SET variables_tick = last_turn_seq, tick = last_turn_seq,
           nonce = '00000000-0000-0000-0000-000000000001';
    INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, intended_at,
                              decide_at)
    SELECT gen_random_uuid(), turn_id, 2, 0, 't', '{{}}', 'pure', 'done', now(), now() FROM turns;
    INSERT INTO unrouted (turn_id, user_id, message, error_code, settled_at)
    SELECT gen_random_uuid(), user_id, '{{}}', 'CONFLICT', now() FROM turns;
    INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, target, status, due_at, created_at)
    SELECT gen_random_uuid(), turn_id, user_id, '', jsonb_build_object('url', 'https://a.example/' || seq %% 20),
           CASE WHEN seq = 1 THEN 'delivered' ELSE 'pending' END, now(), now()
    FROM turns WHERE session_id = %(long)s OR seq = 1;
"""  # noqa: S608 (constants)
NONCE = UUID(int=1)
LONG = UUID("00000000-0000-7000-8000-000000000000")


@pytest.fixture
def large(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Harness:
    """A harness with about 20,000 turns in 9,000 sessions. One of the sessions has 2,000 turns."""
    made = Harness(settings, clock, database, waker)
    made.sql(_FILL, long=LONG)
    made.sql("ANALYZE")
    return made


def _parameters(harness: Harness) -> dict[str, Any]:
    turn = harness.sql("SELECT turn_id, first_seq FROM turns WHERE session_id = %(id)s AND seq = 2000", id=LONG)[0]
    effect = harness.sql("SELECT effect_id FROM tool_effects WHERE turn_id = %(id)s", id=turn.turn_id)[0]
    delivery = harness.sql("SELECT delivery_id FROM deliveries WHERE turn_id = %(id)s", id=turn.turn_id)[0]
    return {
        "session_id": LONG, "user_id": "user 0", "scope": "", "channel": "http", "message_id": "new", "text": "hi",
        "parts": None, "answers": True, "alone": True, "said": "[]", "joins": True, "after": turn.first_seq,
        "agent": None, "on_busy": "enqueue", "priority": 5, "reply_to": None, "metadata": None,
        "owner": "me", "lease_s": 30, "isolate_from": 100, "agents": ["a"], "default_agent": "a",
        "fingerprints": '{"a": "1"}', "fingerprint": "1", "pinned": True,
        "token": 1, "nonce": NONCE, "nonces": [NONCE], "tick": TURNS_OF_THE_LONG_SESSION,
        "max_attempts": 5, "unknown_agent_s": 600, "elapsed_s": 1.0, "charged": 1,
        "turn_id": turn.turn_id, "turn_seq": 2000,
        "first_seq": turn.first_seq, "window": 20, "runs_tools": False, "spent_s": 1.0, "added": 1,
        "messages": as_json([{"position": 1, "role": "assistant", "content": "x", "token_count": 1}]),
        "intents": "[]", "results": as_json([{"effect_id": str(effect.effect_id), "status": "done"}]), "keep": True,
        "status": "done", "steps": 1, "usage": "{}", "data": None, "error_code": None, "error_message": None,
        "replied": True,
        "delivery_id": delivery.delivery_id, "forgiven": True, "message": "cancelled", "effect_id": effect.effect_id,
        "timeout_s": 30.0, "result": "x", "message_seq": 2, "session_ids": [LONG], "tokens": [1],
        "turn_ids": [turn.turn_id], "most": 200, "most_paced": 10, "most_wakes": 3,
        "delivery_ids": [delivery.delivery_id], "wait_s": 60.0, "calls": "[]",
        "payload": None, "instructions": "You help.",
        "expired": "x", "ended": "x", "call_id": "call_0", "arguments": None,
        "minute_s": 60, "per_minute": 2, "hour_s": 3600, "per_hour": 5,
        "backoff_s": 5.0, "attempt_s": 60, "error": "x", "retry_s": 5.0, "furthest_s": 3_600.0, "start": "8",
        "already_sent": "[]", "now_sent": "[]",
        "variables": '{"a": 1}', "saved": True, "case_ids": ["a", "b"], "verdict": "{}", "wakes": 1,
        "name": "turns", "every_s": 5.0, "idle_s": 1_800.0, "limit": 10,
        "user_concurrency": 10, "most_users": 100, "max_chars": 10_000, "sweep_s": 5.0, "woken": True,
        "aging_s": 30.0, "drained": False, "paces": "{}", "model": "m", "paced": True,
        "longest_s": 3_600.0, "forgiven_s": 86_400.0,
        "asked_at": "2026-01-01T00:00:00Z", "locked": [LONG],
        "additions": None, "traceparent": None, "texts": True, "asking": [turn.turn_id], "before_seq": 2**62,
        "authors": ["user 0"], "tenant": None, "previous_id": None, "archive": 3, "hot": 100, "embedder": "hash:384",
        "all_cases": True, "bank": "a",
        "from_seq": 1, "to_seq": 40, "summary": "They talked.", "extractive": False, "next_seq": 80,
    }  # fmt: skip


HOT = [
    lease_queries.ADMIT, lease_queries.ADMIT_DUE,
    inbox_queries.ENQUEUE, inbox_queries.FIND_ACCEPTED, inbox_queries.MERGE, lease_queries.CLAIM,
    lease_queries.CLAIM_DUE, lease_queries.NEXT_DUE,
    lease_queries.CLAIMABLE, lease_queries.BEGIN_NEXT,
    READ_HISTORY, FIRST_READ, running_queries.KEEP, lease_queries.RENEW, lease_queries.WATCH,
    run_queries.KEEP_INSTRUCTIONS,
    run_queries.STEP,
    run_queries.JOINED, run_queries.STEP_JOINING, calls_queries.ANSWER_QUESTION,
    calls_queries.FINISH_EFFECT, calls_queries.CLOSE_CALL, calls_queries.CLOSE_CALLS,
    calls_queries.EXTEND_EFFECT,
    calls_queries.EFFECTS_OF_STEP, leave_queries.SETTLE, run_queries.KEEP_UNSAVED, run_queries.OWNED,
    leave_queries.POSTPONE,
    leave_queries.SHUT_DOWN, leave_queries.LEAVE, lease_queries.IS_UNEQUIPPED, leave_queries.FAILED_START,
    leave_queries.STRIKE, run_queries.REMAINS,
    leave_queries.RELEASE, turns_queries.CANCEL, inbox_queries.BEGUN, leave_queries.WAIT_MODEL,
    lease_queries.RECALL,
    leave_queries.LOCK, leave_queries.IS_CANCELLED, calls_queries.BEGIN_APPROVED, calls_queries.LOCK_OF_TURN,
    calls_queries.FIND_CALL, turns_queries.SEIZE_WAITING, inbox_queries.FULL_FOR,
    turns_queries.WAKE_DUE, turns_queries.UNWAKE, turns_queries.CROWDED, outbox_queries.UNWAKE_DELIVERIES,
    outbox_queries.TAKE_DELIVERY, outbox_queries.NOTE_SENT, outbox_queries.DELIVERED, outbox_queries.POSTPONE_DELIVERY,
    outbox_queries.DELIVERIES_DUE, outbox_queries.POSTPONE_SERVICE, outbox_queries.SHARERS,
    outbox_queries.WITHOUT_SHARE, outbox_queries.UNTAKEN_DELIVERIES, turns_queries.UNTAKEN,
    lease_queries.OVERTAKES, lease_queries.RETURNED, lease_queries.KEEP_PACES,
    turns_queries.READ, turns_queries.READ_BELOW, turns_queries.STATES, turns_queries.SETTLED_AMONG, chats.FOLLOWED,
]  # fmt: skip

SMALL = {"sweeps", "intake", "pauses"}
"""Tables of a few rows, for which a sequential scan is right."""

EMPTY = {"hot_memories", "memories", "cases"}
"""Tables that `_FILL` leaves empty; see `tests/memory` and `tests/casebank`."""

MOST_ROWS = 25
MORE_ROWS = {
    "turns.history": 41 * 8 + 60,  # each message and its turn
    "turns.first_read": 41 * 8 + 160,
    "turns.recall": 200, "sweep.wake_due": 200, "turns.claim_due": 100, "deliveries.due": 850,
    "turns.full_for": 4_000, "deliveries.delivered": 310, "deliveries.postpone": 310,
    "deliveries.postpone_service": 610,
}  # fmt: skip
"""The row limits of the statements that must read more than `MOST_ROWS` rows.

Such a statement reads, for example, a batch, or all messages that a rate limit counts.
"""


@pytest.mark.long
def test_each_statement_of_a_turn_uses_an_index_and_reads_few_rows(large: Harness) -> None:
    """For a session of 2,000 turns, the custom and the generic plan of each statement use indexes and read few rows.

    A step must cost the same at turn 1 and at turn 1,000, whatever the size of the tables.
    """
    given = _parameters(large)
    for statement in HOT:
        fresh = {"turn_id": uuid4(), "delivery_id": uuid4()} if statement is inbox_queries.ENQUEUE else {}
        for nodes in plans(large.database, statement, {**given, **fresh}):
            scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
            assert not scanned - SMALL - EMPTY, f"{statement.name} scans {scanned}"
            assert rows_read(nodes) <= MORE_ROWS.get(statement.name, MOST_ROWS), (statement.name, outline(nodes))


@pytest.mark.exhaustive
def test_turns_are_listed_by_index(large: Harness) -> None:
    """A list of unsettled turns reads all unsettled turns. Any other list reads about as many rows as it returns."""
    large.sql(
        "UPDATE turns SET status = 'failed', error_code = 'UNKNOWN' WHERE settled_at IS NOT NULL AND seq = 1"
        " AND session_id IN (SELECT session_id FROM sessions ORDER BY session_id LIMIT 2000)"
    )
    large.sql("VACUUM ANALYZE turns")
    for statement, status, most in (
        (turns_queries.LIST, None, 10),
        (turns_queries.LIST_OF_USER, None, 10),
        (turns_queries.LIST_OF_SESSION, None, 10),
        (turns_queries.LIST_OF_SESSION, "done", 11),
        (turns_queries.LIST_ERRORS, "failed", 10),
        (turns_queries.LIST_UNSETTLED, "accepted", 4 * OTHERS // 300),
    ):
        user_id = "user 0" if statement is turns_queries.LIST_OF_USER else None
        given = {**_parameters(large), "status": status, "user_id": user_id}
        custom, generic = plans(large.database, statement, given)
        assert rows_read(custom) <= most, (statement.name, outline(custom))
        for nodes in (custom, generic):
            assert "Seq Scan" not in {node["Node Type"] for node in nodes}, (statement.name, outline(nodes))
