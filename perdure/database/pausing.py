"""The conditions that a pause applies to a turn: see `perdure.turns.pauses`."""

from __future__ import annotations

PAUSED = """EXISTS (
        SELECT FROM pauses AS p
        WHERE (p.user_id IS NULL OR p.user_id = {user_id})
          AND (p.tenant IS NULL OR strpos({user_id}, chr(31)) > 0 AND split_part({user_id}, chr(31), 1) = p.tenant)
          AND (p.agent IS NULL OR p.agent = {agent}))"""
"""SQL condition with the places `{user_id}`, a user's key, and `{agent}`: a pause applies to the user's turn."""

PAUSED_SESSION = PAUSED.format(
    user_id="{session}.user_id",
    agent="""(SELECT t.agent FROM turns AS t
                             WHERE t.session_id = {session}.session_id AND t.settled_at IS NULL
                             ORDER BY t.seq LIMIT 1)""",
)
"""SQL condition: a pause applies to the oldest unsettled turn of the session `{session}`."""
