"""Recognises the reply of a failed turn in SQL.

The reply of a failed turn is the error's message. People read it; a model never does. So the statements that read
messages for a prompt, a summary, a memory or a search index exclude it, and those that read messages for people mark
it. The turn's row tells which message it is.
"""

from __future__ import annotations

from perdure.errors import ContentFiltered, ContextTooLong

LEFT_OUT_CODES = (ContextTooLong.code, ContentFiltered.code)
"""A turn that failed with one of these codes is left out of later prompts: its messages would fail them, too."""

LEFT_OUT = f"(status = 'failed' AND error_code IN {LEFT_OUT_CODES})"
"""The SQL condition that a row of `turns` is left out of later prompts and of summaries."""

FAILURE_OF = "failed.turn_id = m.turn_id AND failed.reply_seq = m.seq AND failed.status = 'failed'"
"""The SQL condition that joins a row of `messages AS m` to the row of `turns AS failed` whose error it reports."""

WITH_FAILURE = f"""
    LEFT JOIN LATERAL (
        SELECT error_code, error_message FROM turns AS failed WHERE {FAILURE_OF} LIMIT 1) AS failed ON true
""".strip()  # noqa: S608 (constants)
"""Joins each row of `messages AS m` to the error that it reports. The limit makes the planner read one turn per row."""

REMEMBERED = """
    (SELECT additions -> 'remember' = 'false' FROM turns WHERE turn_id = m.turn_id) IS NOT TRUE
""".strip()
"""The SQL condition that a row of `messages AS m` is not of a turn of which nothing may be remembered."""

SPOKEN = "(SELECT status = 'failed' AND reply_seq = m.seq FROM turns WHERE turn_id = m.turn_id) IS NOT TRUE"
"""The SQL condition that a row of `messages AS m` is not the reply of a failed turn. Reads one turn by its key."""
