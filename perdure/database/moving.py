"""Moves an installation's tables and functions to another schema, in one transaction.

Earlier releases kept their tables in `public`; `perdure migrate` moves them to `PERDURE_DATABASE_SCHEMA`. Workers of
those releases cannot use the tables after the move, so `move` refuses to run while a worker holds a lease.
`PERDURE_DATABASE_SCHEMA=public perdure migrate --from perdure` moves the tables back.

A schema has an installation if it has the table `alembic_version` and certain columns of perdure's oldest tables. The
revision in `alembic_version` is not enough, because another application's revision may have the same name. `move`
moves only the tables that exist at the installation's revision.
"""

from __future__ import annotations

import logging

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from perdure.database.schema import quoted
from perdure.errors import IncompatibleDatabase
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

_LOCK_TIMEOUT = "5s"

_CREATED_IN = {
    "0001": "users identities sessions turns inbox messages tool_effects deliveries schedule_slots sweeps",
    "0002": "snapshots schedule_entries",
    "0006": "intake",
    "0008": "message_words embedders message_vectors unembedded memories memory_vectors memory_sources entities "
    "entity_mentions relations memory_accesses hot_memories",
    "0010": "erasures",
    "0012": "case_runs cases case_archive case_executions case_history case_run_items",
    "0014": "schema_compatibility",
    "0023": "conversations",
    "0024": "link_codes link_attempts",
    "0025": "answered_requests",
    "0026": "unrouted",
    "0027": "chat_places",
    "0028": "reminders",
    "0045": "metered_requests",
}
"""The tables that each revision creates."""

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

_FUNCTIONS = text("""
    SELECT format('%I.%I(%s)', n.nspname, p.proname, pg_get_function_identity_arguments(p.oid))
    FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
    WHERE n.nspname = :schema AND p.proname = ANY (:names)
""")
_FUNCTION_NAMES = ["perdure_now", "perdure_illegal_transition", "perdure_owner", "perdure_words", "perdure_said"]

_SCHEMA_EXISTS = text("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = :schema)")


_GRANTEES = text("""
    SELECT DISTINCT CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace,
         LATERAL aclexplode(c.relacl) AS acl
    WHERE n.nspname = :schema AND acl.grantee <> c.relowner
""")


def tables_at(revision: str | None, revisions: tuple[str, ...]) -> set[str]:
    """The names of the tables at `revision`. If `revision` is not in `revisions`, the tables at the newest revision."""
    until = revisions.index(revision) if revision in revisions else len(revisions)
    return {name for each in revisions[: until + 1] for name in _CREATED_IN.get(each, "").split()}


def find_revision(connection: Connection, schema: str) -> str | None:
    """The revision of perdure's installation in `schema`; `None` if the schema has no installation.

    An `alembic_version` of another application is ignored, even if its revision has the same name as a revision of
    perdure.
    """
    found = _columns(connection, schema)
    if "alembic_version" not in found or not _is_recognised(found):
        return None
    return _version(connection, schema)


def require_free(connection: Connection, schema: str, revisions: tuple[str, ...]) -> None:
    """Check that no table in `schema` has the name of one of perdure's tables.

    Raises:
        IncompatibleDatabase: another application's table has such a name.
    """
    found = _columns(connection, schema).keys()
    taken = sorted(tables_at(None, revisions) & found)
    if "alembic_version" in found and _version(connection, schema) is not None:  # None: all migrations were undone
        taken.insert(0, "alembic_version")
    if taken:
        raise IncompatibleDatabase(
            f"The schema {schema!r} of the database has a table {taken[0]!r} that is not perdure's: set "
            "PERDURE_DATABASE_SCHEMA to a schema of perdure's own (default: perdure)."
        )


def create_schema(connection: Connection, schema: str) -> None:
    """Create `schema` unless it exists.

    Raises:
        IncompatibleDatabase: the database role may not create the schema.
    """
    if connection.scalar(_SCHEMA_EXISTS, {"schema": schema}):
        return
    try:
        connection.execute(text(f"CREATE SCHEMA {quoted(schema)}"))
    except DBAPIError as error:
        raise IncompatibleDatabase(
            f"The schema {schema!r} cannot be created ({first_line(str(error.orig))}): let an administrator run "
            f"`CREATE SCHEMA {quoted(schema)} AUTHORIZATION {quoted(_role(connection))}` in the database, or set "
            "PERDURE_DATABASE_SCHEMA to a schema that the role may create tables in."
        ) from error


def move(
    connection: Connection, source: str, target: str, revisions: tuple[str, ...], *, although_leased: bool
) -> None:
    """Move the installation in `source` to `target`. The caller commits the connection's transaction.

    Raises:
        IncompatibleDatabase: `source` has no installation, a newer release has migrated it, a lease is unexpired
            (unless `although_leased`), `target` has tables with the same names, or the database role does not own the
            tables.
    """
    revision = find_revision(connection, source)
    if revision is None:
        raise IncompatibleDatabase(f"The schema {source!r} of the database has no tables of perdure to move.")
    if revision not in revisions:
        raise IncompatibleDatabase(
            f"A newer release of perdure has migrated the schema {source!r} to revision {revision}: move it with that "
            "release."
        )
    require_free(connection, target, revisions)
    create_schema(connection, target)
    found = _columns(connection, source)
    tables = sorted({*tables_at(revision, revisions), "alembic_version"} & found.keys())
    try:
        connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'"))
        for name in tables:
            connection.execute(text(f"ALTER TABLE {quoted(source)}.{quoted(name)} SET SCHEMA {quoted(target)}"))
        if not although_leased:  # the locks of ALTER TABLE prevent new leases after this check
            _require_no_lease(connection, target, [name for name in tables if "lease_until" in found[name]])
        for function in connection.scalars(_FUNCTIONS, {"schema": source, "names": _FUNCTION_NAMES}).all():
            connection.execute(text(f"ALTER FUNCTION {function} SET SCHEMA {quoted(target)}".replace(":", "\\:")))
    except DBAPIError as error:
        raise IncompatibleDatabase(
            f"The tables of perdure cannot be moved from the schema {source!r} to {target!r} "
            f"({first_line(str(error.orig))}): stop its processes, and run `perdure migrate` as the tables' owner."
        ) from error
    _grant_usage(connection, target)
    log.info("moved %d tables from the schema %s to %s", len(tables), source, target)


def _grant_usage(connection: Connection, schema: str) -> None:
    """Grant USAGE on `schema` to each role that has rights on its tables."""
    for role in connection.scalars(_GRANTEES, {"schema": schema}).all():
        connection.execute(text(f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {role}".replace(":", "\\:")))


def _require_no_lease(connection: Connection, schema: str, tables: list[str]) -> None:
    for name in tables:
        table = f"{quoted(schema)}.{quoted(name)}"
        if connection.scalar(text(f"SELECT EXISTS (SELECT FROM {table} WHERE lease_until > now())")):  # noqa: S608 (quoted)
            raise IncompatibleDatabase(
                "Workers are running on the tables that this migration moves, and cannot use them afterwards: stop all "
                "of perdure's processes, wait for their leases (30 s by default) to expire, and run `perdure migrate` "
                "again; `perdure migrate --move` does not wait for leases."
            )


def _version(connection: Connection, schema: str) -> str | None:
    version = connection.scalar(text(f"SELECT version_num FROM {quoted(schema)}.alembic_version"))  # noqa: S608 (quoted)
    return None if version is None else str(version)


def _columns(connection: Connection, schema: str) -> dict[str, set[str]]:
    """The tables of `schema` and their columns."""
    return {row.name: set(row.columns) for row in connection.execute(_COLUMNS, {"schema": schema})}


def _is_recognised(found: dict[str, set[str]]) -> bool:
    return all(columns <= found.get(name, set()) for name, columns in _RECOGNISED_BY.items())


def _role(connection: Connection) -> str:
    connection.rollback()
    return str(connection.scalar(text("SELECT current_user")))
