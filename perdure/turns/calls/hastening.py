"""Shortens the wait for a client's results while a newer message of the session waits behind their turn.

A client may end its run with a call whose arguments are its output: no request brings a result then. The wait is
shortened in the transaction that accepts a message behind the turn, through any channel, and in the one in which a turn
begins to wait while messages are behind it.
"""

from __future__ import annotations

from uuid import UUID

from perdure.database.engine import Executor
from perdure.turns.calls import queries

GRACE_S = 30.0
"""Seconds that a client has for its calls while a newer message of the session waits behind their turn."""


def hasten(executor: Executor, session_id: UUID) -> None:
    """Let the session's turn wait for its client for `GRACE_S` seconds at most, if a newer turn is behind it."""
    executor.run(queries.HASTEN, {"session_id": session_id, "grace_s": GRACE_S})
