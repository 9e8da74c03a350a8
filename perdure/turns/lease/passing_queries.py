"""The statements that leave a session to a worker that has the agent and the tools of its turn."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.fencing import HELD
from perdure.sessions.states import Trigger, sql

# Releases a session during a turn that needs an agent or a tool which this worker lacks. The claim does not count as an
# attempt. The pause before the next wake-up is as short as that of a session that a worker has refused (see CLAIM).
LEAVE = Statement(
    "turns.leave",
    f"""
    WITH fenced AS (
        UPDATE sessions
        SET lease_until = NULL, lease_owner = NULL, spent_s = %(spent_s)s, woken_at = perdure_now(), wakes = 1,
            unequipped_since = coalesce(least(unequipped_since, perdure_now()), perdure_now()),
            strikes = greatest(strikes - 1, 0), claims = greatest(claims - 1, 0),
            state = {sql(Trigger.TURN_STOPPED)}
        WHERE {HELD}
        RETURNING session_id, priority
    ), parked AS (
        UPDATE turns AS t SET status = 'parked', attempts = greatest(t.attempts - 1, 0)
        FROM fenced WHERE t.turn_id = %(turn_id)s AND t.settled_at IS NULL
        RETURNING t.turn_id
    )
    SELECT fenced.priority FROM fenced, parked
    """,
)

# Whether the session's turn still waits for a worker that has its agent and tools.
IS_UNEQUIPPED = Statement(
    "turns.is_unequipped",
    """
    SELECT unequipped_since IS NOT NULL AND NOT coalesce((
               SELECT cancel_requested_at IS NOT NULL FROM turns AS t
               WHERE t.session_id = s.session_id AND settled_at IS NULL ORDER BY seq LIMIT 1), false) AS unequipped
    FROM sessions AS s WHERE session_id = %(session_id)s
    """,
    writes=False,
)
