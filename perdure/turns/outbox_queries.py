"""The statements of the outbox."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.keyed import keyed
from perdure.database.rounds import visiting

# The condition that a delivery is due. TAKE_DELIVERY moves `due_at` ahead, so that attempts never overlap. A `due_at`
# further ahead than the longest pause (`furthest_s`) was written while the server's clock was ahead, and counts as
# past.
_IS_PENDING = keyed("status = 'pending'")

_DELIVERY_DUE = "(due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(furthest_s)s))"


def _receiver(delivery: str) -> str:
    """The SQL expression that identifies the receiver of a delivery.

    It must equal the expression in the index `deliveries_pending_idx`. A receiver gets the deliveries of a conversation
    in the order of their turns. A task in two queues is two receivers: `_PENDING` compares the queues, too.
    """
    target = f"{delivery}.target"
    return f"""md5(coalesce({target} ->> 'url', {target} ->> 'task',
                         coalesce({target} ->> 'channel', '') || ' ' || coalesce({target} #>> '{{place,chat}}', '')))"""


def _service(delivery: str) -> str:
    """The SQL expression that identifies the service of a delivery: a URL's host, a channel, or a task's queue.

    It must equal the expression in the indexes `deliveries_service_idx` and `deliveries_user_idx`. Each service has a
    share of the deliveries.
    """
    target = f"{delivery}.target"
    return f"""md5(coalesce(lower(substring({target} ->> 'url', '^[^:/?#]+://(?:[^/?#@]*@)?([^/?#]*)')),
                         'task ' || coalesce({target} ->> 'queue', {target} ->> 'task'),
                         'channel ' || ({target} ->> 'channel'), ''))"""


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
       AND {_receiver("p")} = {_receiver("own")} AND p.target ->> 'queue' IS NOT DISTINCT FROM own.target ->> 'queue'
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
    WHERE d.delivery_id = own.delivery_id AND {_IS_PENDING} AND {_DELIVERY_DUE}
      AND NOT EXISTS (
            SELECT FROM {_PENDING} AS e
            JOIN turns AS earlier ON earlier.turn_id = e.turn_id
            JOIN sessions AS s ON s.session_id = earlier.session_id
            WHERE {_place("e", "earlier", "s")} < {_place("own", "own", "own")})
    RETURNING d.turn_id, d.target, attempts, extract(epoch FROM perdure_now() - d.created_at)::float AS age_s
    """,
)

# Records the messages that the receiver has accepted: `now_sent`. If others than `already_sent` are recorded, another
# attempt has sent them, and nothing changes.
NOTE_SENT = Statement(
    "deliveries.note_sent",
    f"""
    UPDATE deliveries
    SET target = target || jsonb_build_object('sent', %(now_sent)s::jsonb),
        due_at = perdure_now() + make_interval(secs => %(attempt_s)s)
    WHERE delivery_id = %(delivery_id)s AND {_IS_PENDING} AND coalesce(target -> 'sent', '[]') = %(already_sent)s::jsonb
    RETURNING delivery_id
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

# `following_id` is the delivery to the same service that has been due for longest. The caller publishes it, so that a
# service gets its deliveries as fast as it takes them.
DELIVERED = Statement(
    "deliveries.delivered",
    f"""
    WITH over AS (
        UPDATE deliveries SET status = 'delivered', delivered_at = perdure_now(), last_error = NULL
        WHERE delivery_id = %(delivery_id)s
        RETURNING turn_id, target, asking_seq, extract(epoch FROM perdure_now() - created_at)::float AS age_s
    ), following AS (
        SELECT d.delivery_id FROM deliveries AS d
        WHERE d.status = 'pending' AND {_service("d")} = (SELECT {_service("over")} FROM over)
          AND greatest(d.due_at, d.wake_at) <= perdure_now() AND d.delivery_id <> %(delivery_id)s
        ORDER BY greatest(d.due_at, d.wake_at) LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
    ), marked AS (
        UPDATE deliveries
        SET wake_at = perdure_now() + make_interval(secs => %(backoff_s)s * 2 ^ least(wakes, 6)), wakes = wakes + 1
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM following))
        RETURNING delivery_id
    )
    {_NEXT.replace("FROM over", ", (SELECT delivery_id FROM marked) AS following_id, age_s FROM over")}
    """,
)

# `forgiven`: the attempt does not count (see `NotAsked`). `due_at` of a failed delivery is when it was abandoned.
POSTPONE_DELIVERY = Statement(
    "deliveries.postpone",
    f"""
    WITH postponed AS (
        UPDATE deliveries
        SET last_error = %(error)s,
            attempts = attempts - CASE WHEN %(forgiven)s THEN 1 ELSE 0 END,
            status = CASE WHEN %(retry_s)s::float IS NULL THEN 'failed' ELSE 'pending' END,
            due_at = perdure_now() + make_interval(secs => coalesce(%(retry_s)s::float, 0))
        WHERE delivery_id = %(delivery_id)s AND {_IS_PENDING}
        RETURNING turn_id, target, asking_seq, status
    ), over AS (
        SELECT turn_id, target, asking_seq FROM postponed WHERE status = 'failed'
    )
    {_NEXT}
    """,
)

# Postpones the delivery `delivery_id`, which its service's breaker has refused, and at most `most` other deliveries to
# this service that are due and not being attempted. No attempt counts. A delivery's pause grows with its age. If a
# delivery is older than `forgiven_s`, it is not postponed with the others, because its attempts count. `known`: other
# deliveries to this service already wait for the same reason.
POSTPONE_SERVICE = Statement(
    "deliveries.postpone_service",
    f"""
    WITH own AS (
        SELECT {_service("d")} AS service FROM deliveries AS d WHERE d.delivery_id = %(delivery_id)s
    ), held AS (
        SELECT d.delivery_id FROM own, deliveries AS d
        WHERE d.status = 'pending' AND {_service("d")} = own.service AND d.due_at <= perdure_now()
          AND greatest(d.due_at, d.wake_at) <= perdure_now() + interval '10 seconds'
          AND d.created_at > perdure_now() - make_interval(secs => %(forgiven_s)s)
        LIMIT (SELECT %(most)s::bigint)
        FOR NO KEY UPDATE OF d SKIP LOCKED
    ), postponed AS (
        UPDATE deliveries
        SET attempts = attempts - CASE WHEN delivery_id = %(delivery_id)s THEN 1 ELSE 0 END,
            last_error = %(error)s, wake_at = NULL, wakes = 0,
            due_at = perdure_now() + make_interval(secs => least(
                greatest(%(retry_s)s::float, extract(epoch FROM perdure_now() - created_at)::float / 2),
                %(longest_s)s::float))
        WHERE status = 'pending'
          AND delivery_id = ANY (ARRAY(SELECT delivery_id FROM held UNION SELECT %(delivery_id)s::uuid))
        RETURNING delivery_id, extract(epoch FROM due_at - perdure_now())::float AS retry_s
    )
    SELECT (SELECT count(*) FROM postponed) AS postponed,
           (SELECT retry_s FROM postponed WHERE delivery_id = %(delivery_id)s) AS retry_s,
           EXISTS (SELECT FROM own, deliveries AS d
                   WHERE d.status = 'pending' AND {_service("d")} = own.service
                     AND greatest(d.due_at, d.wake_at) > perdure_now() AND d.last_error = %(error)s
                     AND d.delivery_id <> %(delivery_id)s) AS known
    """,
)

# Keeps the pause of a delivery from growing: a worker took its wake-up, and had no share left for its service or
# its user.
WITHOUT_SHARE = Statement(
    "deliveries.without_share",
    f"UPDATE deliveries SET wakes = least(wakes, 1) WHERE delivery_id = %(delivery_id)s AND {_IS_PENDING}",
)

# The service and the user of a delivery. The user is '' in a row of a release before 0030.
SHARERS = Statement(
    "deliveries.sharers",
    f"""
    SELECT {_service("d")} AS service, coalesce(d.user_id, '') AS user_id
    FROM deliveries AS d WHERE d.delivery_id = %(delivery_id)s
    """,
    writes=False,
)

_VISITS = 10

# Of the pending deliveries to the service `place`, the one that has been due for longest of each user, for at most as
# many users as the service's share. Users of whom no delivery is due are passed over: at most `_VISITS` times as many
# users are visited. The visit of the users begins at the hash `start`, a random one in each round, so
# that each user is visited, however many there are. Each visit is one probe of `deliveries_user_idx`.
_FIRST_OF_USERS = f"""
    WITH RECURSIVE ahead (visited) AS (
        SELECT min(md5(p.user_id)) FROM deliveries AS p
        WHERE p.status = 'pending' AND {_service("p")} = place AND md5(p.user_id) > %(start)s
        UNION ALL
        SELECT (SELECT min(md5(p.user_id)) FROM deliveries AS p
                WHERE p.status = 'pending' AND {_service("p")} = place AND md5(p.user_id) > ahead.visited)
        FROM ahead WHERE ahead.visited IS NOT NULL
    ), behind (visited) AS (
        SELECT min(md5(p.user_id)) FROM deliveries AS p
        WHERE p.status = 'pending' AND {_service("p")} = place AND md5(p.user_id) <= %(start)s
        UNION ALL
        SELECT (SELECT min(md5(p.user_id)) FROM deliveries AS p
                WHERE p.status = 'pending' AND {_service("p")} = place AND md5(p.user_id) > behind.visited
                  AND md5(p.user_id) <= %(start)s)
        FROM behind WHERE behind.visited IS NOT NULL
    ), users AS (
        SELECT visited FROM (SELECT visited FROM ahead UNION ALL SELECT visited FROM behind) AS each
        WHERE visited IS NOT NULL LIMIT (SELECT {_VISITS} * most FROM share)
    )
    SELECT first.* FROM users, LATERAL (
        SELECT d.delivery_id, greatest(d.due_at, d.wake_at) AS since FROM deliveries AS d
        WHERE d.status = 'pending' AND {_service("d")} = place AND md5(d.user_id) = visited
          AND greatest(d.due_at, d.wake_at) <= perdure_now()
        ORDER BY greatest(d.due_at, d.wake_at) LIMIT 1) AS first
    LIMIT (SELECT most FROM share)
""".strip()

# Returns the due deliveries, whose wake-ups the caller publishes. Each service has an equal share, so that many
# deliveries to one service do not delay those to another. A round visits at most `most` services, and the next round
# continues behind them. Of a service's share, each user first has one delivery, so that many deliveries of one user do
# not delay another's; the others are those that have been due for longest. Sets `wake_at`, the time before which a
# delivery is not returned again. The pause doubles with each wake-up until a worker attempts the delivery. A time
# further ahead than the longest pause was written while the server's clock was ahead, and counts as past.
DELIVERIES_DUE = Statement(
    "deliveries.due",
    f"""
    WITH RECURSIVE {
        visiting(
            "deliveries", table="deliveries AS v", place=_service("v"), where="v.status = 'pending'", most="%(most)s"
        )
    },
    services AS MATERIALIZED (
        SELECT place FROM visited
        WHERE (SELECT min(greatest(d.due_at, d.wake_at)) FROM deliveries AS d
               WHERE d.status = 'pending' AND {_service("d")} = place) <= perdure_now()
    ), share AS (
        SELECT ceil(%(most)s::float / count(*))::bigint AS most FROM services HAVING count(*) > 0
    ), found AS (
        (SELECT found.delivery_id, found.number, found.since FROM services, LATERAL (
            SELECT delivery_id, since, row_number() OVER (ORDER BY min(rank), since) AS number FROM (
                (SELECT delivery_id, since, 1 AS rank FROM ({_FIRST_OF_USERS}) AS of_users)
                UNION ALL
                (SELECT d.delivery_id, greatest(d.due_at, d.wake_at), 2 FROM deliveries AS d
                 WHERE d.status = 'pending' AND {_service("d")} = place
                   AND greatest(d.due_at, d.wake_at) <= perdure_now()
                 ORDER BY greatest(d.due_at, d.wake_at) LIMIT (SELECT most FROM share))) AS each
            GROUP BY delivery_id, since ORDER BY number LIMIT (SELECT most FROM share)) AS found)
        UNION ALL
        (SELECT delivery_id, 1, greatest(due_at, wake_at) FROM deliveries
         WHERE status = 'pending'
           AND greatest(due_at, wake_at) > perdure_now() + make_interval(secs => %(furthest_s)s)
         ORDER BY greatest(due_at, wake_at) LIMIT (SELECT %(most)s::bigint))
    ), due AS (
        SELECT * FROM found ORDER BY number, since LIMIT %(most)s
    ), locked AS (
        SELECT delivery_id FROM deliveries
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM due)) AND {_IS_PENDING}
        FOR NO KEY UPDATE SKIP LOCKED
    ), marked AS (
        UPDATE deliveries
        SET wake_at = perdure_now() + make_interval(secs => %(backoff_s)s * 2 ^ least(wakes, 6)), wakes = wakes + 1
        WHERE delivery_id = ANY (ARRAY(SELECT delivery_id FROM locked))
        RETURNING delivery_id
    )
    SELECT delivery_id FROM due JOIN marked USING (delivery_id) ORDER BY number, since
    """,
)

# Of the deliveries whose wake-ups were published, those that no worker has attempted.
UNTAKEN_DELIVERIES = Statement(
    "deliveries.untaken",
    f"""
    SELECT delivery_id FROM deliveries
    WHERE delivery_id = ANY (%(delivery_ids)s::uuid[]) AND {_IS_PENDING} AND wakes > 0
      AND wake_at > perdure_now()
    """,
    writes=False,
)

# Undoes DELIVERIES_DUE for deliveries whose wake-ups the broker refused: they are due in the sweeper's next round.
UNWAKE_DELIVERIES = Statement(
    "deliveries.unwake",
    f"""
    UPDATE deliveries SET wake_at = NULL, wakes = greatest(wakes - 1, 0)
    WHERE delivery_id = ANY (%(delivery_ids)s::uuid[]) AND {_IS_PENDING}
    """,
)

DELIVERIES = Statement(
    "deliveries.list",
    """
    SELECT delivery_id, turn_id, user_id, target, status, attempts, last_error, created_at,
           CASE WHEN status = 'pending' THEN due_at END AS due_at, delivered_at
    FROM deliveries
    WHERE (%(status)s::text IS NULL OR status = %(status)s)
    ORDER BY delivery_id DESC LIMIT %(limit)s
    """,
    writes=False,
)

# Failed deliveries are few among many, so the list of all would read far. Those that were abandoned last come first.
DELIVERIES_FAILED = Statement(
    "deliveries.list_failed",
    """
    SELECT delivery_id, turn_id, user_id, target, status, attempts, last_error, created_at,
           NULL::timestamptz AS due_at, delivered_at
    FROM deliveries WHERE status = 'failed' ORDER BY deliveries.due_at DESC LIMIT %(limit)s
    """,
    writes=False,
)

DELIVERIES_PENDING = Statement(
    "deliveries.list_pending",
    """
    SELECT delivery_id, turn_id, user_id, target, status, attempts, last_error, created_at, due_at, delivered_at
    FROM deliveries WHERE status = 'pending' ORDER BY greatest(due_at, wake_at) LIMIT %(limit)s
    """,
    writes=False,
)

# Restarts a delivery: one that was delivered with its first message, another with the first that was not accepted. If a
# worker is attempting the delivery, it may be sent twice. The receiver deduplicates by the delivery's id.
RESEND = Statement(
    "deliveries.resend",
    """
    UPDATE deliveries
    SET status = 'pending', attempts = 0, due_at = perdure_now(), wake_at = NULL, wakes = 0, delivered_at = NULL,
        target = CASE WHEN status = 'delivered' THEN target - 'sent' ELSE target END
    WHERE delivery_id = %(delivery_id)s
    RETURNING delivery_id
    """,
)

# A page of the failed deliveries, the oldest first: those behind the delivery `after` of the time `created_at`.
FAILED = Statement(
    "deliveries.failed",
    """
    SELECT delivery_id, created_at, target FROM deliveries
    WHERE status = 'failed' AND created_at >= %(created_at)s::timestamptz
      AND (created_at, delivery_id) > (%(created_at)s::timestamptz, %(after)s::uuid)
    ORDER BY created_at, delivery_id LIMIT %(most)s
    """,
    writes=False,
)

# Restarts deliveries that have failed, and counts them.
RESEND_FAILED = Statement(
    "deliveries.resend_failed",
    f"""
    WITH due AS (
        UPDATE deliveries
        SET status = 'pending', attempts = 0, due_at = perdure_now(), wake_at = NULL, wakes = 0
        WHERE delivery_id = ANY (%(delivery_ids)s::uuid[]) AND {keyed("status = 'failed'")}
        RETURNING 1
    )
    SELECT count(*) AS resent FROM due
    """,
)
