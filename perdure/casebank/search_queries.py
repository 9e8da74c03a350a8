"""The statements that find the cases nearest to a vector.

A statement is a union of arms. Each arm is a CTE that finds the nearest cases that match one condition. If at most
`few` cases match, a btree index finds them, and the statement compares each of them exactly. Otherwise the statement
scans a vector index.

Each number of dimensions has two vector indexes: `shared` covers the cases without an author, `learnt` covers the cases
with an author. A vector index returns rows in approximate order, so the outer query sorts the rows again. Each
connection turns on `hnsw.iterative_scan`. Without this setting, an index scan stops after its first candidates, even if
the condition excludes all of them.

Each statement has the parameters `vector`, `embedder`, `k` and `least`. It has `tenant`, `banks` and `authors` only if
a condition names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from perdure.access.tenants import OF_TENANT, WITHOUT_TENANT
from perdure.casebank.queries import FRESH, USAGE
from perdure.database.engine import Statement


class SearchScope(StrEnum):
    """The users whose cases a search covers: all users, the users of one tenant, or the users without a tenant."""

    EVERYBODY = "everybody"
    TENANT = "tenant"
    NO_TENANT = "no_tenant"


_NEAREST = """
    WITH {arms},
    near AS ({union})
    SELECT c.case_id, c.query, c.response_text, c.category_path, c.user_id, c.bank, c.shared_at, {usage},
           c.success_rate, c.status, 1 - near.distance AS similarity
    FROM near JOIN cases AS c USING (case_id) {fresh}
    WHERE near.distance <> 'NaN' AND (%(least)s::float8 IS NULL OR 1 - near.distance >= %(least)s::float8)
    ORDER BY near.distance, c.case_id
    LIMIT %(k)s
"""

_ARM = """
    {name} AS MATERIALIZED (
        SELECT c.case_id,
               c.query_vector::@vector.vector({size}) OPERATOR(@vector.<=>) %(vector)s::@vector.vector({size})
                   AS distance
        FROM cases AS c
        WHERE {condition} AND @vector.vector_dims(c.query_vector) = {size} AND c.embedder = %(embedder)s
        ORDER BY c.query_vector::@vector.vector({size}) OPERATOR(@vector.<=>) %(vector)s::@vector.vector({size})
        LIMIT %(k)s
    )
"""

_MANY = """
    {name}_many AS MATERIALIZED (SELECT EXISTS (SELECT FROM cases AS c WHERE {condition} OFFSET {few}) AS many)
"""

# OFFSET 0 keeps the planner from using a vector index. A scan of the index would read the cases of all users.
_FEW = """
    {name}_few AS MATERIALIZED (
        SELECT found.case_id,
               found.query_vector::@vector.vector({size}) OPERATOR(@vector.<=>) %(vector)s::@vector.vector({size})
                   AS distance
        FROM (
            SELECT c.case_id, c.query_vector FROM cases AS c
            WHERE {condition} AND @vector.vector_dims(c.query_vector) = {size} AND c.embedder = %(embedder)s
            OFFSET 0
        ) AS found
        ORDER BY distance LIMIT %(k)s
    )
"""

# The conditions of the two vector indexes.
_SHARED = "c.status = 'active' AND c.user_id IS NULL"
_LEARNT = "c.status = 'active' AND c.user_id IS NOT NULL"

_ARCHIVED = "c.status = 'archived'"
_IN_BANKS = "c.bank = ANY (%(banks)s::text[])"
_OF_BANKS = f"c.status = 'active' AND c.query_vector IS NOT NULL AND {_IN_BANKS}"
_OF_AUTHORS = "c.user_id = ANY (%(authors)s::text[])"
_OF_TENANT = OF_TENANT.format(column="c.user_id")
_WITHOUT_TENANT = WITHOUT_TENANT.format(column="c.user_id")
_EVERYBODYS_OR_WITHOUT_TENANT = f"(c.user_id IS NULL OR {_WITHOUT_TENANT})"

_WITHIN = {
    SearchScope.EVERYBODY: "true",
    SearchScope.TENANT: _OF_TENANT,
    SearchScope.NO_TENANT: _EVERYBODYS_OR_WITHOUT_TENANT,
}


def nearest(
    size: int, few: int, few_of_bank: int, scope: SearchScope, *, in_banks: bool, include_archived: bool
) -> Statement:
    """The statement that finds the cases in `scope` that are nearest to a vector of `size` dimensions.

    The statement searches active cases and, if `include_archived`, archived cases. For `SearchScope.TENANT`, the
    comparison is exact if the tenant has at most `few` active cases. For another scope with `in_banks`, it is exact if
    the banks contain at most `few_of_bank` active cases.
    """
    wanted = f"{_WITHIN[scope]} AND {_IN_BANKS}" if in_banks else _WITHIN[scope]
    if scope is SearchScope.TENANT:
        counted = f"{_LEARNT} AND {_OF_TENANT}"
        arms = {
            **_few_or_many("tenant", size, few, counted=counted, condition=f"{_LEARNT} AND {wanted}"),
            **_indexed("learnt", size, _LEARNT, "tenant", wanted),
        }
    elif in_banks:
        arms = {
            **_few_or_many(
                "banks", size, few_of_bank, counted=_OF_BANKS, condition=f"{_OF_BANKS} AND {_WITHIN[scope]}"
            ),
            **_indexed("shared", size, _SHARED, "banks", wanted),
            **_indexed("learnt", size, _LEARNT, "banks", wanted),
        }
    else:
        arms = {**_arm("shared", size, _SHARED), **_arm("learnt", size, f"{_LEARNT} AND {wanted}")}
    if include_archived:
        arms |= _arm("archived", size, f"{_ARCHIVED} AND {wanted}")
    options = [option for option, on in (("in_banks", in_banks), ("archived", include_archived)) if on]
    return _nearest("_".join(["nearest", scope, *options, str(size)]), arms)


def nearest_for_user(size: int, few: int, few_of_bank: int, *, of_tenant: bool = False) -> Statement:
    """The statement that finds the nearest active cases that one user may see.

    The statement searches only the cases in the parameter `banks`.

    With `of_tenant`, the parameter `authors` contains the user's key and `everybodys(tenant)`, which is the key of the
    cases that belong to all users of the tenant. The user may see the cases with these two keys, and the cases that an
    administrator shared in the tenant.

    Without `of_tenant`, `authors` contains only the user's key. The user may see their own cases, the cases without an
    author, and the cases that an administrator shared among the users without a tenant.

    The comparison with the cases of `authors` is exact if `authors` have at most `few` active cases. The comparison
    with the cases without an author is exact if the banks contain at most `few_of_bank` such cases. The comparison with
    the cases that an administrator shared is always exact. `size` is the number of the vector's dimensions.
    """
    mine = f"c.status = 'active' AND {_OF_AUTHORS}"
    neighbours = _OF_TENANT if of_tenant else f"c.user_id IS NOT NULL AND {_WITHOUT_TENANT}"
    approved = f"{_OF_BANKS} AND c.shared_at IS NOT NULL AND {neighbours} AND NOT {_OF_AUTHORS}"
    arms = {
        **_few_or_many("own", size, few, counted=mine, condition=f"{mine} AND {_IN_BANKS}"),
        **_few("approved", size, approved),
        **_indexed("own", size, _LEARNT, "own", f"{_OF_AUTHORS} AND {_IN_BANKS}"),
    }
    if not of_tenant:
        everybodys = f"{_OF_BANKS} AND c.user_id IS NULL"
        arms |= _few_or_many("shared", size, few_of_bank, counted=everybodys, condition=everybodys)
        arms |= _indexed("shared", size, _SHARED, "shared", _IN_BANKS)
    return _nearest(f"nearest_for_user{'_of_tenant' if of_tenant else ''}_{size:d}", arms)


def _nearest(name: str, arms: Mapping[str, str]) -> Statement:
    """The statement that returns the nearest cases of all `arms`, which maps the names of CTEs to their SQL.

    A CTE whose name ends with `_many` returns a condition for other CTEs. All other CTEs find cases.
    """
    union = " UNION ALL ".join(f"SELECT * FROM {arm}" for arm in arms if not arm.endswith("_many"))  # noqa: S608 (constants)
    sql = _NEAREST.format(arms=",".join(arms.values()), union=union, usage=USAGE, fresh=FRESH)
    return Statement(f"casebank.{name}", sql, writes=False)


def _arm(name: str, size: int, condition: str) -> dict[str, str]:
    return {name: _ARM.format(name=name, size=int(size), condition=condition)}


def _indexed(name: str, size: int, indexed: str, many: str, wanted: str) -> dict[str, str]:
    """An arm that searches a vector index, if the CTE `{many}_many` returns true.

    The SQL expression `CASE` makes the planner assume that half of the rows match `wanted`.
    """
    condition = f"{indexed} AND (SELECT many FROM {many}_many) AND CASE WHEN {wanted} THEN true ELSE false END"  # noqa: S608 (constants)
    return _arm(name, size, condition)


def _few(name: str, size: int, condition: str) -> dict[str, str]:
    return {f"{name}_few": _FEW.format(name=name, size=int(size), condition=condition)}


def _few_or_many(name: str, size: int, few: int, *, counted: str, condition: str) -> dict[str, str]:
    """Two CTEs. The first CTE returns true if more than `few` rows match `counted`.

    If the first CTE returns false, the second CTE finds the nearest rows that match `condition`.
    """
    many = _MANY.format(name=name, condition=counted, few=int(few))
    return {
        f"{name}_many": many,
        **_few(name, size, f"{condition} AND NOT (SELECT many FROM {name}_many)"),  # noqa: S608 (constants)
    }
