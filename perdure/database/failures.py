"""Recognises the reply of a failed turn in SQL.

The reply of a failed turn is the error's message. People read it; a model never does. So the statements that read
messages for a prompt, a summary, a memory or a search index exclude it, and those that read messages for people mark
it. The turn's row tells which message it is.
"""

from __future__ import annotations

FAILURE_OF = "failed.turn_id = m.turn_id AND failed.reply_seq = m.seq AND failed.status = 'failed'"
"""The SQL condition that joins a row of `messages AS m` to the row of `turns AS failed` whose error it reports."""

WITH_FAILURE = f"""
    LEFT JOIN LATERAL (
        SELECT error_code, error_message FROM turns AS failed WHERE {FAILURE_OF} LIMIT 1) AS failed ON true
""".strip()  # noqa: S608 (constants)
"""Joins each row of `messages AS m` to the error that it reports. The limit makes the planner read one turn per row."""

SPOKEN = "(SELECT status = 'failed' AND reply_seq = m.seq FROM turns WHERE turn_id = m.turn_id) IS NOT TRUE"
"""The SQL condition that a row of `messages AS m` is not the reply of a failed turn. Reads one turn by its key."""
