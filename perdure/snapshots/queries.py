"""The statements on the table of snapshots, and the piece that writes one along with a step.

Whoever writes a row of `snapshots` holds its session's row locked: the writers of a session
come one after another, and what they compare is what is there.
"""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.snapshots.snapshot import HISTORY_TURNS

# For a statement whose CTE `fenced` has updated the session's row and returns session_id, token
# and tick: writes what the step changed in the same commit. `%(variables)s` and `%(events)s`
# are JSON as `checked_variables` and `checked_events` leave it, each NULL where the step left it
# as it was; where both are, nothing is written, for the session's row says the tick.
WITH_STEP = """
    kept AS (
        INSERT INTO snapshots AS k (session_id, set_aside, variables, events, tick, token, saved_at)
        SELECT session_id, false, coalesce(%(variables)s::json, '{}'), coalesce(%(events)s::json, '[]'), tick, token,
               perdure_now()
        FROM fenced
        WHERE %(variables)s::json IS NOT NULL OR %(events)s::json IS NOT NULL
        ON CONFLICT (session_id, set_aside) DO UPDATE
        SET variables = CASE WHEN %(variables)s::json IS NULL THEN k.variables ELSE excluded.variables END,
            events = CASE WHEN %(events)s::json IS NULL THEN k.events ELSE excluded.events END,
            tick = excluded.tick, token = excluded.token, saved_at = excluded.saved_at
    )
"""

LOCK_SESSION = Statement(
    "snapshots.lock_session",
    "SELECT token, tick FROM sessions WHERE session_id = %(session_id)s FOR NO KEY UPDATE",
)

KEPT = Statement(
    "snapshots.kept",
    """
    SELECT token, tick, variables::text AS variables, events::text AS events
    FROM snapshots WHERE session_id = %(session_id)s AND NOT set_aside
    """,
    writes=False,
)

SAVE = Statement(
    "snapshots.save",
    """
    INSERT INTO snapshots (session_id, set_aside, variables, events, tick, token, saved_at)
    VALUES (%(session_id)s, false, %(variables)s::json, %(events)s::json, %(tick)s::bigint, %(token)s::bigint,
            to_timestamp(%(timestamp)s::bigint / 1000.0))
    ON CONFLICT (session_id, set_aside) DO UPDATE
    SET variables = excluded.variables, events = excluded.events, tick = excluded.tick, token = excluded.token,
        saved_at = excluded.saved_at
    """,
)

# The snapshot, put together from where its parts are: what was kept, the session's row, the
# last turns' messages. The session may have gone on since the variables last changed.
LOAD = Statement(
    "snapshots.load",
    f"""
    SELECT s.state, k.variables::text AS variables, k.events::text AS events,
           (extract(epoch FROM k.saved_at) * 1000)::bigint AS timestamp,
           CASE WHEN (s.token, s.tick) > (k.token, k.tick) THEN s.token ELSE k.token END AS token,
           CASE WHEN (s.token, s.tick) > (k.token, k.tick) THEN s.tick ELSE k.tick END AS tick,
           (SELECT coalesce(json_agg(json_build_object('role', m.role, 'content', m.content,
                                     'tool_calls', m.tool_calls, 'tool_call_id', m.tool_call_id) ORDER BY m.seq), '[]')
            FROM messages AS m
            WHERE m.session_id = s.session_id AND m.seq >= (
                SELECT min(first_seq) FROM (
                    SELECT first_seq FROM turns
                    WHERE session_id = s.session_id AND first_seq IS NOT NULL
                    ORDER BY seq DESC LIMIT {HISTORY_TURNS}) AS recent)) AS history
    FROM snapshots AS k JOIN sessions AS s USING (session_id)
    WHERE k.session_id = %(session_id)s AND NOT k.set_aside
    """,  # noqa: S608 (a number of ours)
    writes=False,
)

FORGET_SET_ASIDE = Statement(
    "snapshots.forget_set_aside",
    "DELETE FROM snapshots WHERE session_id = %(session_id)s AND set_aside",
)

SET_ASIDE = Statement(
    "snapshots.set_aside",
    "UPDATE snapshots SET set_aside = true WHERE session_id = %(session_id)s AND NOT set_aside",
)

DELETE = Statement("snapshots.delete", "DELETE FROM snapshots WHERE session_id = %(session_id)s")
