"""Budgets: what a turn, and a user's or a tenant's turns of a day, may cost (`PERDURE_BUDGET__*`).

Before each model call, the worker sets the turn's row in `turn_spendings` to what the turn has cost so far and what the
call may cost at most, and adds the difference to the sums of the day (`TurnBudget.reserve`). One transaction does this,
and rolls back if a limit is exceeded. It locks the sums, or without a limit of the day the turn and those that work for
it, so that two workers cannot exceed a limit together. When the turn stops, the row is set to what the turn has cost
(`TurnBudget.settle`), also by a worker from which an interrupting message has taken the session.

A turn's amount is set and never added to, so a turn that runs again after a crash counts once. A call whose worker died
stays reserved until a worker continues the turn: its provider may have counted it. An agent that another one asks has a
turn, and a row, of its own; `root_id` is the turn for which it works, whose limit counts both.

Without a limit, no statement runs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from perdure.access.tenants import UserKey, tenant_of, user_of
from perdure.clock import Clock
from perdure.database.engine import Database, Executor, Statement
from perdure.database.fencing import HELD
from perdure.errors import BudgetExhausted, ContentFiltered, DeadlineExceeded, IncompleteReply, Unavailable
from perdure.models.protocol import CallAborted, ForeignModel
from perdure.settings import OnExceeded, Settings
from perdure.text.zones import zone_in_sql
from perdure.turns import costs, queries
from perdure.turns.lease.tenure import LeaseLost, Tenure

OUTPUT_TOKENS = 16_384
"""The tokens of a reply that are reserved for a call without `max_tokens`."""

_RETRY_S = 600.0
"""The most seconds until a parked turn is tried again: its limit may have been raised."""

_BILLED = (CallAborted, DeadlineExceeded, ContentFiltered, IncompleteReply)
"""The errors of calls whose providers had begun a reply."""

_TURN, _USER_DAY, _TENANT_DAY = (f"PERDURE_BUDGET__{name}" for name in ("TURN", "USER_DAY", "TENANT_DAY"))

_KINDS = {_USER_DAY: "user", _TENANT_DAY: "tenant"}

_DAY = "(perdure_now() AT TIME ZONE %(zone)s::text)::date"

# Adds what the turn costs beyond what was counted (`due`) to the sums of its day. All turns of a user lock the sums in
# the same order.
_SUMMED = """
    summed AS (
        INSERT INTO day_spendings AS d (kind, key, day, amount)
        SELECT of.kind, of.key, due.day, due.today - due.counted
        FROM due, (VALUES ('user', %(user_id)s::text), ('tenant', %(tenant)s::text)) AS of (kind, key)
        WHERE of.kind = ANY (%(kinds)s::text[])
        ORDER BY of.kind DESC
        ON CONFLICT (kind, key, day) DO UPDATE SET amount = d.amount + excluded.amount
        RETURNING d.kind, d.amount
    )
""".strip()

# Sets what the turn costs, and moves the difference to the sums of the day. Of a turn that began on an earlier day,
# what it had cost by then (`earlier`) counts on that day only. The lock on the session keeps out a worker that has lost
# it.
_SPEND = Statement(
    "budgets.spend",
    f"""
    WITH held AS (
        SELECT {_DAY} AS day FROM sessions WHERE {HELD} FOR NO KEY UPDATE
    ), before AS (
        SELECT t.day, t.earlier, t.today, t.total FROM turn_spendings AS t, held WHERE t.turn_id = %(turn_id)s::uuid
    ), given AS (
        SELECT greatest(held.day, before.day) AS day,
               CASE WHEN before.day < held.day THEN before.total ELSE coalesce(before.earlier, 0) END AS earlier,
               CASE WHEN before.day < held.day THEN 0 ELSE coalesce(before.today, 0) END AS counted
        FROM held LEFT JOIN before ON true
    ), due AS (
        SELECT day, earlier, counted, greatest(%(spent)s::numeric - earlier, 0) + %(reserved)s::numeric AS today
        FROM given
    ), kept AS (
        INSERT INTO turn_spendings AS t (turn_id, root_id, day, earlier, today, total)
        SELECT %(turn_id)s::uuid, %(root_id)s::uuid, day, earlier, today, %(spent)s::numeric + %(reserved)s::numeric
        FROM due
        ON CONFLICT (turn_id) DO UPDATE
        SET day = excluded.day, earlier = excluded.earlier, today = excluded.today, total = excluded.total
    ), {_SUMMED}
    SELECT (SELECT amount FROM summed WHERE kind = 'user') AS user_day,
           (SELECT amount FROM summed WHERE kind = 'tenant') AS tenant_day
    FROM due
    """,  # noqa: S608 (constants)
)

# Sets what a settled turn has cost. For a worker that has lost the session to a message which interrupted, and settled,
# the turn. Changes nothing if another worker has set the amount (`totals`) since: the turn may have gone on there.
_GIVE_BACK = Statement(
    "budgets.give_back",
    f"""
    WITH due AS (
        SELECT s.day, s.today AS counted, greatest(%(spent)s::numeric - s.earlier, 0) AS today
        FROM turn_spendings AS s JOIN turns AS t ON t.turn_id = s.turn_id
        WHERE s.turn_id = %(turn_id)s::uuid AND s.total = ANY (%(totals)s::numeric[]) AND t.settled_at IS NOT NULL
        FOR NO KEY UPDATE OF s
    ), kept AS (
        UPDATE turn_spendings AS s SET today = due.today, total = %(spent)s::numeric
        FROM due WHERE s.turn_id = %(turn_id)s::uuid
    ), {_SUMMED}
    SELECT day FROM due
    """,  # noqa: S608 (constants)
)

# Serialises the reservations of a turn and of the turns that work for it, which are of one user: without a limit of the
# day, they share no sum that _SPEND locks.
_LOCK_TREE = Statement(
    "budgets.lock_tree",
    """
    SELECT pg_advisory_xact_lock(
        hashtextextended(concat_ws(' ', current_schema(), 'perdure budget of', %(root_id)s::text), 0)
    ) IS NULL AS free
    """,
)

# What a turn costs with the turns that work for it. Runs after _SPEND and _LOCK_TREE, to see what the others have
# committed.
TREE = Statement(
    "budgets.tree",
    "SELECT sum(total) AS total FROM turn_spendings WHERE root_id = %(root_id)s::uuid",
    writes=False,
)

_TODAY = Statement(
    "budgets.today",
    f"""
    SELECT key, amount FROM day_spendings WHERE day = {_DAY} AND kind = %(kind)s AND amount > 0
    ORDER BY amount DESC, key LIMIT %(most)s
    """,  # noqa: S608 (constants)
    writes=False,
)


class TurnBudget:
    """The budgets of the turn at hand. `spent` returns what the turn has cost, without other agents' turns."""

    def __init__(
        self, database: Database, clock: Clock, settings: Settings, tenure: Tenure, spent: Callable[[], Decimal]
    ) -> None:
        self._database = database
        self._clock = clock
        self._settings = settings
        self._limits = settings.budget.limits
        self._tenure = tenure
        self._row = tenure.at_hand
        self._spent = spent
        self._root_id: UUID | None = None
        self._open: tuple[str | ForeignModel, int] | None = None
        """The model and the tokens of the prompt of a call that has been reserved, and of which no reply is known."""

    @property
    def is_set(self) -> bool:
        return bool(self._limits)

    def reserve(self, model: str | ForeignModel, prompt_tokens: int, output_tokens: int | None) -> None:
        """Reserve what a call of `model` may cost. `output_tokens`: its `max_tokens`, if it has some.

        Raises:
            BudgetExhausted: the call may exceed a limit; nothing is reserved.
            LeaseLost: another worker has the session.
            Unavailable: the database cannot be reached.
        """
        if self._limits:
            cost = costs.at_most(model, prompt_tokens, output_tokens or OUTPUT_TOKENS, self._settings)
            spent = self._spent()
            try:
                self._spend(spent, cost)
            except Unavailable:  # it may have been committed
                self._tenure.reserved.append(spent + cost)
                raise
            self._tenure.reserved[:], self._open = [spent + cost], (model, prompt_tokens)

    def ended(self, error: Exception | None = None) -> None:
        """Tell that the call has a reply, or failed with `error`. Its provider bills a call that was broken off."""
        if not isinstance(error, _BILLED):
            self._open = None

    def settle(self, unstored: Decimal = Decimal(), streamed_tokens: int = 0) -> None:
        """Free what is reserved beyond what the turn has cost. `unstored` is the cost of replies that are not stored.

        A call that was broken off counts with its prompt and the `streamed_tokens` of its reply. What an earlier worker
        has reserved for a call, in which it died, stays reserved until this one makes a call, too.

        Raises:
            LeaseLost: another worker has the session.
            Unavailable: the database cannot be reached; the call may be repeated.
        """
        if not self._tenure.reserved:
            return
        if self._open is not None:
            unstored += costs.at_most(*self._open, streamed_tokens, self._settings)
        spent = self._spent() + unstored
        try:
            self._spend(spent, Decimal())
        except LeaseLost:  # the turn's row is set only if the turn was settled without a further call
            self._database.run(_GIVE_BACK, {**self._given(spent), "totals": self._tenure.reserved})
            raise

    def _spend(self, spent: Decimal, reserved: Decimal) -> None:
        given = {**self._given(spent), **self._tenure.fenced, "reserved": reserved}
        with self._database.transaction("budgets.spend") as transaction:
            rows = transaction.run(_SPEND, given)
            if not rows:
                raise LeaseLost
            if not reserved:
                return
            sums = {_USER_DAY: rows[0].user_day, _TENANT_DAY: rows[0].tenant_day}
            if _TURN in self._limits:
                if not given["kinds"]:
                    transaction.run(_LOCK_TREE, given)
                sums[_TURN] = transaction.run(TREE, given)[0].total
            for setting, limit in self._limits.items():
                if sums[setting] > limit:
                    raise self._exhausted(setting, limit, reserved)  # rolls back

    def _given(self, spent: Decimal) -> dict[str, Any]:
        return {
            "turn_id": self._row.turn_id,
            "root_id": self._root(),
            "user_id": self._row.user_id,
            "tenant": tenant_of(self._row.user_id) or "",
            "kinds": [kind for setting, kind in _KINDS.items() if setting in self._limits],
            "zone": zone_in_sql(self._settings.timezone),
            "spent": spent,
        }

    def _root(self) -> UUID:
        """The turn for which this one works, or itself."""
        if self._root_id is None:
            row, above = self._row, []
            if row.answers_call:
                above = list(self._database.run(queries.ABOVE, {"turn_id": row.turn_id}))
            self._root_id = above[-1].turn_id if above else row.turn_id
        return self._root_id

    def _exhausted(self, setting: str, limit: Decimal, reserved: Decimal) -> BudgetExhausted:
        """The error. Waiting helps if the limit is that of a day, and the call fits an unspent one."""
        wait_s = None
        if setting != _TURN and reserved <= limit and self._settings.budget.on_exceeded == OnExceeded.PARK:
            wait_s = min(_until_midnight_s(self._clock.now(), ZoneInfo(self._settings.timezone)), _RETRY_S)
        message = f"{_WHOSE[setting]} may cost at most {limit.normalize():f} US dollars ({setting}), so I stopped."
        return BudgetExhausted(message, setting=setting, wait_s=wait_s)


_WHOSE = {
    _TURN: "One answer",
    _USER_DAY: "The answers for one user on one day",
    _TENANT_DAY: "All answers of one day",
}


def _until_midnight_s(now: datetime, zone: ZoneInfo) -> float:
    tomorrow = now.astimezone(zone).date() + timedelta(days=1)
    return (datetime.combine(tomorrow, time(), zone) - now).total_seconds() + 1


def spent_today(executor: Executor, settings: Settings, most: int) -> list[dict[str, Any]]:
    """What users and tenants have spent today of the limits that are set, with what is reserved for calls.

    Tenants come first, then users; of either, those `most` that have spent most. Reads all of today's sums.
    """
    found: list[dict[str, Any]] = []
    for kind, limit in (("tenant", settings.budget.tenant_day), ("user", settings.budget.user_day)):
        if limit is None:
            continue
        for row in executor.run(_TODAY, {"zone": zone_in_sql(settings.timezone), "kind": kind, "most": most}):
            is_user, key = kind == "user", UserKey(row.key)
            found.append(
                {
                    "tenant": tenant_of(key) if is_user else row.key or None,
                    "user": user_of(key) if is_user else None,
                    "spent_usd": f"{row.amount.normalize():f}",
                    "limit_usd": f"{limit.normalize():f}",
                }
            )
    return found
