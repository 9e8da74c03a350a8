"""SQL that visits groups of rows in turn: each round continues where the last one stopped, so that none is left out."""

from __future__ import annotations


def visiting(sweep: str, *, table: str, place: str, where: str, most: str) -> str:
    """The CTEs, for `WITH RECURSIVE`, that visit at most `most` groups of the rows of `table` that meet `where`.

    `place` is an SQL expression of type text that names a row's group, and begins with an MD5 hash in hexadecimal
    digits. A partial index on it makes each visit one probe, however many rows a group has. The CTE `visited` has the
    groups' places in the column `place`. A round that reaches `most` stores the beginning of its last place in the row
    `sweep` of `sweeps`, with a letter that is behind all digits, and the next round continues there. The stored
    beginning identifies no user.
    """
    after = f"coalesce((SELECT after FROM sweeps WHERE name = '{sweep}'), '')"
    return f"""
        ahead (place) AS (
            SELECT min({place}) FROM {table} WHERE {where} AND {place} > {after}
            UNION ALL
            SELECT (SELECT min({place}) FROM {table} WHERE {where} AND {place} > ahead.place)
            FROM ahead WHERE ahead.place IS NOT NULL
        ), behind (place) AS (
            SELECT min({place}) FROM {table} WHERE {where} AND {place} <= {after}
            UNION ALL
            SELECT (SELECT min({place}) FROM {table} WHERE {where} AND {place} > behind.place AND {place} <= {after})
            FROM behind WHERE behind.place IS NOT NULL
        ), visited AS MATERIALIZED (
            SELECT place FROM (SELECT place FROM ahead UNION ALL SELECT place FROM behind) AS each
            WHERE place IS NOT NULL LIMIT (SELECT {most}::bigint)
        ), stopped AS (
            INSERT INTO sweeps (name, due_at, after)
            SELECT '{sweep}', perdure_now(), left(place, 8) || 'g' FROM visited OFFSET {most}::bigint - 1 LIMIT 1
            ON CONFLICT (name) DO UPDATE SET after = excluded.after
        )
    """.strip()
