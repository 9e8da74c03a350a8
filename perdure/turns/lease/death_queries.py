"""The statements that charge the death of a process, and a process that cannot start, to a turn."""

from __future__ import annotations

from perdure.database.engine import Statement

# Run before BLAME in the same transaction, so that concurrent claims charge a death once.
LOCK_DEATH = Statement(
    "turns.lock_death",
    """
    SELECT 1 AS locked FROM (
        SELECT pg_advisory_xact_lock(hashtextextended('perdure: the death of ' || lease_owner, 0))
        FROM sessions WHERE session_id = %(session_id)s) AS owner
    """,
)

_DEAD = """s.unsettled > 0 AND s.not_before IS NULL AND s.blamed_token IS DISTINCT FROM s.token
          AND (s.lease_until <= perdure_now() + make_interval(secs => %(lease_s)s::float / 2)
               OR s.lease_until > perdure_now() + make_interval(secs => %(lease_s)s::float * 2))"""


# Charges the death of a process to one of its turns: the process that holds the session's expired lease has died, or no
# longer renews it. The turn that is charged keeps its claim counted in `strikes` and `claims`. The claims of the other
# turns of the process are not counted, since these turns were probably interrupted by the turn that is charged, or by a
# cause outside of all turns. The charged turn is the one with the most counted claims. Among equals, it is the turn
# whose tool call began last. From the third death since a turn's last progress on, twice as many turns may be charged
# each time, so that a turn that kills each of its processes is charged soon, even if others seem more suspicious.
#
# The leases of a dead process expire within `heartbeat_s` of each other, or after their last renewal. A lease that was
# renewed in the last half of `lease_s` belongs to a process that lives, of which only the expired turn is stuck.
#
# Waits for sessions that another transaction has locked, for example to claim them: if it skipped them, they would be
# charged once more by themselves. All are locked in one order. A session whose lease was renewed or released meanwhile
# is not judged, so the conditions are checked again on the locked row (`locked`).
def _blame(name: str, locking: str) -> Statement:
    return Statement(
        name,
        f"""
    WITH holder AS MATERIALIZED (
        SELECT lease_owner FROM sessions
        WHERE session_id = %(session_id)s AND lease_until IS NOT NULL AND blamed_token IS DISTINCT FROM token
    ), dead AS (
        SELECT s.session_id, s.token, s.claims,
               (SELECT max(e.intended_at) FROM turns AS t JOIN tool_effects AS e USING (turn_id)
                WHERE t.session_id = s.session_id AND t.settled_at IS NULL AND e.status = 'intended'
                  AND e.finished_at IS NULL AND e.waits_for IS NULL) AS calling_since
        FROM holder JOIN sessions AS s ON s.lease_owner = holder.lease_owner
        WHERE {_DEAD}
    ), ranked AS (
        SELECT session_id, token, row_number() OVER (
            ORDER BY claims DESC, calling_since DESC NULLS LAST, session_id) AS place
        FROM dead
    ), locked AS (
        SELECT s.session_id, place > 2 ^ least(greatest(s.deaths - 1, 0), 30) AS innocent
        FROM ranked JOIN sessions AS s USING (session_id, token)
        WHERE {_DEAD}
        ORDER BY s.session_id FOR NO KEY UPDATE OF s {locking}
    )
    UPDATE sessions AS s
    SET blamed_token = s.token, deaths = s.deaths + 1,
        strikes = greatest(s.strikes - innocent::int, 0), claims = greatest(s.claims - innocent::int, 0)
    FROM locked WHERE s.session_id = locked.session_id
    RETURNING s.session_id
    """,
    )


BLAME = _blame("turns.blame", "")

# For a session that stays locked for long, such as during the erasure of a long history, or by a transaction that waits
# for this one: the other sessions of the dead process are judged without it.
BLAME_UNLOCKED = _blame("turns.blame_unlocked", "SKIP LOCKED")
