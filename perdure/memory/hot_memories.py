"""Layer 5: which memories a user's conversations come back to.

Each recall notes what it used; of the last days' notes the most used memories are reckoned anew
every few hours, so that a prompt can have them without searching. Refreshing twice changes nothing.
"""

from __future__ import annotations

from perdure.database.engine import Database
from perdure.memory import queries

PATTERN_DAYS = 7
"""Days that a recall counts."""

MOST_HOT = 100
"""Hot memories of one user."""

_USERS_A_COMMIT = 100
_NOTES_A_COMMIT = 10_000


def refresh_hot(database: Database) -> int:
    """Reckon everybody's hot memories anew, and drop notes that count no more; how many are hot now.

    Raises:
        Unavailable: the database cannot be reached; what was done stays done.
    """
    hot, after = 0, ""
    while True:
        with database.transaction("meta.refresh_hot") as transaction:
            asked = {"after": after, "days": PATTERN_DAYS, "most_users": _USERS_A_COMMIT}
            users = [row.user_id for row in transaction.run(queries.HOT_USERS, asked)]
            transaction.run(queries.FORGET_HOT, {"user_ids": users})
            written = {"user_ids": users, "days": PATTERN_DAYS, "most": MOST_HOT}
            hot += len(transaction.run(queries.WRITE_HOT, written))
        if len(users) < _USERS_A_COMMIT:
            break
        after = users[-1]
    while (
        len(database.run(queries.FORGET_ACCESSES, {"days": PATTERN_DAYS, "most": _NOTES_A_COMMIT})) == _NOTES_A_COMMIT
    ):
        pass
    return hot
