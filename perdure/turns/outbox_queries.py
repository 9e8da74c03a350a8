"""The statements of the outbox."""

from __future__ import annotations

from perdure.database.engine import Statement

# The condition that a delivery is due. TAKE_DELIVERY moves `due_at` ahead, so that attempts never overlap. A `due_at`
# further ahead than the longest pause (`furthest_s`) was written while the server's clock was ahead, and counts as
# past.
_DELIVERY_DUE = "(due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(furthest_s)s))"


def _receiver(delivery: str) -> str:
    """The SQL expression that identifies the receiver of a delivery.

    It must equal the expression in the index `deliveries_pending_idx`. A receiver gets the deliveries of a conversation
    in the order of their turns.
    """
    target = f"{delivery}.target"
    return f"""md5(coalesce({target} ->> 'url', {target} ->> 'task',
                         coalesce({target} ->> 'channel', '') || ' ' || coalesce({target} #>> '{{place,chat}}', '')))"""


def _place(delivery: str, turn: str, session: str) -> str:
    """The SQL sort key of a conversation's deliveries.

    Deliveries are in the order of their turns. Within a turn, requests for approval come before the reply.
    """
    return f"""({session}.created_at, {session}.session_id, {turn}.seq,
                     coalesce({delivery}.asking_seq, {2**63 - 1}))"""


# The pending deliveries that have the same conversation and the same receiver as the row `own`. Pending deliveries
# accumulate while a receiver fails, so a limit bounds the work. A delivery beyond the limit waits for the earlier ones.
_PENDING = f"""
    (SELECT p.delivery_id, p.turn_id, p.asking_seq, p.due_at FROM deliveries AS p
     WHERE p.status = 'pending' AND p.user_id = own.user_id AND p.scope = own.scope
       AND {_receiver("p")} = {_receiver("own")}
     ORDER BY p.delivery_id LIMIT 100)
""".strip()

TAKE_DELIVERY = Statement(
    "deliveries.take",
    f"""
    WITH own AS (
        SELECT o.delivery_id, o.target, o.asking_seq, t.seq, s.session_id, s.created_at, s.user_id, s.scope
        FROM deliveries AS o LEFT JOIN turns AS t USING (turn_id) LEFT JOIN sessions AS s USING (session_id)
        WHERE o.delivery_id = %(delivery_id)s
    )
    UPDATE deliveries AS d
    SET attempts = attempts + 1, due_at = perdure_now() + make_interval(secs => %(attempt_s)s),
        wake_at = NULL, wakes = 0
    FROM own
    WHERE d.delivery_id = own.delivery_id AND status = 'pending' AND {_DELIVERY_DUE}
      AND NOT EXISTS (
            SELECT FROM {_PENDING} AS e
            JOIN turns AS earlier ON earlier.turn_id = e.turn_id
            JOIN sessions AS s ON s.session_id = earlier.session_id
            WHERE {_place("e", "earlier", "s")} < {_place("own", "own", "own")})
    RETURNING d.turn_id, d.target, attempts, extract(epoch FROM perdure_now() - d.created_at)::float AS age_s
    """,
)

# The due delivery that follows the delivery in `over`, in the same conversation and to the same receiver.
_NEXT = f"""
    SELECT (SELECT n.delivery_id
            FROM (SELECT over.target, over.asking_seq, t.seq, s.session_id, s.created_at, s.user_id, s.scope
                  FROM turns AS t JOIN sessions AS s USING (session_id) WHERE t.turn_id = over.turn_id) AS own,
                 LATERAL {_PENDING} AS n
            JOIN turns AS later ON later.turn_id = n.turn_id
            JOIN sessions AS s ON s.session_id = later.session_id
            WHERE n.due_at <= perdure_now() AND {_place("n", "later", "s")} > {_place("own", "own", "own")}
            ORDER BY {_place("n", "later", "s")[1:-1]} LIMIT 1) AS next_id
    FROM over
"""

DELIVERED = Statement(
    "deliveries.delivered",
    f"""
    WITH over AS (
        UPDATE deliveries SET status = 'delivered', delivered_at = perdure_now(), last_error = NULL
        WHERE delivery_id = %(delivery_id)s
        RETURNING turn_id, target, asking_seq
    )
    {_NEXT}
    """,
)

# `forgiven`: the attempt does not count (see `NotAsked`).
POSTPONE_DELIVERY = Statement(
    "deliveries.postpone",
    f"""
    WITH postponed AS (
        UPDATE deliveries
        SET last_error = %(error)s,
            attempts = attempts - CASE WHEN %(forgiven)s THEN 1 ELSE 0 END,
            status = CASE WHEN %(retry_s)s::float IS NULL THEN 'failed' ELSE 'pending' END,
            due_at = perdure_now() + make_interval(secs => coalesce(%(retry_s)s::float, 0))
        WHERE delivery_id = %(delivery_id)s AND status = 'pending'
        RETURNING turn_id, target, asking_seq, status
    ), over AS (
        SELECT turn_id, target, asking_seq FROM postponed WHERE status = 'failed'
    )
    {_NEXT}
    """,
)

# Returns the due deliveries, whose wake-ups the caller publishes. Sets `wake_at`, the time before which a delivery is
# not returned again. The pause doubles with each wake-up until a worker attempts the delivery. A time further ahead
# than the longest pause was written while the server's clock was ahead, and counts as past.
DELIVERIES_DUE = Statement(
    "deliveries.due",
    """
    WITH due AS (
        (SELECT delivery_id, greatest(due_at, wake_at) AS since FROM deliveries
         WHERE status = 'pending' AND greatest(due_at, wake_at) <= perdure_now()
         ORDER BY greatest(due_at, wake_at) LIMIT (SELECT %(most)s::bigint))
        UNION ALL
        (SELECT delivery_id, greatest(due_at, wake_at) FROM deliveries
         WHERE status = 'pending'
           AND greatest(due_at, wake_at) > perdure_now() + make_interval(secs => %(furthest_s)s)
         ORDER BY greatest(due_at, wake_at) LIMIT (SELECT %(most)s::bigint))
        LIMIT %(most)s
    ), locked AS (
        SELECT delivery_id FROM deliveries
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM due)) AND status = 'pending'
        FOR NO KEY UPDATE SKIP LOCKED
    ), marked AS (
        UPDATE deliveries
        SET wake_at = perdure_now() + make_interval(secs => %(backoff_s)s * 2 ^ least(wakes, 6)), wakes = wakes + 1
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM locked))
        RETURNING delivery_id
    )
    SELECT delivery_id FROM due JOIN marked USING (delivery_id) ORDER BY since
    """,
)

# Undoes DELIVERIES_DUE for deliveries whose wake-ups the broker refused: they are due in the sweeper's next round.
UNWAKE_DELIVERIES = Statement(
    "deliveries.unwake",
    """
    UPDATE deliveries SET wake_at = NULL, wakes = greatest(wakes - 1, 0)
    WHERE delivery_id = ANY (%(delivery_ids)s::uuid[]) AND status = 'pending'
    """,
)

DELIVERIES = Statement(
    "deliveries.list",
    """
    SELECT d.delivery_id, d.turn_id, coalesce(t.user_id, d.user_id) AS user_id, d.target, d.status, d.attempts,
           d.last_error, d.created_at, CASE WHEN d.status = 'pending' THEN d.due_at END AS due_at, d.delivered_at
    FROM deliveries AS d LEFT JOIN turns AS t USING (turn_id)
    WHERE (%(status)s::text IS NULL OR d.status = %(status)s)
    ORDER BY d.delivery_id DESC LIMIT %(limit)s
    """,
    writes=False,
)

# Restarts a delivery. If a worker is attempting the delivery, it may be sent twice. The receiver deduplicates by the
# delivery's id.
RESEND = Statement(
    "deliveries.resend",
    """
    UPDATE deliveries
    SET status = 'pending', attempts = 0, due_at = perdure_now(), wake_at = NULL, wakes = 0, delivered_at = NULL
    WHERE delivery_id = %(delivery_id)s
    RETURNING delivery_id
    """,
)
