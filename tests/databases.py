"""Provides a database for each test: a copy of a migrated template database, emptied between tests.

Creating and dropping a copy takes longer than most tests, so copies are reused. After a test, `Databases` terminates
the connections to the test's copy and deletes the rows. Before the next use it renames the copy, so that a thread that
outlives the test finds no database. It drops the tables that the test created in the schema `public`, and truncates
perdure's tables if the test wrote many rows or analyzed them. It drops a whole copy only if the test changed perdure's
tables: creating a copy takes longer than ten tests.

A new connection takes longer than most tests, too, because the server must read its catalogues and plan every statement
again. Therefore, if no thread outlived a test, the test's `Database` is reused together with the copy. The `Database`
keeps its connections and prepared statements, and the copy keeps its name.

As in most installations, perdure's role is an ordinary one: it owns the database and its tables, but is no superuser,
and an administrator has installed the extension `vector`. Only this module, the tests of the schema (which install the
extension themselves) and tests that create roles use the administrator.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2 import OperationalError
from psycopg2.errors import ObjectInUse
from psycopg2.extensions import connection as Connection  # noqa: N812 (a class, by its name)
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import QueuePool

from perdure.database.engine import Database
from perdure.database.migrate import migrate
from perdure.database.tables import metadata

ADMINISTRATOR, ORDINARY = "perdure", "ordinary"
"""The name of the role with which the tests and the processes under test connect."""

_TEMPLATE = "template_perdure"
_UNFINISHED = "template_unfinished"
_ONE_AT_A_TIME = 0x74656D706C617465
"""Key of the advisory lock that a process holds while it creates the template."""

_MANY_ROWS = 2000
_MOST_CONNECTIONS = 6
_PATIENCE_S = 20.0

_CATALOGUE = """
    SELECT (SELECT (count(*), max(xmin::text::bigint)) FROM pg_class WHERE oid >= 16384),
        (SELECT (count(*), max(xmin::text::bigint)) FROM pg_attribute WHERE attrelid >= 16384),
        (SELECT (count(*), max(xmin::text::bigint)) FROM pg_constraint),
        (SELECT (count(*), max(xmin::text::bigint)) FROM pg_proc WHERE oid >= 16384),
        (SELECT (count(*), max(xmin::text::bigint)) FROM pg_trigger),
        (SELECT count(*) FROM pg_db_role_setting AS s JOIN pg_database AS d ON d.oid = s.setdatabase
         WHERE d.datname = current_database()),
        (SELECT count(*) FROM pg_class WHERE oid >= 16384 AND relkind = 'r' AND reltuples >= 0)
"""
"""Selects one row that changes whenever the tables, their functions or the database's settings change.

The row also changes when a table is analyzed for the first time. If the table is recorded as empty then, a plan always
scans the whole table.
"""

_USED = "SELECT relname FROM pg_class WHERE relname = ANY(%s) AND relkind = 'r' AND pg_relation_size(oid) > 0"
"""Selects the tables that ever had a row. `_emptied` skips the others, because the first access to a table is slow."""

_FILLED = """
    SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
    WHERE relnamespace = 'perdure'::regnamespace AND relkind = 'r' AND pg_relation_size(oid) > 0
        AND relname <> 'schema_compatibility' AND relname <> 'alembic_version'
"""
"""Selects the tables to truncate, as one list of names."""

_FORGET = """
    UPDATE pg_class SET relpages = 0, reltuples = -1, relallvisible = 0, relallfrozen = 0
    WHERE oid >= 16384 AND reltuples >= 0 AND relkind = 'r';
    DELETE FROM pg_statistic WHERE starelid >= 16384;
"""
"""Deletes what ANALYZE has recorded of perdure's tables."""

_FOREIGN = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
"""Selects the tables that the test created as an application's tables."""

_RESTART = """
    SELECT setval(seqrelid, 1, false) FROM pg_sequence WHERE pg_sequence_last_value(seqrelid) IS NOT NULL
"""
"""Restarts the sequences. The view `pg_sequences` would take three times as long."""

_OTHERS = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_get_activity(NULL)
    WHERE datid = (SELECT oid FROM pg_database WHERE datname = %s) AND pid <> pg_backend_pid() AND pid <> ALL (%s)
"""
"""Ends the other connections to a database. The view `pg_stat_activity` would take twice as long."""


@dataclass
class Copy:
    """A copy of the template.

    `kept` is a `Database` that the next test can reuse. `pids` contains the backend process ids of this
    `Database`'s connections.
    """

    name: str
    catalogue: Any
    kept: Database | None = None
    pids: set[int] = field(default_factory=set)


class Databases:
    """Creates and reuses copies of the template on one server. Several processes may share a template."""

    def __init__(self, server: URL, *, prepare: bool = True) -> None:
        self._prepare = prepare
        self._server = server.set(database="postgres")
        self._administrator = _connected(self._server)
        self._ordinary = server.set(username=ORDINARY)
        self._numbers = itertools.count(1)
        self._cold: deque[Copy] = deque()
        self._warm: deque[Copy] = deque()

    def close(self) -> None:
        """Close the connection to the maintenance database. The copies remain until the server is removed."""
        self._administrator.close()

    def administer(self, statement: str, *parameters: Any) -> Any:
        """Run a statement in the maintenance database. Returns the first row, or its value if it has one column."""
        return _run(self._administrator, statement, *parameters)

    def make_template(self) -> None:
        """Create the migrated template unless it exists.

        The new database gets the template's name after the migration. Therefore a database with this name is complete.
        """
        self.administer("SELECT pg_advisory_lock(%s)", str(_ONE_AT_A_TIME))
        admit_ordinary_role(self._server)  # also to a server that has stopped with the last process that used it
        if not self.administer("SELECT count(*) FROM pg_database WHERE datname = %s", _TEMPLATE):
            # No test kills this server. Tests of crashes use servers of their own, with synchronous commits.
            self.administer("ALTER SYSTEM SET synchronous_commit = off")
            self.administer("ALTER SYSTEM SET fsync = off")
            # On busy cores, autovacuum could record a table as empty during a test, or change plans that are tested.
            self.administer("ALTER SYSTEM SET autovacuum = off")
            self.administer("SELECT pg_reload_conf()")
            # `_emptied` disables foreign key checks with this parameter; perdure does not use it.
            self.administer(f"GRANT SET ON PARAMETER session_replication_role TO {ORDINARY}")
            if not self._prepare:
                # The tests' own statements have no `SET LOCAL search_path` before them.
                self.administer(f"ALTER ROLE {ORDINARY} SET search_path = perdure, public")
            self.administer(f"DROP DATABASE IF EXISTS {_UNFINISHED}")
            self._create(_UNFINISHED)
            migrate(self._ordinary.set(database=_UNFINISHED))
            self._alone(_UNFINISHED)
            self.administer(f"ALTER DATABASE {_UNFINISHED} RENAME TO {_TEMPLATE}")
        self.administer("SELECT pg_advisory_unlock(%s)", str(_ONE_AT_A_TIME))

    @contextmanager
    def one(self, *, warm: bool = False) -> Iterator[tuple[URL, Copy]]:
        """An empty, migrated database for the block. `warm`: prefer a copy that has a reusable `Database`."""
        copy = self._take(warm=warm)
        yield self._ordinary.set(database=copy.name), copy
        self._give_back(copy)

    def connected(self, copy: Copy) -> Database:
        """The `Database` that `keep` stored with the copy, or a new one if none is stored."""
        made, copy.kept = copy.kept, None
        if made is None:
            made = Database(self._ordinary.set(database=copy.name), prepare=self._prepare)

            @event.listens_for(made.engine, "connect")
            def _note(connection: Any, record: Any) -> None:
                copy.pids.add(connection.info.backend_pid)

        return made

    def keep(self, copy: Copy, database: Database) -> None:
        """Store `database` with the copy for reuse.

        If some connections of `database` are in use, or too many are open, `database` is closed instead.
        """
        pool = database.engine.pool
        assert isinstance(pool, QueuePool)
        if pool.checkedout() or pool.checkedin() > _MOST_CONNECTIONS:
            database.close()
        else:
            copy.kept = database

    @contextmanager
    def empty(self, *, bare: bool = False) -> Iterator[URL]:
        """A database without tables, which is dropped at the end of the block.

        `bare`: the URL has the administrator's role, and the extension `vector` is not installed.
        """
        name = f"empty_{os.getpid()}_{next(self._numbers)}"
        if bare:
            self.administer(f"CREATE DATABASE {name}")
        else:
            self._create(name)
        yield (self._server if bare else self._ordinary).set(database=name)
        self.administer(f"DROP DATABASE {name} WITH (FORCE)")

    def _create(self, name: str) -> None:
        """Create a database as an administrator does for perdure: the ordinary role owns it, `vector` is installed."""
        self.administer(f"CREATE DATABASE {name}")
        prepare_for_ordinary_role(self._server.set(database=name))

    def _take(self, *, warm: bool) -> Copy:
        if warm and self._warm:
            return self._warm.popleft()
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        if self._cold:
            copy = self._cold.popleft()
            self._rename(copy.name, name)
            copy.name = name
            return copy
        self.administer(f"CREATE DATABASE {name} OWNER {ORDINARY} TEMPLATE {_TEMPLATE} STRATEGY wal_log")
        connection = _connected(self._server.set(database=name))
        try:
            return Copy(name, _run(connection, _CATALOGUE))
        finally:
            connection.close()

    def _give_back(self, copy: Copy) -> None:
        if copy.kept is None:
            copy.pids.clear()
        self._alone(copy.name, copy.pids)
        if copy.kept is None:
            connection = _connected(self._server.set(database=copy.name))
            try:
                reusable = self._is_unchanged(connection, copy) and _emptied(connection)
            finally:
                connection.close()
        else:
            with copy.kept.engine.connect() as lent:
                driver: Any = lent.connection.driver_connection
                reusable = self._is_unchanged(driver, copy) and _emptied(driver)
        if reusable:
            (self._cold if copy.kept is None else self._warm).append(copy)
            return
        if copy.kept is not None:  # its connections have plans for the tables as they were
            copy.kept.close()
            copy.kept = None
            copy.pids.clear()
        if self._is_renewed(copy):
            self._cold.append(copy)
        else:
            self.administer(f"DROP DATABASE {copy.name} WITH (FORCE)")

    def _is_unchanged(self, connection: Connection, copy: Copy) -> bool:
        """Whether perdure's tables are those of the template. Drops other tables, as the administrator."""
        if _run(connection, _CATALOGUE) == copy.catalogue:
            return True
        administrator = _connected(self._server.set(database=copy.name))
        try:
            with administrator.cursor() as cursor:
                cursor.execute(_FOREIGN)
                if foreign := [name for (name,) in cursor.fetchall()]:
                    cursor.execute(f"DROP TABLE {', '.join(foreign)} CASCADE")
            return bool(_run(administrator, _CATALOGUE) == copy.catalogue)
        finally:
            administrator.close()

    def _is_renewed(self, copy: Copy) -> bool:
        """Truncate the tables and forget their statistics. Returns false if the test has changed more than these."""
        administrator = _connected(self._server.set(database=copy.name))
        try:
            if _run(administrator, _CATALOGUE)[:-1] != copy.catalogue[:-1]:
                return False
            if filled := _run(administrator, _FILLED):
                _run(administrator, f"TRUNCATE {filled} RESTART IDENTITY CASCADE")
            _run(administrator, _FORGET)
            copy.catalogue = _run(administrator, _CATALOGUE)
            return True
        finally:
            administrator.close()

    def _rename(self, former: str, name: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self._alone(former)
            try:
                self.administer(f"ALTER DATABASE {former} RENAME TO {name}")
            except ObjectInUse:  # a thread that outlived its test has connected again
                assert time.monotonic() < deadline, f"connections to {former} are opened again and again"
            else:
                return

    def _alone(self, name: str, known: Iterable[int] = ()) -> None:
        """Terminate the database's connections and wait for their end. The backend processes `known` keep running."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.administer(_OTHERS, name, [*known]):
            assert time.monotonic() < deadline, f"connections to {name} do not end"
            time.sleep(0.001)


def admit_ordinary_role(server: URL) -> None:
    """Create the ordinary role on an embedded server, and allow the role to log in. Idempotent.

    An embedded server allows only the administrator to log in, and each start of the server restores that.
    """
    administrator = _connected(server)
    if not _run(administrator, "SELECT count(*) FROM pg_roles WHERE rolname = %s", ORDINARY):
        _run(administrator, f"CREATE ROLE {ORDINARY} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE")
    rules = Path(_run(administrator, "SHOW hba_file"))
    present, rule = rules.read_text(encoding="utf-8"), f"local all {ORDINARY} trust\n"
    if rule not in present:
        rules.write_text(present + rule, encoding="utf-8")
        _run(administrator, "SELECT pg_reload_conf()")
    administrator.close()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            _connected(server.set(username=ORDINARY)).close()
        except OperationalError:  # the server has not read the rules yet
            assert time.monotonic() < deadline, "the ordinary role may not log in"
            time.sleep(0.01)
        else:
            return


def prepare_for_ordinary_role(url: URL) -> None:
    """As an administrator, make the ordinary role the owner of the database, and install the extension `vector`."""
    administrator = _connected(url)
    _run(administrator, f"ALTER DATABASE {url.database} OWNER TO {ORDINARY}")
    _run(administrator, "CREATE EXTENSION vector SCHEMA public")
    administrator.close()


def _emptied(connection: Connection) -> bool:
    """Delete all rows in one commit. Returns whether fewer than `_MANY_ROWS` rows were deleted."""
    with connection.cursor() as cursor:
        cursor.execute(_RESTART)
        cursor.execute(_USED, ([name for name in metadata.tables if name != "schema_compatibility"],))
        used = [name for (name,) in cursor.fetchall()]
        if not used:
            return True
        emptied = ", ".join(f"{name} AS (DELETE FROM {name} RETURNING 1)" for name in used)  # noqa: S608 (our own tables)
        rows = " + ".join(f"(SELECT count(*) FROM {name})" for name in used)  # noqa: S608
        cursor.execute("SET session_replication_role = replica")  # disables foreign key checks
        cursor.execute(f"WITH {emptied} SELECT {rows}")
        row = cursor.fetchone()
        cursor.execute("RESET session_replication_role")  # a reused connection needs the triggers
        assert row is not None
        return bool(row[0] < _MANY_ROWS)


def _connected(url: URL) -> Connection:
    dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
    connection = psycopg2.connect(dsn, options="-c search_path=perdure")
    connection.autocommit = True
    return connection


def _run(connection: Connection, statement: str, *parameters: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        row = cursor.fetchone() if cursor.description else None
        return None if row is None else row[0] if len(row) == 1 else row


def engine_of(url: URL | str, schema: str = "perdure", **options: Any) -> Engine:
    """An engine for a test's own statements. Its connections have the search path `schema`, `public`."""
    return create_engine(
        make_url(url).update_query_dict({"options": f"-c search_path={schema},public"}, append=True), **options
    )
