"""Migrates perdure's schema in a database to the tables of this release.

The migrations are in the directory `alembic` of a checkout, or in `perdure/migrations` of an installed package.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alembic import command
from alembic.config import Config
from psycopg2.errorcodes import INSUFFICIENT_PRIVILEGE
from sqlalchemy import Connection, Row, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from perdure.database import compatibility
from perdure.database.engine import Statement
from perdure.database.schema import quoted
from perdure.database.session import maintenance_engine, with_driver
from perdure.database.tables import metadata
from perdure.errors import IncompatibleDatabase, Unavailable
from perdure.settings import SCHEMA
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

_ONE_AT_A_TIME = 0x7065726475726500
"""The key of the advisory lock for migrations."""

_POLL_S = 0.1

_AGAIN = "Run `perdure migrate` again: it goes on after the last revision that is complete."

_RECOGNISED_BY = {
    "sessions": {"session_id", "user_id", "routable", "token", "lease_until"},
    "turns": {"turn_id", "session_id", "seq", "status"},
    "messages": {"session_id", "seq", "turn_id", "role", "content"},
    "deliveries": {"delivery_id", "turn_id", "target"},
}
"""For each of these tables, columns that the table has at every revision."""

_COLUMNS = text("""
    SELECT c.relname AS name, array_agg(a.attname::text) AS columns
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE n.nspname = :schema AND c.relkind IN ('r', 'p') GROUP BY 1
""")

_SCHEMA_EXISTS = text("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = :schema)")


def config(database_url: str | URL, schema: str = SCHEMA) -> Config:
    """Alembic's configuration for the tables in `schema` of the database at `database_url`."""
    made = Config()
    made.set_main_option("script_location", str(compatibility.scripts()).replace("%", "%%"))
    made.attributes["database_url"] = with_driver(database_url)
    made.attributes["schema"] = schema
    return made


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a call of `migrate` did to the tables in `schema`.

    `before` and `after` are revisions; `before` is `None` if there were no tables.
    """

    schema: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        """A message for the operator."""
        where = f"the tables in the schema {self.schema}"
        if self.before is None:
            return f"Created {where} at revision {self.after}."
        if self.before == self.after:
            return f"Nothing to do: {where} are at revision {self.after}."
        return f"Upgraded {where} from revision {self.before} to {self.after}."


def migrate(database_url: str | URL, revision: str = "head", *, schema: str = SCHEMA) -> Migrated:
    """Upgrade the tables in `schema` to `revision`, unless a newer release has migrated them.

    Creates `schema` if it does not exist. Concurrent calls migrate one after another.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, the revision is not one of perdure's, the role lacks
            rights, or `schema` has another application's tables.
        Unavailable: the database cannot be reached, or a lock was not free in time; the call may be repeated.
    """
    engine = maintenance_engine(database_url)
    try:
        with engine.connect() as connection:
            _acquire_lock(connection)
            connection.execute(text(f"SET search_path = {quoted(schema)}"))
            connection.commit()
            compatibility.require_server(_query(connection))
            before = _find_revision(connection, schema)
            if before is None:
                _create_schema(connection, schema)
            connection.commit()
            if not _is_newer(connection):
                made = config(database_url, schema)
                made.attributes["connection"] = connection
                command.upgrade(made, revision)
            done = Migrated(schema, before, _find_revision(connection, schema))
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _ONE_AT_A_TIME})
            connection.commit()
            return done
    except ProgrammingError as error:
        if getattr(error.orig, "pgcode", None) != INSUFFICIENT_PRIVILEGE:
            raise
        raise IncompatibleDatabase(
            f"The role lacks a right: {first_line(str(error.orig))}. It needs USAGE and CREATE on {quoted(schema)}, "
            "USAGE on the schema of the extension vector, and the right to install that extension unless an "
            "administrator has (`CREATE EXTENSION vector`)."
        ) from error
    except OperationalError as error:
        url = make_url(database_url)  # only its host and database are shown: its query may have passwords, too
        where = f"{url.database!r} at {url.host or url.query.get('host', 'localhost')}"
        answers = getattr(error.orig, "pgcode", None) is not None
        raise Unavailable(
            f"The database {where} cannot be migrated: "
            + (f"{first_line(str(error.orig))}. {_AGAIN}" if answers else str(error.orig))
        ) from error
    finally:
        engine.dispose()


def _acquire_lock(connection: Connection) -> None:
    # Polls instead of waiting for the lock: its holder may run CREATE INDEX CONCURRENTLY, which waits for all running
    # statements. A statement that waits for the lock would be among them, so the two would deadlock.
    while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _ONE_AT_A_TIME}):
        connection.commit()
        time.sleep(_POLL_S)
    connection.commit()


def _find_revision(connection: Connection, schema: str) -> str | None:
    """The revision of perdure's installation in `schema`; `None` if the schema has no installation.

    The table `alembic_version` is not enough, because another application's revision may have the same name.
    """
    found = _columns(connection, schema)
    if "alembic_version" not in found:
        return None
    recognised = all(columns <= found.get(name, set()) for name, columns in _RECOGNISED_BY.items())
    return _version(connection, schema) if recognised else None


def _create_schema(connection: Connection, schema: str) -> None:
    """Create `schema` unless it exists.

    Raises:
        IncompatibleDatabase: a table of another application has the name of one of perdure's tables, or the role may
            not create the schema.
    """
    found = _columns(connection, schema).keys()
    taken = sorted(metadata.tables.keys() & found)
    if "alembic_version" in found and _version(connection, schema) is not None:  # None: all migrations were undone
        taken.insert(0, "alembic_version")
    if taken:
        raise IncompatibleDatabase(
            f"The schema {schema!r} of the database has a table {taken[0]!r} that is not perdure's: set "
            "PERDURE_DATABASE_SCHEMA to a schema of perdure's own (default: perdure)."
        )
    if connection.scalar(_SCHEMA_EXISTS, {"schema": schema}):
        return
    try:
        connection.execute(text(f"CREATE SCHEMA {quoted(schema)}"))
    except DBAPIError as error:
        connection.rollback()
        role = quoted(str(connection.scalar(text("SELECT current_user"))))
        raise IncompatibleDatabase(
            f"The schema {schema!r} cannot be created ({first_line(str(error.orig))}): let an administrator run "
            f"`CREATE SCHEMA {quoted(schema)} AUTHORIZATION {role}` in the database, or set "
            "PERDURE_DATABASE_SCHEMA to a schema that the role may create tables in."
        ) from error


def _version(connection: Connection, schema: str) -> str | None:
    version = connection.scalar(text(f"SELECT version_num FROM {quoted(schema)}.alembic_version"))  # noqa: S608 (quoted)
    return None if version is None else str(version)


def _columns(connection: Connection, schema: str) -> dict[str, set[str]]:
    return {row.name: set(row.columns) for row in connection.execute(_COLUMNS, {"schema": schema})}


def _is_newer(connection: Connection) -> bool:
    """Whether a newer release has migrated the tables.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, or the revision is not one of perdure's.
    """
    found = compatibility.inspect(_query(connection))
    connection.rollback()
    if found.is_newer:
        own = compatibility.revisions()[-1]
        log.warning(
            "a newer release has migrated the database to revision %s: nothing is changed (this release ends at %s)",
            found.revision, own,
        )  # fmt: skip
    return found.is_newer


def _query(connection: Connection) -> compatibility.Query:
    def query(statement: Statement) -> Sequence[Row[Any]]:
        return connection.exec_driver_sql(statement.sql).fetchall()

    return query
