"""Names in SQL that do not depend on a role's `search_path`.

Each connection of perdure has perdure's schema as its only `search_path`, so its statements name their tables without a
schema. Names are qualified in two cases. The objects of the extension `vector` may be in any schema; SQL marks them
with `@vector.`. Some statements run without that `search_path` (outside of transactions behind a pooler, and on the
application's own connections); SQL marks their tables with `@schema.`. `Names.render` replaces both markers.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text
from sqlalchemy.types import UserDefinedType

_SCHEMA, _VECTOR = "@schema.", "@vector."

PUBLIC = "public"
"""The schema of earlier releases, and of most applications' tables."""

EXTENSION_SCHEMA = """
    SELECT n.nspname FROM pg_catalog.pg_extension AS e JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace
    WHERE e.extname = 'vector'
"""


def quoted(name: str) -> str:
    """`name` as an identifier of SQL."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def extension_schema(connection: Connection) -> str | None:
    """The schema in which the extension `vector` is installed; `None` if it is not."""
    found = connection.scalar(text(EXTENSION_SCHEMA))
    return None if found is None else str(found)


def create_extension(connection: Connection) -> None:
    """Install the extension `vector` if it is missing: in `public` if that exists, otherwise in the current schema.

    If the extension is in `public`, the application's own tables can use its types without naming a schema.
    """
    if extension_schema(connection) is None:
        in_public = connection.scalar(text("SELECT to_regnamespace('public') IS NOT NULL"))
        connection.execute(text(f"CREATE EXTENSION IF NOT EXISTS vector{' SCHEMA public' if in_public else ''}"))


class QualifiedVector(UserDefinedType[object]):
    """The type `vector` for a column of a migration, named with its schema."""

    cache_ok = True

    def __init__(self, schema: str) -> None:
        self.schema = schema

    def get_col_spec(self, **_: object) -> str:
        """The type's name in SQL."""
        return f"{quoted(self.schema)}.vector"


def vector_type(connection: Connection) -> QualifiedVector:
    """The column type `vector`, qualified with the schema in which the extension is installed.

    Raises:
        LookupError: the extension is not installed.
    """
    schema = extension_schema(connection)
    if schema is None:
        raise LookupError("the extension vector is not installed")
    return QualifiedVector(schema)


@dataclass(slots=True)
class Names:
    """The names of one database. `vector` is the extension's schema, `None` until it has been read."""

    schema: str
    vector: str | None = None

    def needs_vector(self, sql: str) -> bool:
        """Whether `render` needs the extension's schema first."""
        return self.vector is None and _VECTOR in sql

    def render(self, sql: str) -> str:
        """`sql` with the markers replaced by quoted schemas."""
        if _SCHEMA in sql:
            sql = sql.replace(_SCHEMA, f"{quoted(self.schema)}.")
        if self.vector is not None and _VECTOR in sql:
            sql = sql.replace(_VECTOR, f"{quoted(self.vector)}.")
        return sql
