"""Adding, reading and listing cases.

A case is imported, or learnt from a turn that a user rated positively. `check` validates both kinds before they are
stored. An existing case is never overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, author_of, tenant_of
from perdure.casebank import COMMON, queries, vectors
from perdure.casebank.archive import restore, warn_of_archived
from perdure.clock import Clock, iso
from perdure.database.engine import Executor
from perdure.errors import InvalidRequest, NotFound
from perdure.ids import new_id
from perdure.text.untrusted import IDENTIFIER, is_identifier, storable

log = logging.getLogger(__name__)

LONGEST_ID = 255
LONGEST_EMBEDDER = 255
LONGEST_CATEGORY = 255
LONGEST_USER = 200
MOST_USES = 2**53
"""The maximum use count. JSON parsers that use float64 represent integers exactly up to 2**53."""

_WITHDRAWN = "its praise was withdrawn"
_WHOLE = 100
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
_SKEW = timedelta(minutes=1)
"""A supplied time may lie at most this far in the future, because clocks differ."""


@dataclass(frozen=True, slots=True)
class NewCase:
    """A case to be added. Set both `query_vector` and the name of its `embedder`, or neither.

    `user_id` is the user key of the author, or one of three other values:

    - `None`: the case belongs to all users without a tenant.
    - A key from `tenants.everybodys`: the case belongs to all users of that tenant.
    - An empty string: the author is unknown, and no user sees the case.

    `shared_at` is the time when an administrator shared the case with all users of the author's tenant.
    """

    case_id: str
    query: str
    response_text: str
    category_path: str | None = None
    query_vector: Sequence[float] | None = None
    embedder: str | None = None
    usage_count: int = 0
    success_rate: float | None = None
    last_accessed_at: datetime | None = None
    status: str = "active"
    created_at: datetime | None = None
    user_id: UserKey | None = None
    turn_id: UUID | None = None
    bank: str = COMMON
    shared_at: datetime | None = None


def add(
    executor: Executor,
    case: NewCase,
    *,
    now: datetime,
    dimensions: int | None = None,
    own_embedder: str | None = None,
) -> bool:
    """Add a case. Returns False if its id is taken, or if a case learnt from the same turn exists.

    `dimensions` is the number of dimensions of the embedder's vectors, if known. `own_embedder` is the name of the
    installation's embedder: when this changes, its vectors are made again, and those of other embedders are kept.

    Raises:
        InvalidRequest: a field is invalid; the message names it.
    """
    vector = check(case, now=now, dimensions=dimensions)
    added = executor.run(
        queries.ADD,
        {
            "case_id": case.case_id,
            **_texts(case),
            "category_path": None if case.category_path is None else storable(case.category_path),
            "query_vector": vector,
            "embedder": None if vector is None else case.embedder,
            "own_embedder": case.embedder if case.turn_id is not None else own_embedder or "",
            "usage_count": case.usage_count,
            "success_rate": case.success_rate,
            "last_accessed_at": case.last_accessed_at,
            "status": case.status,
            "created_at": case.created_at,
            "user_id": case.user_id,
            "turn_id": case.turn_id,
            "bank": case.bank,
            "shared_at": case.shared_at,
            "reason": "imported" if case.turn_id is None else "learnt from a turn",
        },
    )
    return bool(added)


def learn(
    executor: Executor,
    clock: Clock,
    *,
    turn_id: UUID,
    user_id: UserKey,
    query: str,
    response_text: str,
    bank: str = COMMON,
    query_vector: Sequence[float] | None = None,
    embedder: str | None = None,
) -> str | None:
    """Store a turn's question and answer as a case, because a user rated the turn positively.

    If an active case of the user and the bank has the same question and answer, the turn counts as a use of that case.
    If the turn's case was withdrawn, it is restored.

    Returns the id of the new or restored case; `None` if there is none. Without `query_vector`, no search finds the
    case until the module `embedding` has computed its vector.

    Raises:
        InvalidRequest: the question or the answer is empty, or the vector is invalid.
    """
    case = NewCase(
        case_id=str(new_id(clock)),
        query=query,
        response_text=response_text,
        query_vector=query_vector,
        embedder=embedder,
        user_id=user_id,
        turn_id=turn_id,
        bank=bank,
    )
    check(case, now=clock.now())
    if executor.run(queries.USE_EQUAL, {**_texts(case), "user_id": user_id, "bank": bank, "turn_id": turn_id}):
        return None
    if add(executor, case, now=clock.now()):
        return case.case_id
    for row in executor.run(queries.WITHDRAWN, {"turn_id": turn_id, "reason": _WITHDRAWN}):
        restore(executor, row.case_id)
        return str(row.case_id)
    return None


def withdraw(executor: Executor, turn_id: UUID) -> None:
    """Archive the case that was learnt from a turn, because the user has rated the turn negatively since.

    A case that is shared with other users, or that another praised turn has used, stays active.
    """
    for row in executor.run(queries.WITHDRAW, {"turn_id": turn_id, "reason": _WITHDRAWN}):
        log.info("case %s was archived: %s", row.case_id, _WITHDRAWN)


def check(case: NewCase, *, now: datetime, dimensions: int | None = None) -> str | None:
    """Validate a case; returns its vector, if it has one, as an SQL parameter.

    Raises:
        InvalidRequest: a field is invalid; the message names it.
    """
    _check_name("case_id", case.case_id, 1, LONGEST_ID)
    _check_readers(case)
    for name, text in (("query", case.query), ("response_text", case.response_text)):
        if not text.strip():
            raise InvalidRequest(f"{name} is empty.")
    if len(case.category_path or "") > LONGEST_CATEGORY:
        raise InvalidRequest(f"category_path has more than {LONGEST_CATEGORY} characters.")
    if not 0 <= case.usage_count <= MOST_USES:
        raise InvalidRequest(f"usage_count is {case.usage_count}; accepted: 0 to {MOST_USES}.")
    if case.success_rate is not None and not 0 <= case.success_rate <= _WHOLE:  # rejects NaN, too
        raise InvalidRequest(f"success_rate is {case.success_rate:g}; accepted: 0 to 100 percent, or null.")
    for name, at in (
        ("last_accessed_at", case.last_accessed_at),
        ("created_at", case.created_at),
        ("shared_at", case.shared_at),
    ):
        _check_time(name, at, now)
    return _check_vector(case, dimensions)


def read(executor: Executor, case_id: str) -> dict[str, Any]:
    """One case with its history. Reading an archived case logs a warning.

    Raises:
        NotFound: there is no such case.
    """
    rows = executor.run(queries.READ, {"case_id": case_id})
    if not rows:
        raise NotFound("There is no such case.")
    if rows[0].status == "archived":
        warn_of_archived(case_id)
    history = executor.run(queries.HISTORY, {"case_id": case_id})
    return {**case_as_json(rows[0]), "history": [_event(row) for row in history]}


def list_cases(
    executor: Executor,
    *,
    after: str = "",
    most: int = 100,
    status: str | None = None,
    flagged: bool = False,
    tenant: str | None = None,
    bank: str | None = None,
) -> list[dict[str, Any]]:
    """At most `most` cases with ids above `after`, in the order of ids. The other parameters are filters."""
    parameters = {
        "after": after, "most": most, "status": status, "flagged": flagged, "tenant": tenant, "bank": bank,
    }  # fmt: skip
    return [case_as_json(row) for row in executor.run(queries.LIST, parameters)]


def case_as_json(row: Row[Any]) -> dict[str, Any]:
    return {
        "case_id": row.case_id,
        "query": row.query,
        "response_text": row.response_text,
        "category_path": row.category_path,
        "embedder": row.embedder,
        "tenant": tenant_of(row.user_id),
        "user_id": author_of(row.user_id),
        "bank": row.bank,
        "shared_at": iso(row.shared_at),
        "usage_count": row.usage_count,
        "success_rate": row.success_rate,
        "last_accessed_at": iso(row.last_accessed_at),
        "status": row.status,
        "created_at": iso(row.created_at),
        "review": row.review,
    }


def _texts(case: NewCase) -> dict[str, str]:
    return {"query": storable(case.query), "response_text": storable(case.response_text)}


def _event(row: Row[Any]) -> dict[str, Any]:
    return {
        "event": row.event,
        "reason": row.reason,
        "details": row.details,
        "run_id": None if row.run_id is None else str(row.run_id),
        "at": iso(row.at),
    }


def _check_readers(case: NewCase) -> None:
    author = author_of(case.user_id)
    _check_name("user_id", author or "", 0, LONGEST_USER)
    if not is_identifier(case.bank):
        raise InvalidRequest(f"bank must be {IDENTIFIER}.")
    if case.shared_at is not None and author is None:
        raise InvalidRequest("shared_at needs a user_id: a case without an author is available to all users.")


def _check_name(field: str, name: str, shortest: int, longest: int) -> None:
    if not shortest <= len(name) <= longest or storable(name) != name:
        raise InvalidRequest(f"{field} must have {shortest} to {longest} characters, none of them NUL.")


def _check_time(name: str, at: datetime | None, now: datetime) -> None:
    if at is None:
        return
    if at.tzinfo is None:
        raise InvalidRequest(f"{name} has no time zone.")
    if at < _EARLIEST:  # PostgreSQL can store earlier times, but the driver cannot read all of them
        raise InvalidRequest(f"{name} is before 1970: {at.isoformat()}.")
    if at > now + _SKEW:
        raise InvalidRequest(f"{name} is in the future: {at.isoformat()}.")


def _check_vector(case: NewCase, dimensions: int | None) -> str | None:
    if case.query_vector is None:
        return None
    if not case.embedder or len(case.embedder) > LONGEST_EMBEDDER:
        raise InvalidRequest(
            "A query_vector needs the name of its embedder: vectors of different embedders cannot be compared."
        )
    return vectors.literal(case.query_vector, dimensions)
