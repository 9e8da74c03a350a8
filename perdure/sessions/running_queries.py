"""The SQL statements of running summaries. A session has one row, from its first block on."""

from __future__ import annotations

from perdure.database.engine import Statement
from perdure.database.failures import LEFT_OUT, REMEMBERED, SPOKEN
from perdure.database.fencing import HELD

# Keeps what a turn has decided: which messages have left the prompt, with their summary, and which leave next. A row
# never goes back: the statement may be repeated. What the background has written since the turn read the row counts. It
# returns no row if the session is no longer the worker's.
KEEP = Statement(
    "summaries.keep",
    f"""
    WITH held AS (
        SELECT session_id FROM sessions WHERE {HELD}
    ), kept AS (
        INSERT INTO running_summaries AS r (session_id, from_seq, to_seq, summary, extractive, next_seq, due_at)
        SELECT session_id, %(from_seq)s, %(to_seq)s, %(summary)s, %(extractive)s, %(next_seq)s,
               CASE WHEN %(next_seq)s::bigint IS NOT NULL THEN perdure_now() END
        FROM held
        ON CONFLICT (session_id) DO UPDATE
        SET to_seq = excluded.to_seq,
            summary = CASE WHEN r.to_seq = excluded.to_seq THEN r.summary
                           WHEN r.next_seq = excluded.to_seq THEN coalesce(r.next_summary, excluded.summary)
                           ELSE excluded.summary END,
            extractive = CASE WHEN r.to_seq = excluded.to_seq THEN r.extractive
                              ELSE excluded.extractive AND (r.next_seq = excluded.to_seq) IS NOT TRUE
                                   OR excluded.extractive AND r.next_summary IS NULL END,
            next_seq = excluded.next_seq, next_summary = NULL, attempts = 0, due_at = excluded.due_at
        WHERE (r.to_seq, coalesce(r.next_seq, 0)) < (excluded.to_seq, coalesce(excluded.next_seq, 0))
    )
    SELECT session_id FROM held
    """,  # noqa: S608 (constants)
)

# Claims blocks that wait for their summary. A claim expires after `lease_s`: the process may have died. A time further
# ahead than `furthest_s` was written while PostgreSQL's clock was ahead, and is due.
CLAIM = Statement(
    "summaries.claim",
    """
    WITH due AS (
        SELECT session_id FROM running_summaries
        WHERE due_at IS NOT NULL
          AND (due_at <= perdure_now() OR due_at > perdure_now() + make_interval(secs => %(furthest_s)s))
        ORDER BY due_at LIMIT %(most)s
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE running_summaries AS r
    SET attempts = r.attempts + 1,
        due_at = CASE WHEN r.attempts + 1 < %(max_attempts)s
                      THEN perdure_now() + make_interval(secs => %(lease_s)s) END
    WHERE r.session_id = ANY (ARRAY(SELECT session_id FROM due))
    RETURNING r.session_id, r.from_seq, r.to_seq, r.summary, r.next_seq
    """,
)

# The block's messages, without the replies of failed turns, and without turns that prompts leave out or of which
# nothing may be remembered.
BLOCK = Statement(
    "summaries.block",
    f"""
    SELECT m.seq, m.role, left(m.content, %(most_chars)s) AS content FROM messages AS m
    WHERE m.session_id = %(session_id)s AND m.seq > %(after)s AND m.seq <= %(next_seq)s
      AND m.role IN ('user', 'assistant') AND {SPOKEN} AND {REMEMBERED}
      AND (SELECT {LEFT_OUT} FROM turns WHERE turn_id = m.turn_id) IS NOT TRUE
    ORDER BY m.seq DESC LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)

# The turns of which nothing may be remembered.
FORGOTTEN = Statement(
    "summaries.forgotten",
    "SELECT turn_id FROM turns WHERE turn_id = ANY (%(turn_ids)s::uuid[]) AND additions -> 'remember' = 'false'",
    writes=False,
)

# Writes the summary of a claimed block. If its messages have left the prompt meanwhile, it replaces their extract. A
# block that changed in another way has a claim of its own, and this summary is dropped.
STORE = Statement(
    "summaries.store",
    """
    UPDATE running_summaries
    SET from_seq = 1,
        next_summary = CASE WHEN next_seq = %(next_seq)s THEN %(summary)s ELSE next_summary END,
        attempts = CASE WHEN next_seq = %(next_seq)s THEN 0 ELSE attempts END,
        due_at = CASE WHEN next_seq = %(next_seq)s THEN NULL ELSE due_at END,
        summary = CASE WHEN to_seq = %(next_seq)s THEN %(summary)s ELSE summary END,
        extractive = extractive AND to_seq <> %(next_seq)s
    WHERE session_id = %(session_id)s
      AND (to_seq = %(to_seq)s AND next_seq = %(next_seq)s AND next_summary IS NULL
           OR to_seq = %(next_seq)s AND extractive)
    RETURNING session_id
    """,
)

# Gives a claimed block back: after `pause_s`, or never if `given_up`.
POSTPONE = Statement(
    "summaries.postpone",
    """
    UPDATE running_summaries
    SET due_at = CASE WHEN NOT %(given_up)s AND attempts < %(max_attempts)s
                      THEN perdure_now() + make_interval(secs => %(pause_s)s * 2 ^ attempts) END
    WHERE session_id = %(session_id)s AND next_seq = %(next_seq)s AND next_summary IS NULL
    """,
)
