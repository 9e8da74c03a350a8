"""The query of `perdure.channels.activity`."""

from __future__ import annotations

from perdure.database.engine import Statement

USER_EXISTS = Statement(
    "channels.user_exists",
    "SELECT EXISTS (SELECT FROM users WHERE user_id = %(user_id)s) AS known",
    writes=False,
)
