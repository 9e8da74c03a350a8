"""Bringing a database to the tables that this release needs.

The migrations stand in `alembic/` beside the sources, and inside the package
(`perdure/migrations`) where it is installed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import OperationalError

from perdure.database.engine import Database, with_driver
from perdure.errors import Unavailable

_ONE_AT_A_TIME = 0x7065726475726500
"""Key of the advisory lock under which a database is migrated."""

_LOOK_S = 0.1


def config(database_url: str | URL) -> Config:
    """Alembic's configuration for the database at `database_url`."""
    made = Config()
    made.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    made.attributes["database_url"] = with_driver(database_url)
    return made


def migrate(database_url: str | URL, revision: str = "head") -> None:
    """Upgrade the database to `revision`; nothing happens if it is there already.

    Processes that start at once migrate one after another.

    Raises:
        Unavailable: the database cannot be reached, or has no pgvector.
    """
    engine = create_engine(with_driver(database_url))
    try:
        with engine.connect() as connection:
            _wait_for_turn(connection)
            _require_vector(connection)
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


def is_current(database: Database) -> bool:
    """Whether the database has just the tables that this release needs.

    Raises:
        Unavailable: the database cannot be reached.
    """
    try:
        with database.engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
    except OperationalError as error:
        raise Unavailable("The database cannot be reached; please try again.") from error
    return found == ScriptDirectory.from_config(config(database.url)).get_current_head()


def _wait_for_turn(connection: Connection) -> None:
    # Asked for again and again: a statement that waited for the lock would itself be waited for
    # by an index that the lock's holder builds concurrently.
    while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _ONE_AT_A_TIME}):
        connection.commit()
        time.sleep(_LOOK_S)
    connection.commit()


def _require_vector(connection: Any) -> None:
    found = connection.execute(text("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'")).first()
    connection.rollback()
    if found is None:
        raise Unavailable("The PostgreSQL server has no pgvector: install it there (0.8.4 or newer) and migrate again.")


def _scripts() -> Path:
    package = Path(__file__).parent.parent
    installed, beside = package / "migrations", package.parent / "alembic"
    return installed if installed.is_dir() else beside
