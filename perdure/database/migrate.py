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
from sqlalchemy.exc import OperationalError, ProgrammingError

from perdure.database import compatibility, moving
from perdure.database.engine import Statement
from perdure.database.schema import PUBLIC, quoted
from perdure.database.session import maintenance_engine, with_driver
from perdure.errors import IncompatibleDatabase, Unavailable
from perdure.settings import SCHEMA
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

_ONE_AT_A_TIME = 0x7065726475726500
"""The key of the advisory lock for migrations."""

_POLL_S = 0.1


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

    `before` and `after` are revisions; `before` is `None` if there were no tables. `moved_from` is the schema from
    which the tables were moved, or `None`.
    """

    schema: str
    before: str | None
    after: str | None
    moved_from: str | None = None

    def __str__(self) -> str:
        """A message for the operator."""
        where = f"the tables in the schema {self.schema}"
        moved = f"Moved {where} from the schema {self.moved_from}. " if self.moved_from else ""
        if self.before is None:
            return f"{moved}Created {where} at revision {self.after}."
        if self.before == self.after:
            return f"{moved}Nothing to {'upgrade' if moved else 'do'}: {where} are at revision {self.after}."
        return f"{moved}Upgraded {where} from revision {self.before} to {self.after}."


def migrate(
    database_url: str | URL,
    revision: str = "head",
    *,
    schema: str = SCHEMA,
    source: str | None = None,
    although_leased: bool = False,
    new: bool = False,
) -> Migrated:
    """Upgrade the tables in `schema` to `revision`, unless a newer release has migrated them.

    Concurrent calls migrate one after another.

    Args:
        database_url: The database.
        revision: The Alembic revision to upgrade to.
        schema: The schema of the tables. It is created if it does not exist.
        source: The schema of an installation that is first moved to `schema`; see `perdure.database.moving`. If
            `None`, an installation in `public`, where earlier releases kept their tables, is moved.
        although_leased: Move the tables even while workers hold leases.
        new: Do not move an installation from `public`; create another installation in `schema`.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, the revision is not one of perdure's, the role lacks
            rights, `schema` has another application's tables, or the tables cannot be moved now.
        Unavailable: the database cannot be reached.
    """
    engine = maintenance_engine(database_url)
    try:
        with engine.connect() as connection:
            _acquire_lock(connection)
            moved_from = _prepare_schema(connection, schema, source, although_leased=although_leased, new=new)
            before = moving.find_revision(connection, schema)
            if not _is_newer(connection):
                made = config(database_url, schema)
                made.attributes["connection"] = connection
                command.upgrade(made, revision)
            done = Migrated(schema, before, moving.find_revision(connection, schema), moved_from)
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
        where = make_url(database_url).render_as_string(hide_password=True)
        raise Unavailable(f"The database {where} cannot be migrated: {error.orig}") from error
    finally:
        engine.dispose()


def _acquire_lock(connection: Connection) -> None:
    # Polls instead of waiting for the lock: its holder may run CREATE INDEX CONCURRENTLY, which waits for all running
    # statements. A statement that waits for the lock would be among them, so the two would deadlock.
    while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _ONE_AT_A_TIME}):
        connection.commit()
        time.sleep(_POLL_S)
    connection.commit()


def _prepare_schema(
    connection: Connection, schema: str, source: str | None, *, although_leased: bool, new: bool
) -> str | None:
    """Set the connection's `search_path` to `schema`, and prepare `schema` for the migrations.

    Returns the schema from which an installation was moved, if any.

    If `schema` has an installation, it needs no preparation. Otherwise, if another schema has an installation to move,
    move that installation to `schema`. If there is no installation to move, create `schema`.
    """
    connection.execute(text(f"SET search_path = {quoted(schema)}"))
    connection.commit()
    compatibility.require_server(_query(connection))
    moved_from = None
    if moving.find_revision(connection, schema) is not None:
        if source not in {None, schema} and moving.find_revision(connection, str(source)) is not None:
            raise IncompatibleDatabase(
                f"--from {source}: the schema {schema!r} has an installation of its own already. To move the one in "
                f"{source!r} there, remove the other first (`DROP SCHEMA`, if it is empty)."
            )
    else:
        revisions = compatibility.revisions()
        if source is None and not new and moving.find_revision(connection, PUBLIC) is not None:
            source = _source(schema)
        if source is None:
            moving.require_free(connection, schema, revisions)
            moving.create_schema(connection, schema)
        else:
            moving.move(connection, source, schema, revisions, although_leased=although_leased)
            moved_from = source
    connection.commit()
    return moved_from


def _source(schema: str) -> str | None:
    """The schema whose installation is moved to `schema`: `public`, or `None` if `schema` is `public` itself.

    Raises:
        IncompatibleDatabase: `schema` is neither `public` nor the default. The operator must choose whether to move the
            installation in `public` or to create a second installation.
    """
    if schema not in {SCHEMA, PUBLIC}:
        raise IncompatibleDatabase(
            f"The schema 'public' has an installation of perdure, and PERDURE_DATABASE_SCHEMA is {schema!r}: "
            "`perdure migrate --from public` moves it there, `perdure migrate --new` makes another one."
        )
    return PUBLIC if schema != PUBLIC else None


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
