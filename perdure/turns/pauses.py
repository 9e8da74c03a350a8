"""Pauses: messages of a tenant, a user or an agent are accepted, and their turns wait until the pause ends.

`perdure pause` writes a row. The statements that claim or begin a turn read it (`perdure.database.pausing`). A paused
session waits like one whose user has too many running turns: a claim queues it, and the sweeper admits it when no pause
applies any more. A turn that is running continues. A turn that is cancelled, out of attempts, or only to be saved is
settled in spite of a pause.
"""

from __future__ import annotations

from typing import Any

from perdure.access.tenants import UserKey, tenant_of, user_of
from perdure.database.engine import Executor, Statement

_PLACE = """tenant IS NOT DISTINCT FROM %(tenant)s::text AND user_id IS NOT DISTINCT FROM %(user_id)s::text
            AND agent IS NOT DISTINCT FROM %(agent)s::text"""

_BEGIN = Statement(
    "pauses.begin",
    """
    INSERT INTO pauses (pause_id, tenant, user_id, agent, paused_at)
    VALUES (gen_random_uuid(), %(tenant)s::text, %(user_id)s::text, %(agent)s::text, perdure_now())
    ON CONFLICT DO NOTHING
    """,
)

_END = Statement("pauses.end", f"DELETE FROM pauses WHERE {_PLACE} RETURNING 1")  # noqa: S608 (constants)

_LIST = Statement(
    "pauses.list",
    "SELECT tenant, user_id, agent, paused_at FROM pauses ORDER BY paused_at, tenant, user_id, agent",
    writes=False,
)

UNSETTLED_OF = """
    t.settled_at IS NULL
    AND (%(user_id)s::text IS NULL OR t.user_id = %(user_id)s)
    AND (%(tenant)s::text IS NULL
         OR strpos(t.user_id, chr(31)) > 0 AND split_part(t.user_id, chr(31), 1) = %(tenant)s)
    AND (%(agent)s::text IS NULL OR t.agent = %(agent)s)
""".strip()
"""The condition on a turn `t`: it is unsettled, and all that is given of a tenant, a user and an agent applies."""

# The unsettled turns to which the pause would apply, or applies.
_COUNT = Statement("pauses.count", f"SELECT count(*) AS turns FROM turns AS t WHERE {UNSETTLED_OF}", writes=False)  # noqa: S608 (constants)


def pause(executor: Executor, *, tenant: str | None, user: UserKey | None, agent: str | None) -> None:
    """Let turns to which all the given apply begin no more. Idempotent. A user's key names the tenant already."""
    executor.run(_BEGIN, given(tenant, user, agent))


def resume(executor: Executor, *, tenant: str | None, user: UserKey | None, agent: str | None) -> bool:
    """End a pause with exactly these parts; returns whether there was one. The sweeper then admits what waits."""
    return bool(executor.run(_END, given(tenant, user, agent)))


def count(executor: Executor, *, tenant: str | None, user: UserKey | None, agent: str | None) -> int:
    """The number of unsettled turns to which all the given apply."""
    return int(executor.run(_COUNT, given(tenant, user, agent))[0].turns)


def list_pauses(executor: Executor) -> list[dict[str, Any]]:
    """The pauses, the oldest first."""
    return [
        {
            "tenant": row.tenant if row.user_id is None else tenant_of(UserKey(row.user_id)),
            "user_id": None if row.user_id is None else user_of(UserKey(row.user_id)),
            "agent": row.agent,
            "paused_at": row.paused_at.isoformat(),
        }
        for row in executor.run(_LIST, {})
    ]


def given(tenant: str | None, user: UserKey | None, agent: str | None) -> dict[str, Any]:
    """The parameters of the statements. A user's key names the tenant already."""
    return {"tenant": tenant if user is None else None, "user_id": user, "agent": agent}
