"""The outbox: delivers replies, requests for approval and questions to their receivers, at least once.

Before an attempt, the worker moves the delivery's due time `ATTEMPT_S` seconds ahead, so that no other worker attempts
the delivery concurrently. If the worker dies, the next attempt begins at the new due time. The receiver deduplicates by
the delivery's id.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.database.bodies import body
from perdure.database.engine import Database, Executor, as_json
from perdure.errors import NotFound
from perdure.turns import outbox_queries as queries
from perdure.turns.reading import question_of, read_turn

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 12
ATTEMPT_S = 60
"""Seconds after which the delivery is attempted again if an attempt has no result."""

FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 3_600.0


REFUSALS_FORGIVEN_S = 86_400.0
"""The greatest age of a delivery, in seconds, at which an attempt that raises `NotAsked` does not count."""

_MOST_POSTPONED = 20_000
"""The most deliveries to a service that one statement postpones."""

_PAGE = 500
"""The most failed deliveries that one commit restarts."""

_FOLLOWING_S = 5.0
"""Seconds after which the sweeper publishes a delivery again that followed another one, if no worker attempts it."""


class DeliveryFailed(Exception):
    """The receiver has not confirmed the delivery. `status_code` is the HTTP status of the response, if any."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class Undeliverable(DeliveryFailed):
    """The receiver or this installation refuses the delivery permanently, so the delivery is not attempted again."""


class NotAsked(DeliveryFailed):
    """The delivery must wait: the receiver's circuit breaker is open, or the receiver asks for a pause.

    `retry_s` is the number of seconds to wait. The attempt does not count, unless the delivery is older than
    `REFUSALS_FORGIVEN_S`. If `alone` is false, the other deliveries to the same service wait, too.
    """

    def __init__(self, message: str, retry_s: float, *, alone: bool = False) -> None:
        super().__init__(message)
        self.retry_s = retry_s
        self.alone = alone


class Overtaken(Exception):
    """Another attempt sends the delivery, or the delivery is erased. This attempt ends without an outcome."""


class Carrier(Protocol):
    """Sends to one kind of receiver."""

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Send `body` (JSON) to `target`; returns once the receiver confirms the delivery.

        `message_id` is the same for all attempts of a delivery.

        Raises:
            DeliveryFailed: the receiver has not confirmed the delivery.
            Overtaken: another attempt sends the delivery.
        """
        ...


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver confirmed the delivery.

    `next_id` is the conversation's next delivery to the same receiver, if that delivery is due. `following_id` is
    another delivery that is due to the same service; the caller must publish its wake-up. `kind` is the kind of
    the target, and `seconds` the time since the turn was settled.
    """

    next_id: UUID | None = None
    following_id: UUID | None = field(default=None, compare=False)
    kind: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class DeliveryPostponed:
    """The attempt failed. The next attempt begins in `retry_s` seconds.

    After the last attempt, `retry_s` is `None`, and `next_id` has the same meaning as in `Delivered`.
    """

    retry_s: float | None
    next_id: UUID | None = None
    kind: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DeliveryNotDue:
    """No attempt was made.

    The delivery is finished, is being attempted, or waits for its due time or for an earlier delivery.
    """


DeliveryOutcome = Delivered | DeliveryPostponed | DeliveryNotDue


def deliver(database: Database, carriers: Mapping[str, Carrier], delivery_id: UUID) -> DeliveryOutcome:
    """Attempt one delivery, if it is due.

    `carriers` has a carrier for each kind of target: `url`, `task` and `channel`.
    """
    given = {"delivery_id": delivery_id, "attempt_s": ATTEMPT_S, "furthest_s": LONGEST_RETRY_S}
    rows = database.run(queries.TAKE_DELIVERY, given)
    if not rows:
        return DeliveryNotDue()
    if rows[0].attempts > MAX_ATTEMPTS:  # the last permitted attempt ended in a crash or an internal error
        return _postpone(database, delivery_id, rows[0].attempts, "every attempt was interrupted")
    kind = next(each for each in ("url", "channel", "task") if each in rows[0].target)
    try:
        return replace(_attempt(database, carriers[kind], delivery_id, rows[0]), kind=kind)
    except Overtaken:
        return DeliveryNotDue()


def note_sent(database: Database, delivery_id: UUID, before: Sequence[str], after: Sequence[str]) -> None:
    """Record which messages of a delivery its receiver has accepted: now `after`, and `before` until now.

    The row has them as `target["sent"]`. No other worker attempts the delivery for another `ATTEMPT_S` seconds.

    Raises:
        Overtaken: another attempt has sent a message since, or the delivery is over or erased.
    """
    sent = {"already_sent": as_json(list(before)), "now_sent": as_json(list(after))}
    if not database.run(queries.NOTE_SENT, {"delivery_id": delivery_id, "attempt_s": ATTEMPT_S, **sent}):
        log.info("delivery %s: another attempt sends it", delivery_id)
        raise Overtaken


def _attempt(database: Database, carrier: Carrier, delivery_id: UUID, row: Row[Any]) -> Delivered | DeliveryPostponed:
    """Attempt the delivery in `row`, which was taken for this attempt."""
    target: dict[str, Any] = row.target
    body = {**read_turn(database, row.turn_id), "delivery_id": str(delivery_id)}
    try:
        if _is_current(target, body):
            carrier.carry(target, json.dumps(body).encode(), str(delivery_id))
    except NotAsked as error:
        return _postpone_unasked(database, delivery_id, row, error)
    except Undeliverable as error:
        return _postpone(database, delivery_id, MAX_ATTEMPTS, str(error))
    except DeliveryFailed as error:
        return _postpone(database, delivery_id, row.attempts, str(error))
    rows = database.run(queries.DELIVERED, {"delivery_id": delivery_id, "backoff_s": _FOLLOWING_S})
    return Delivered(_next(rows), rows[0].following_id, seconds=rows[0].age_s) if rows else Delivered()


def _is_current(target: Mapping[str, Any], turn: Mapping[str, Any]) -> bool:
    """Whether a request for approval, or a question, is still open at the attempt. A reply always is.

    A request of an agent that answers a call of the turn has a delivery of its own.
    """
    if target.get("question"):
        return question_of(turn) is not None and "turn_id" not in turn["waiting_for"]
    return not target.get("approval") or any("turn_id" not in each for each in turn["pending_approvals"])


def retry_after(attempts: int) -> float | None:
    """Seconds until the next attempt, after `attempts` failed attempts; `None` if no attempt is left."""
    if attempts >= MAX_ATTEMPTS:
        return None
    return min(FIRST_RETRY_S * 2.0 ** (attempts - 1), LONGEST_RETRY_S)


@dataclass(frozen=True, slots=True)
class Sharers:
    """Those that have a share of a process's deliveries: the user, and a key for the service.

    The service is the URL's host, the channel or the task's queue.
    """

    service: str
    user_id: UserKey


def sharers_of(executor: Executor, delivery_id: UUID) -> Sharers | None:
    """The service and the user of a delivery. `None`: it is erased."""
    rows = executor.run(queries.SHARERS, {"delivery_id": delivery_id})
    return Sharers(rows[0].service, UserKey(rows[0].user_id)) if rows else None


def leave_to_sweeper(database: Database, delivery_id: UUID) -> None:
    """Leave a delivery to the sweeper, because its service or its user has its share of this process's attempts."""
    database.run(queries.WITHOUT_SHARE, {"delivery_id": delivery_id})


def untaken(database: Database, delivery_ids: Sequence[UUID]) -> list[UUID]:
    """The deliveries among `delivery_ids` that no worker has attempted since `due` returned them."""
    return [row.delivery_id for row in database.run(queries.UNTAKEN_DELIVERIES, {"delivery_ids": list(delivery_ids)})]


def due(database: Database, most: int, backoff_s: float) -> list[UUID]:
    """Up to `most` due deliveries. The caller must publish their wake-ups.

    Each service has an equal share, in which each user first has one delivery. Otherwise the one with the longest wait
    comes first. If no worker attempts a delivery, it is returned again after `backoff_s` seconds. The pause then
    doubles each time, up to 64 times `backoff_s`.
    """
    furthest_s = max(LONGEST_RETRY_S, backoff_s * 2**7)
    given = {"most": most, "backoff_s": backoff_s, "furthest_s": furthest_s, "start": secrets.token_hex(16)}
    return [row.delivery_id for row in database.run(queries.DELIVERIES_DUE, given)]


def list_deliveries(executor: Executor, *, status: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
    """The newest deliveries, optionally of one status.

    Of `pending` ones, those that are due next come first. A `failed` delivery is a dead letter: it is not retried. Of
    these, those that were abandoned last come first.
    """
    of_status = {"failed": queries.DELIVERIES_FAILED, "pending": queries.DELIVERIES_PENDING}
    rows = executor.run(of_status.get(status or "", queries.DELIVERIES), {"status": status, "limit": limit})
    return [body(row) for row in rows]


def resend(executor: Executor, delivery_id: UUID) -> None:
    """Restart a delivery of any status, with the full number of attempts and the same id.

    Raises:
        NotFound: there is no such delivery.
    """
    if not executor.run(queries.RESEND, {"delivery_id": delivery_id}):
        raise NotFound("There is no such delivery.")


def resend_failed(database: Database, to: str | None = None, *, dry_run: bool = False) -> int:
    """Restart the failed deliveries whose receiver matches the glob `to`, a page per commit; returns their number.

    A receiver is a URL, a task's name, or `CHANNEL:CHAT`, such as `telegram:4711`. The sweeper wakes the deliveries, in
    shares by service and user. `dry_run`: only count.
    """
    count, page = 0, {"created_at": "-infinity", "after": UUID(int=0), "most": _PAGE}
    while rows := database.run(queries.FAILED, page):
        page |= {"created_at": rows[-1].created_at, "after": rows[-1].delivery_id}
        chosen = [row.delivery_id for row in rows if to is None or fnmatchcase(_receiver(row.target), to)]
        if dry_run:
            count += len(chosen)
        elif chosen:
            count += database.run(queries.RESEND_FAILED, {"delivery_ids": chosen})[0].resent
    return count


def _receiver(target: dict[str, Any]) -> str:
    chat = target.get("place", {}).get("chat", "")
    return str(target.get("url") or target.get("task") or f"{target.get('channel')}:{chat}")


def requeue(database: Database, delivery_ids: Sequence[UUID]) -> None:
    """Undo `due` for deliveries whose wake-ups the broker refused: the next call of `due` returns them again."""
    database.run(queries.UNWAKE_DELIVERIES, {"delivery_ids": list(delivery_ids)})


def _postpone_unasked(database: Database, delivery_id: UUID, row: Row[Any], error: NotAsked) -> DeliveryPostponed:
    """Postpone a delivery that must wait. The attempt counts only if the delivery is older than `REFUSALS_FORGIVEN_S`.

    The pause grows with the delivery's age, to limit the number of attempts. Unless the delivery waits `alone`, one
    statement postpones all due deliveries to the same service, and one line of the log says so.
    """
    if row.age_s > REFUSALS_FORGIVEN_S:
        return _postpone(database, delivery_id, row.attempts, str(error))
    retry_s = max(error.retry_s, FIRST_RETRY_S)
    reason = str(error)[:1_000]
    if error.alone:
        retry_s = min(max(retry_s, row.age_s / 2), LONGEST_RETRY_S)
        log.info("delivery %s waits: %s; next attempt in %g s", delivery_id, error, retry_s)
        database.run(
            queries.POSTPONE_DELIVERY,
            {"delivery_id": delivery_id, "error": reason, "retry_s": retry_s, "forgiven": True},
        )
        return DeliveryPostponed(retry_s)
    found = database.run(
        queries.POSTPONE_SERVICE,
        {
            "delivery_id": delivery_id,
            "error": reason,
            "retry_s": retry_s,
            "longest_s": LONGEST_RETRY_S,
            "forgiven_s": REFUSALS_FORGIVEN_S,
            "most": _MOST_POSTPONED,
        },
    )[0]
    level = logging.DEBUG if found.known else logging.INFO
    log.log(level, "%d deliveries wait: %s; next attempt in %g s or later", found.postponed, error, retry_s)
    return DeliveryPostponed(retry_s if found.retry_s is None else found.retry_s)


def _postpone(database: Database, delivery_id: UUID, attempts: int, reason: str) -> DeliveryPostponed:
    retry_s = retry_after(attempts)
    log.warning(
        "delivery %s failed at attempt %d: %s; %s",
        delivery_id,
        attempts,
        reason,
        "abandoned" if retry_s is None else f"next attempt in {retry_s:g} s",
    )
    rows = database.run(
        queries.POSTPONE_DELIVERY,
        {"delivery_id": delivery_id, "error": reason[:1_000], "retry_s": retry_s, "forgiven": False},
    )
    return DeliveryPostponed(retry_s, _next(rows))


def _next(rows: Sequence[Row[Any]]) -> UUID | None:
    return rows[0].next_id if rows else None
