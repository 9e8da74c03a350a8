"""The statements of an export of a user's rows.

They are made of the definitions of all tables, which take 3 MB of a process: workers erase users, but do not import
this module.
"""

from __future__ import annotations

from sqlalchemy.dialects import postgresql

from perdure.database.engine import Statement
from perdure.database.paging import sized
from perdure.database.tables import metadata
from perdure.users.tables import USER_TABLES, UserTable

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy does not annotate it


def _export(user_table: UserTable) -> tuple[Statement, dict[str, str]]:
    """The statement that reads the next page, and the columns of the primary key by the parameters of their values."""
    table = user_table.table
    left_out = ", ".join(f"'{column}'" for column in user_table.left_out)
    columns = list(metadata.tables[table].primary_key.columns)
    key = ", ".join(column.name for column in columns)
    after = {f"after_{column.name}": column for column in columns}
    values = [f"%({name})s::{column.type.compile(_DIALECT)}" for name, column in after.items()]
    # The keys first: the rows that are not on the page are not converted.
    rows = f"""
        SELECT {key}, to_jsonb(m) - ARRAY[{left_out}]::text[] || {user_table.added} AS kept
        FROM {table} AS m JOIN (
            SELECT {key} FROM {table}
            WHERE ({user_table.of_user}) AND ({values[0]} IS NULL OR ({key}) > ({", ".join(values)}))
            ORDER BY {key} LIMIT %(most)s
        ) AS page USING ({key})
    """  # noqa: S608 (constants)
    statement = Statement(f"export.{table}", sized(rows, key, "octet_length(kept::text)"), writes=False)
    return statement, {name: column.name for name, column in after.items()}


EXPORT = {user_table.table: _export(user_table) for user_table in USER_TABLES}
"""By table, the statement that reads the next page of a user's rows, and the columns of its key by parameter."""
