"""Checks whether this release of perdure can use a database.

The versions of PostgreSQL and pgvector must be new enough, the database's encoding must be UTF-8, and this release must
be able to use the schema. A release is identified by the newest Alembic revision that it contains. The database stores
two revisions:

- `alembic_version` has the schema's current revision.
- `schema_compatibility.readable_from` identifies the oldest release that can use the schema. Each
  migration, up or down, updates the table's only row (see `alembic/env.py`).

A release can use the schema in two cases:

- The current revision is the newest revision of this release.
- A newer release has migrated the schema to a revision that this release does not contain, but this release contains
  the revision in `readable_from`.

The second case lets the releases before and after a migration run concurrently. `perdure migrate` and `/readyz` check
the compatibility, and so does each gateway, worker and beat when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Row

from perdure.database.engine import Database, Statement
from perdure.errors import IncompatibleDatabase
from perdure.text.patterns import compiled

OLDEST_POSTGRESQL = 15
OLDEST_PGVECTOR = (0, 8, 4)
ENCODING = "UTF8"

_NUMBER = compiled(r"\d+")

SERVER = Statement(
    "compatibility.server",
    """
    SELECT current_setting('server_version_num')::int AS number, current_setting('server_version') AS version,
        current_setting('server_encoding') AS encoding,
        coalesce(
            (SELECT extversion FROM pg_extension WHERE extname = 'vector'),
            (SELECT default_version FROM pg_available_extensions WHERE name = 'vector')
        ) AS pgvector,
        to_regclass('alembic_version') IS NOT NULL AS migrated,
        to_regclass('schema_compatibility') IS NOT NULL AS declared,
        (SELECT count(*) FROM (VALUES (to_regclass('sessions'), 'routable'), (to_regclass('turns'), 'session_id'),
            (to_regclass('deliveries'), 'target')) AS known (relation, name)
         JOIN pg_attribute AS a ON a.attrelid = known.relation AND a.attname = known.name) = 3 AS recognised
    """,
    writes=False,
)

REVISION = Statement("compatibility.revision", "SELECT version_num FROM alembic_version", writes=False)

READABLE_FROM = Statement("compatibility.readable_from", "SELECT readable_from FROM schema_compatibility", writes=False)

Query = Callable[[Statement], Sequence[Row[Any]]]
"""Runs a statement that has no parameters, and returns its rows."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The revision of a database's schema, and the oldest release that can use the schema.

    Attributes:
        revision: The current revision; `None` if no migration has run.
        readable_from: The newest revision of the oldest release that can use the schema; `None` if not recorded.
    """

    revision: str | None
    readable_from: str | None

    @property
    def is_newer(self) -> bool:
        return self.revision is not None and self.revision not in revisions()

    def require(self) -> None:
        """Check that this release can use the schema.

        Raises:
            IncompatibleDatabase: this release cannot use the schema.
        """
        own = revisions()[-1]
        if self.revision == own:
            return
        if self.revision is None:
            raise IncompatibleDatabase(f"The database has no tables of perdure: run `perdure migrate` (to {own}).")
        if not self.is_newer:
            raise IncompatibleDatabase(
                f"The database is at revision {self.revision}, and this release needs {own}: run `perdure migrate`."
            )
        if self.readable_from not in revisions():
            raise IncompatibleDatabase(
                f"A newer release of perdure has migrated the database to revision {self.revision}, which releases "
                f"before revision {self.readable_from} cannot use. This release is at {own}: install a newer one."
            )


def require(database: Database) -> None:
    """Check that this release can use `database`.

    Raises:
        IncompatibleDatabase: this release cannot use the database; the message names the found and the required
            version, and a remedy.
    """

    def query(statement: Statement) -> Sequence[Row[Any]]:
        return database.run(statement, {})

    inspect(query).require()


def inspect(query: Query) -> Schema:
    """Check the server and the encoding; returns the schema's revision and oldest compatible release.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, pgvector is missing, the encoding is not UTF-8, or the
            revision is not one of perdure's.
    """
    found = query(SERVER)[0]
    _require_server(found)
    if found.migrated and not found.recognised and (versions := query(REVISION)):
        raise _not_ours(versions[0].version_num)
    versions = query(REVISION) if found.migrated else ()
    declared = query(READABLE_FROM) if found.declared else ()
    schema = Schema(
        revision=versions[0].version_num if versions else None,
        readable_from=declared[0].readable_from if declared else None,
    )
    if schema.is_newer and schema.readable_from is None:
        raise _not_ours(schema.revision)
    return schema


def require_server(query: Query) -> None:
    """Check the versions of PostgreSQL and pgvector, and the database's encoding.

    Raises:
        IncompatibleDatabase: PostgreSQL or pgvector is too old, pgvector is missing, or the encoding is not UTF-8.
    """
    _require_server(query(SERVER)[0])


def _not_ours(revision: str | None) -> IncompatibleDatabase:
    return IncompatibleDatabase(
        f"The database is at revision {revision!r}, which is not one of perdure's: set PERDURE_DATABASE_SCHEMA to a "
        "schema of perdure's own, or PERDURE_DATABASE_URL to perdure's database."
    )


def _require_server(found: Row[Any]) -> None:
    if found.number < OLDEST_POSTGRESQL * 10_000:
        raise IncompatibleDatabase(
            f"The server of PERDURE_DATABASE_URL is PostgreSQL {found.version}; perdure needs {OLDEST_POSTGRESQL} or "
            "newer. Upgrade it, or set PERDURE_DATABASE_URL to another server."
        )
    if found.encoding != ENCODING:
        raise IncompatibleDatabase(
            f"The database of PERDURE_DATABASE_URL has the encoding {found.encoding}, which lacks characters; "
            f"perdure needs {ENCODING}. Create another one (`CREATE DATABASE name TEMPLATE template0 ENCODING "
            f"'{ENCODING}'`), and set PERDURE_DATABASE_URL to it."
        )
    needed = ".".join(map(str, OLDEST_PGVECTOR))
    if found.pgvector is None:
        raise IncompatibleDatabase(
            f"The server of PERDURE_DATABASE_URL has no pgvector; perdure needs {needed} or newer. Install it on the "
            "server and run `perdure migrate`, or set PERDURE_DATABASE_URL to another server."
        )
    if tuple(map(int, _NUMBER.findall(found.pgvector))) < OLDEST_PGVECTOR:
        raise IncompatibleDatabase(
            f"The database of PERDURE_DATABASE_URL has pgvector {found.pgvector}; perdure needs {needed} or newer. "
            "Install that on the server and run `ALTER EXTENSION vector UPDATE` in the database, or set "
            "PERDURE_DATABASE_URL to another server."
        )


@cache
def revisions() -> tuple[str, ...]:
    """The Alembic revisions that this release contains, oldest first. The name of a file begins with its revision."""
    return tuple(sorted(each.stem.partition("_")[0] for each in (scripts() / "versions").glob("*.py")))


def scripts() -> Path:
    """The directory of the migrations: `perdure/migrations` in an installed package, `alembic` in a checkout."""
    package = Path(__file__).parent.parent
    installed, in_checkout = package / "migrations", package.parent / "alembic"
    return installed if installed.is_dir() else in_checkout
