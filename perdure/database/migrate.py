"""Migrating a database to the tables of this release.

The migrations are in `alembic/` in the sources, and inside the package (`perdure/migrations`) where it is installed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Row, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import OperationalError

from perdure.database import compatibility
from perdure.database.engine import Statement, with_driver
from perdure.errors import Unavailable

log = logging.getLogger(__name__)

_ONE_AT_A_TIME = 0x7065726475726500
"""Key of the advisory lock under which a database is migrated."""

_LOOK_S = 0.1


def config(database_url: str | URL) -> Config:
    """Alembic's configuration for the database at `database_url`."""
    made = Config()
    made.set_main_option("script_location", str(compatibility.scripts()).replace("%", "%%"))
    made.attributes["database_url"] = with_driver(database_url)
    return made


def migrate(database_url: str | URL, revision: str = "head") -> None:
    """Upgrade the database to `revision`. A database that a newer release has migrated is left unchanged.

    Concurrent calls migrate one after another.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, or the revision is not one of perdure's.
        Unavailable: the database cannot be reached.
    """
    engine = create_engine(with_driver(database_url))
    try:
        with engine.connect() as connection:
            _wait_for_turn(connection)
            if not _is_newer(connection):
                made = config(database_url)
                made.attributes["connection"] = connection
                command.upgrade(made, revision)
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _ONE_AT_A_TIME})
            connection.commit()
    except OperationalError as error:
        where = make_url(database_url).render_as_string(hide_password=True)
        raise Unavailable(f"The database {where} cannot be migrated: {error.orig}") from error
    finally:
        engine.dispose()


def _wait_for_turn(connection: Connection) -> None:
    # The lock is polled: an index that its holder builds concurrently would wait for a statement that waits for the
    # lock.
    while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _ONE_AT_A_TIME}):
        connection.commit()
        time.sleep(_LOOK_S)
    connection.commit()


def _is_newer(connection: Connection) -> bool:
    """Whether a newer release has migrated the database.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, or the revision is not one of perdure's.
    """

    def query(statement: Statement) -> Sequence[Row[Any]]:
        return connection.exec_driver_sql(statement.sql).fetchall()

    schema = compatibility.inspect(query)
    connection.rollback()
    if schema.is_newer:
        own = compatibility.revisions()[-1]
        told = "a newer release has migrated the database to revision %s: nothing is changed (this release ends at %s)"
        log.warning(told, schema.revision, own)
    return schema.is_newer
