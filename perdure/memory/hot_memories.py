"""Layer 5 of memory: the memories that are recalled most often for a user.

Each recall records the memories that it returned. Every six hours, a task ranks the memories that were recalled most
often in the last `PATTERN_DAYS` days. A prompt can then include these memories without a search. `refresh_hot` is
idempotent, and writes only what has changed.
"""

from __future__ import annotations

from perdure.database.engine import Database
from perdure.memory import queries

PATTERN_DAYS = 7
"""A recall counts towards the ranking for this number of days."""

MOST_HOT = 100
"""Maximum hot memories per user."""

_USERS_PER_COMMIT = 100
_ACCESSES_PER_COMMIT = 10_000


def refresh_hot(database: Database) -> int:
    """Rank the hot memories of all users; returns the number of hot memories.

    Also deletes the records of recalls that no longer count.

    Raises:
        Unavailable: the database cannot be reached; batches that are already committed stay.
    """
    hot, after = 0, ""
    while True:
        with database.transaction("meta.refresh_hot") as transaction:
            page = {"after": after, "days": PATTERN_DAYS, "most_users": _USERS_PER_COMMIT}
            users = [row.user_id for row in transaction.run(queries.HOT_USERS, page)]
            ranking = {"user_ids": users, "days": PATTERN_DAYS, "most": MOST_HOT}
            transaction.run(queries.FORGET_HOT, ranking)
            hot += int(transaction.run(queries.WRITE_HOT, ranking)[0].hot)
        if len(users) < _USERS_PER_COMMIT:
            break
        after = users[-1]
    expired = {"days": PATTERN_DAYS, "most": _ACCESSES_PER_COMMIT}
    while len(database.run(queries.FORGET_ACCESSES, expired)) == _ACCESSES_PER_COMMIT:
        pass
    return hot
