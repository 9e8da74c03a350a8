"""Finds the cases whose vectors are nearest to the vector of a question.

A search compares only vectors that have the same embedder and the same number of dimensions. It compares a small number
of cases one by one, which is exact. For a larger number of cases, it scans a vector index, which is approximate.

`build_indexes` creates up to two vector indexes for each number of dimensions. One index covers the cases without an
author, the other index covers the cases with an author. `build_indexes` creates an index only if the index would
contain at least `INDEX_FROM` cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Row

from perdure.access.tenants import UserKey, author_of, everybodys, tenant_of
from perdure.casebank import COMMON, queries, search_queries, vectors
from perdure.casebank.archive import warn_of_archived
from perdure.casebank.search_queries import SearchScope
from perdure.clock import iso
from perdure.database import indexes
from perdure.database.engine import Database, Statement

INDEX_FROM = 10_000
"""A vector index is built for at least this many active cases. Comparing 10,000 cases one by one takes about 5 ms."""

FEW_OF_BANK = 2_000
"""A search compares up to this many cases of a bank one by one. For a larger bank, it scans the vector index.

The index covers all banks, and a scan of the index reads at most 20,000 rows. If the bank is small, few or
none of these rows belong to the bank.
"""

MOST_INDEXED_DIMENSIONS = 2_000

_BUILDING = "perdure casebank indexes"


@dataclass(frozen=True, slots=True)
class FoundCase:
    """A found case. `similarity` is the cosine similarity of the case's vector and the search vector, from -1 to 1."""

    case_id: str
    query: str
    response_text: str
    category_path: str | None
    usage_count: int
    success_rate: float | None
    status: str
    similarity: float
    author: UserKey | None = None
    """The user key of the author; `None`: the case belongs to all users without a tenant."""
    bank: str = COMMON
    shared_at: str | None = None
    """When an administrator shared the case with all users of the author's tenant (ISO 8601)."""

    def to_dict(self) -> dict[str, Any]:
        """The case as the HTTP routes return it, with `tenant` and `user_id` in place of `author`."""
        made = asdict(self)
        key = made.pop("author")
        return {**made, "tenant": tenant_of(key), "user_id": author_of(key)}


@dataclass(frozen=True, slots=True)
class Within:
    """The users whose cases a search covers.

    If `everybody` is true, the search covers all users. Otherwise, it covers the users of `tenant`. If `tenant` is
    `None`, it covers the users without a tenant.
    """

    tenant: str | None
    everybody: bool = False

    @property
    def scope(self) -> SearchScope:
        if self.everybody:
            return SearchScope.EVERYBODY
        return SearchScope.NO_TENANT if self.tenant is None else SearchScope.TENANT


EVERYBODY = Within(None, everybody=True)


def search(
    database: Database,
    vector: Sequence[float],
    embedder: str,
    k: int,
    within: Within = EVERYBODY,
    *,
    banks: Sequence[str] | None = None,
    include_archived: bool = False,
    least: float | None = None,
) -> list[FoundCase]:
    """The `k` cases nearest to `vector`, nearest first, with a similarity of at least `least`.

    Searches the active cases that `within` selects, in `banks` or in all banks. With `include_archived`, also searches
    archived cases, and logs a warning for each archived case found.

    Raises:
        InvalidRequest: the vector is invalid.
    """
    statement = _nearest(len(vector), within.scope, banks is not None, include_archived)
    parameters = {
        "vector": vectors.literal(vector),
        "embedder": embedder,
        "k": k,
        "least": least,
        "tenant": within.tenant,
        "banks": list(banks or ()),
    }
    found = [_found(row) for row in database.run(statement, parameters)]
    for each in found:
        if each.status == "archived":
            warn_of_archived(each.case_id)
    return found


def search_for_user(
    database: Database,
    user: UserKey,
    vector: Sequence[float],
    embedder: str,
    k: int,
    *,
    banks: Sequence[str],
    least: float | None = None,
) -> list[FoundCase]:
    """The `k` active cases nearest to `vector` that a user may see, nearest first.

    `user` is a user key. A user may see their own cases, the cases that belong to all users of their tenant, and the
    cases that an administrator shared in that tenant. Searches only the cases in `banks`. Omits cases with a similarity
    below `least`.

    Raises:
        InvalidRequest: the vector is invalid.
    """
    tenant = tenant_of(user)
    statement = _nearest_for_user(len(vector), tenant is not None)
    parameters = {
        "vector": vectors.literal(vector),
        "embedder": embedder,
        "k": k,
        "least": least,
        "authors": authors(user),
        "tenant": tenant,
        "banks": list(banks),
    }
    return [_found(row) for row in database.run(statement, parameters)]


def authors(user: UserKey) -> list[UserKey]:
    """The user keys whose cases `user` may see: `user` and, if the user has a tenant, `everybodys(tenant)`."""
    tenant = tenant_of(user)
    return [user] if tenant is None else [user, everybodys(tenant)]


def build_indexes(database: Database, index_from: int = INDEX_FROM) -> list[str]:
    """Build each missing vector index that would contain at least `index_from` cases.

    Returns the names of all indexes with at least `index_from` cases, including indexes that existed before. Does not
    block readers or writers. Rebuilds an index whose build was interrupted. If another process is building indexes,
    returns `[]` immediately.
    """
    wanted = [
        (row.size, part)
        for row in database.run(queries.SIZES, {})
        for part in ("shared", "learnt")
        if getattr(row, part) >= index_from and row.size <= MOST_INDEXED_DIMENSIONS
    ]
    if not wanted:
        return []
    # Only one process builds at a time. PostgreSQL marks an index as invalid both during its build and after an
    # interrupted build, so a second process would drop an index that the first process is building.
    with database.lock(_BUILDING) as alone:
        if not alone:
            return []
        for size, part in wanted:
            indexes.build_index(database, queries.index_name(size, part), queries.index_definition(size, part))
    return [queries.index_name(size, part) for size, part in wanted]


@lru_cache
def _nearest(size: int, scope: SearchScope, in_banks: bool, include_archived: bool) -> Statement:  # noqa: FBT001 (a cache's key)
    return search_queries.nearest(
        size, INDEX_FROM, FEW_OF_BANK, scope, in_banks=in_banks, include_archived=include_archived
    )


@lru_cache
def _nearest_for_user(size: int, of_tenant: bool) -> Statement:  # noqa: FBT001 (a cache's key)
    return search_queries.nearest_for_user(size, INDEX_FROM, FEW_OF_BANK, of_tenant=of_tenant)


def _found(row: Row[Any]) -> FoundCase:
    return FoundCase(
        row.case_id,
        row.query,
        row.response_text,
        row.category_path,
        row.usage_count,
        row.success_rate,
        row.status,
        row.similarity,
        None if row.user_id is None else UserKey(row.user_id),
        row.bank,
        iso(row.shared_at),
    )
