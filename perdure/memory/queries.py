"""The SQL statements for the decay of memories and for hot memories."""

from __future__ import annotations

from perdure.database.engine import Statement

# --- decay -------------------------------------------------------------------------------

# Computes the formula of `perdure.memory.decay`. PostgreSQL's `exp` fails for exponents below about -745, so exponents
# below -700 are replaced by -700. This changes no result, because a memory's value never falls below `floor` times its
# importance, and `floor` is greater than exp(-700). Writes only values that differ by more than `noticeable` times the
# importance, because writing each value in each run would rewrite the whole table.
DECAY = Statement(
    "decay.decay",
    """
    WITH page AS (
        SELECT memory_id, kind, importance, value, created_at, last_accessed_at, cardinality(channels) AS channels,
               access_count, extract(epoch FROM perdure_now() - created_at)::double precision / 3600 AS hours
        FROM memories
        WHERE archived_at IS NULL AND memory_id > %(after)s
        ORDER BY memory_id LIMIT %(most)s
    ), rated AS (
        SELECT page.*, %(base_rate)s::double precision * k.rate
                 / (1 + 0.2::double precision * channels)
                 / (1 + 0.3::double precision * ln(1 + access_count::double precision))
                 * (1 - least(1, 0.1::double precision * (SELECT count(*) FROM relations AS r
                                                          WHERE r.memory_id = page.memory_id))) AS rate
        FROM page
        JOIN unnest(%(kinds)s::text[], %(rates)s::double precision[]) AS k (kind, rate) USING (kind)
    ), reckoned AS (
        SELECT memory_id, value, importance,
               greatest(importance * exp(greatest(-rate * greatest(hours, 0), -700)),
                        %(floor)s::double precision * importance) AS now_worth,
               created_at < perdure_now() - make_interval(days => %(archive_after_days)s)
                 AND coalesce(last_accessed_at, created_at)
                     < perdure_now() - make_interval(days => %(archive_after_days)s) AS forgotten
        FROM rated
    ), written AS (
        UPDATE memories AS m
        SET value = r.now_worth, decayed_at = perdure_now(),
            archived_at = CASE WHEN r.forgotten AND r.now_worth < %(archive_below)s THEN perdure_now() END
        FROM reckoned AS r
        WHERE m.memory_id = r.memory_id AND m.archived_at IS NULL
          AND (abs(r.value - r.now_worth) > %(noticeable)s::double precision * r.importance
               OR r.forgotten AND r.now_worth < %(archive_below)s)
        RETURNING m.archived_at
    )
    SELECT (SELECT count(*) FROM page) AS looked_at, (SELECT max(memory_id::text)::uuid FROM page) AS last,
           (SELECT count(*) FROM written) AS changed,
           (SELECT count(*) FROM written WHERE archived_at IS NOT NULL) AS archived
    """,
)

# --- hot memories ------------------------------------------------------------------------

# The next page of users who have recent accesses or hot memories. The lock serialises concurrent refreshes.
HOT_USERS = Statement(
    "meta.hot_users",
    """
    SELECT u.user_id FROM users AS u
    WHERE u.user_id > %(after)s
      AND coalesce((SELECT true FROM memory_accesses AS a
                    WHERE a.user_id = u.user_id AND a.accessed_at > perdure_now() - make_interval(days => %(days)s)
                    LIMIT 1),
                   (SELECT true FROM hot_memories AS h WHERE h.user_id = u.user_id LIMIT 1), false)
    ORDER BY u.user_id LIMIT %(most_users)s
    FOR NO KEY UPDATE
    """,
)

# Ranks each user's memories by the number of recalls, then by the time of the latest recall.
_RANKED = """
    WITH counted AS (
        SELECT a.user_id, a.memory_id, count(*) AS times, max(a.accessed_at) AS latest, min(m.value) AS value
        FROM memory_accesses AS a
        JOIN memories AS m USING (memory_id)
        WHERE a.user_id = ANY (%(user_ids)s::text[])
          AND a.accessed_at > perdure_now() - make_interval(days => %(days)s)
          AND m.archived_at IS NULL AND m.superseded_by IS NULL AND m.valid_to IS NULL
        GROUP BY a.user_id, a.memory_id
    ), numbered AS (
        SELECT user_id, memory_id, times,
               row_number() OVER (PARTITION BY user_id ORDER BY times DESC, latest DESC, value DESC, memory_id) AS rank
        FROM counted
    ), ranked AS (
        SELECT * FROM numbered WHERE rank <= %(most)s
    )
"""

# Deletes the rows that differ from the ranking. `WRITE_HOT` then inserts the missing rows; unchanged rows stay.
FORGET_HOT = Statement(
    "meta.forget_hot",
    f"""
    {_RANKED}
    DELETE FROM hot_memories AS h
    WHERE h.user_id = ANY (%(user_ids)s::text[]) AND NOT EXISTS (
        SELECT FROM ranked AS r
        WHERE r.user_id = h.user_id AND r.rank = h.rank AND r.memory_id = h.memory_id AND r.times = h.score
    )
    """,  # noqa: S608 (constants)
)

# A memory that was recalled since `FORGET_HOT` may have another rank now. The next refresh corrects that.
WRITE_HOT = Statement(
    "meta.write_hot",
    f"""
    {_RANKED}, written AS (
        INSERT INTO hot_memories (user_id, rank, memory_id, score, refreshed_at)
        SELECT user_id, rank, memory_id, times, perdure_now() FROM ranked AS r
        WHERE NOT EXISTS (SELECT FROM hot_memories AS h WHERE h.user_id = r.user_id AND h.rank = r.rank)
        ON CONFLICT DO NOTHING
    )
    SELECT count(*) AS hot FROM ranked
    """,  # noqa: S608 (constants)
)

# Deletes accesses that are too old for the ranking. A join would read all accesses for each batch.
FORGET_ACCESSES = Statement(
    "meta.forget_accesses",
    """
    DELETE FROM memory_accesses WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM memory_accesses
        WHERE accessed_at < perdure_now() - make_interval(days => %(days)s)
        ORDER BY accessed_at LIMIT %(most)s))
    RETURNING 1
    """,
)
