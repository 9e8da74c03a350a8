"""Adds schema names to SQL where the `search_path` does not suffice.

Each connection of perdure has perdure's schema as its only `search_path`, so most statements name their tables without
a schema. A name needs a schema in two cases:

- The objects of the extension `vector` may be in any schema. SQL has the marker `@vector.` before their names.
- Some statements run without that `search_path`: statements on the application's own connections, and statements that
  run outside of a transaction if there is a pooler. Their SQL has the marker `@schema.` before the names of tables.

`Names.render` replaces both markers with schema names.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

_SCHEMA, _VECTOR = "@schema.", "@vector."

EXTENSION_SCHEMA = """
    SELECT n.nspname FROM pg_catalog.pg_extension AS e JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace
    WHERE e.extname = 'vector'
"""


def quoted(name: str) -> str:
    """`name` as a quoted SQL identifier."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def extension_schema(connection: Connection) -> str | None:
    """The schema of the extension `vector`; `None` if the extension is not installed."""
    found = connection.scalar(text(EXTENSION_SCHEMA))
    return None if found is None else str(found)


def create_extension(connection: Connection) -> None:
    """Install the extension `vector` if it is missing: in `public` if that exists, otherwise in the current schema.

    If the extension is in `public`, the application's own tables can use its types without naming a schema.
    """
    if extension_schema(connection) is None:
        in_public = connection.scalar(text("SELECT to_regnamespace('public') IS NOT NULL"))
        connection.execute(text(f"CREATE EXTENSION IF NOT EXISTS vector{' SCHEMA public' if in_public else ''}"))


@dataclass(slots=True)
class Names:
    """The schema names of one database.

    Attributes:
        schema: The schema of perdure's tables.
        vector: The schema of the extension `vector`; `None` until it has been read from the database.
    """

    schema: str
    vector: str | None = None

    def needs_vector(self, sql: str) -> bool:
        """Whether the caller must set `vector` before `render(sql)`."""
        return self.vector is None and _VECTOR in sql

    def render(self, sql: str) -> str:
        """`sql` with the markers replaced by quoted schema names."""
        if _SCHEMA in sql:
            sql = sql.replace(_SCHEMA, f"{quoted(self.schema)}.")
        if self.vector is not None and _VECTOR in sql:
            sql = sql.replace(_VECTOR, f"{quoted(self.vector)}.")
        return sql
