"""Import and export of cases as JSON lines.

An import reports the number and the error of each invalid line, and adds the cases of all valid lines. A line whose
case already exists changes nothing, so a file can safely be imported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import Row

from perdure.access.tenants import UserKey, author_of, everybodys, line_tenant, tenant_of, user_key
from perdure.casebank import COMMON, queries
from perdure.casebank.cases import NewCase, add
from perdure.clock import iso
from perdure.database.engine import Executor
from perdure.errors import InvalidRequest
from perdure.text.untrusted import load_object, member_path, what_is_wrong

_PAGE = 100


class _Line(BaseModel):
    """One line of an imported file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    case_id: str
    query: str
    response_text: str
    category_path: str | None = None
    query_vector: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    embedder: str | None = None
    tenant: str | None = None
    user_id: str | None = None
    usage_count: int = 0
    success_rate: float | None = None
    last_accessed_at: AwareDatetime | None = Field(default=None, strict=False)
    status: Literal["active", "archived"] = "active"
    created_at: AwareDatetime | None = Field(default=None, strict=False)
    bank: str = COMMON
    shared_at: AwareDatetime | None = Field(default=None, strict=False)


@dataclass(slots=True)
class Imported:
    """The result of an import. `bad` contains the number (from 1) and the error of each invalid line."""

    added: int = 0
    unchanged: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)


def import_lines(
    executor: Executor,
    lines: Iterable[str],
    *,
    now: datetime,
    dimensions: Callable[[str], int | None] = lambda _embedder: None,
    tenant: str | None = None,
    own_embedder: str | None = None,
) -> Imported:
    """Add the case of each line, one by one.

    `dimensions` returns the number of dimensions of an embedder's vectors, or `None` if the number is unknown. If a
    line has no tenant, the line's case belongs to `tenant`. `own_embedder` is the name of the installation's embedder.
    """
    imported = Imported()
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = _parsed(text)
            known = None if line.embedder is None else dimensions(line.embedder)
            new = _add(executor, line, tenant, now=now, dimensions=known, own_embedder=own_embedder)
        except (ValueError, InvalidRequest) as error:
            imported.bad.append((number, str(error)))
            continue
        imported.added += new
        imported.unchanged += not new
    return imported


def export_lines(executor: Executor, *, tenant: str | None = None, bank: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each case, in the order of the case ids. `import_lines` accepts each object as a line.

    Includes archived cases. `tenant` limits the export to one tenant, `bank` to one bank. `None` sets no limit.
    """
    after = ""
    while rows := executor.run(queries.EXPORT, {"after": after, "most": _PAGE, "tenant": tenant, "bank": bank}):
        yield from map(_line, rows)
        after = rows[-1].case_id


def _parsed(text: str) -> _Line:
    try:
        return _Line.model_validate(load_object(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = member_path(first) or "the line"
        raise ValueError(f"{where} {what_is_wrong(first)}") from None


def _add(executor: Executor, line: _Line, tenant: str | None, **given: Any) -> bool:
    tenant = line_tenant(line.tenant, tenant)
    fields = line.model_dump(exclude={"tenant", "user_id"})
    case = NewCase(**fields, user_id=_author(tenant, line.user_id))
    if add(executor, case, **given):
        return True
    for row in executor.run(queries.AUTHOR, {"case_id": case.case_id}):
        if tenant_of(row.user_id) != tenant:
            raise InvalidRequest(f"case_id {case.case_id!r} belongs to a case of another tenant, or of none.")
    return False


def _author(tenant: str | None, user_id: str | None) -> UserKey | None:
    if user_id is None:
        return None if tenant is None else everybodys(tenant)
    return user_key(tenant, user_id)


def _line(row: Row[Any]) -> dict[str, Any]:
    optional = {
        "category_path": row.category_path,
        "query_vector": row.query_vector,
        "embedder": row.embedder,
        "tenant": tenant_of(row.user_id),
        "user_id": author_of(row.user_id),
        "bank": None if row.bank == COMMON else row.bank,
        "shared_at": iso(row.shared_at),
        "last_accessed_at": iso(row.last_accessed_at),
    }
    return {
        "case_id": row.case_id,
        "query": row.query,
        "response_text": row.response_text,
        **{name: value for name, value in optional.items() if value is not None},
        "usage_count": row.usage_count,
        "success_rate": row.success_rate,
        "status": row.status,
        "created_at": row.created_at.isoformat(),
    }
