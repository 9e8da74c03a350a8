"""The statements that route messages which an application inserted in its own transaction."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.rounds import visiting

# A message waits at most for the longer window of a rate limit. A `due_at` further ahead was written while the server's
# clock was ahead, and counts as past.
_AHEAD = "perdure_now() + interval '2 hours'"
_DUE = f"(due_at <= perdure_now() OR due_at > {_AHEAD})"

# The users of the oldest due messages, ordered by each user's oldest due message, with the number of these messages.
DUE_USERS = Statement(
    "unrouted.due_users",
    f"""
    SELECT user_id, count(*) AS messages FROM (
        (SELECT user_id, due_at, position FROM unrouted
         WHERE settled_at IS NULL AND due_at <= perdure_now() ORDER BY due_at, position LIMIT %(most)s)
        UNION ALL
        (SELECT user_id, due_at, position FROM unrouted
         WHERE settled_at IS NULL AND due_at > {_AHEAD} ORDER BY due_at, position LIMIT %(most)s)
    ) AS due
    GROUP BY user_id ORDER BY min(due_at), min(position)
    """,
    writes=False,
)

# For a long backlog: users whose oldest unrouted message is due, ordered by its due time. A round visits at most `most`
# users, and the next round continues behind them, so that a user with many messages hides no other user.
NEXT_USERS = Statement(
    "unrouted.next_users",
    f"""
    WITH RECURSIVE {
        visiting(
            "routing", table="unrouted", place="(md5(user_id) || user_id)", where="settled_at IS NULL", most="%(most)s"
        )
    }
    SELECT substr(place, 33) AS user_id FROM visited, LATERAL (
        SELECT due_at, position FROM unrouted
        WHERE (md5(user_id) || user_id) = place AND settled_at IS NULL ORDER BY position LIMIT 1) AS oldest
    WHERE {_DUE} ORDER BY due_at, position
    """,
)

# A user's unrouted messages in order of insertion. A message that is not due blocks the later ones.
OF_USER = Statement(
    "unrouted.of_user",
    f"""
    SELECT turn_id, message, attempts, {_DUE} AS due FROM unrouted
    WHERE user_id = %(user_id)s AND settled_at IS NULL ORDER BY position LIMIT %(most)s
    """,
    writes=False,
)

LOCK_USER = Statement(
    "unrouted.lock_user",
    """
    SELECT pg_try_advisory_xact_lock(
        hashtextextended(current_schema() || ' routing ' || %(user_id)s::text, 0)) AS locked
    """,
)

ROUTED = Statement(
    "unrouted.routed", "DELETE FROM unrouted WHERE turn_id = %(turn_id)s AND settled_at IS NULL RETURNING turn_id"
)

JOINED = Statement(
    "unrouted.joined",
    """
    UPDATE unrouted
    SET routed_to = coalesce((SELECT routed_to FROM unrouted WHERE turn_id = %(routed_to)s::uuid), %(routed_to)s::uuid),
        settled_at = perdure_now(), message = '{}'
    WHERE turn_id = %(turn_id)s AND settled_at IS NULL
    RETURNING turn_id
    """,
)

# Refuses a message. If the message has a receiver, also writes a delivery, whose `turn_id` has no row in `turns`.
REFUSED = Statement(
    "unrouted.refused",
    """
    WITH refused AS (
        UPDATE unrouted SET error_code = %(code)s, error_message = %(message)s, settled_at = perdure_now()
        WHERE turn_id = %(turn_id)s AND settled_at IS NULL
        RETURNING turn_id, user_id
    )
    INSERT INTO deliveries (delivery_id, turn_id, user_id, target, status, due_at, created_at)
    SELECT %(delivery_id)s::uuid, turn_id, user_id, %(reply_to)s::jsonb, 'pending', perdure_now(), perdure_now()
    FROM refused WHERE %(reply_to)s::jsonb IS NOT NULL
    RETURNING delivery_id
    """,
)

# Postpones a message, unless its row is locked.
POSTPONED = Statement(
    "unrouted.postponed",
    """
    WITH unlocked AS (
        SELECT turn_id FROM unrouted WHERE turn_id = %(turn_id)s AND settled_at IS NULL
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE unrouted AS u
    SET due_at = perdure_now() + make_interval(secs => %(seconds)s), attempts = attempts + %(charged)s
    FROM unlocked WHERE u.turn_id = unlocked.turn_id
    """,
)

READ = Statement("unrouted.read", "SELECT * FROM unrouted WHERE turn_id = %(turn_id)s", writes=False)
