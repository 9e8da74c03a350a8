"""Snapshots in one SQLite file, for any number of threads and processes on one machine.

Each change is a transaction that holds the file's write lock from its beginning, so that comparing the version and
writing the snapshot are atomic. Each commit syncs the file (WAL, synchronous FULL). A writer waits at most two seconds
for the lock. If a process is suspended during a save, other writers fail until that process continues or dies.

Each process has one connection for writing and one for reading, so a load does not wait for a save. Only one thread at
a time uses a connection.

The store sets a damaged row aside. It leaves a damaged file in place, because other processes may have the file open.
The operator must replace the file.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from perdure.errors import InvalidRequest
from perdure.snapshots.codec import dump
from perdure.snapshots.snapshot import AgentSnapshot
from perdure.snapshots.store import (
    SnapshotUnavailable,
    Stored,
    Version,
    parse_stored,
    refuse_stale,
    report_set_aside,
    version_of,
)
from perdure.text.untrusted import first_line

_WAIT_S = 2.0
_QUEUE_S = 10.0
"""Maximum wait for a connection that other threads use. Each of these threads may wait `_WAIT_S` for the file."""
_TRIES = 20
_COLUMNS = "(agent_id TEXT PRIMARY KEY, token INTEGER NOT NULL, tick INTEGER NOT NULL, snapshot TEXT NOT NULL)"
_PRIMARY = 0xFF
"""Masks the primary part of an extended result code."""
_SET_UP = (
    f"PRAGMA busy_timeout = {int(_WAIT_S * 1000)}",
    "PRAGMA synchronous = FULL",
    "PRAGMA secure_delete = ON",  # else deleted data stays in the file's free pages
    f"CREATE TABLE IF NOT EXISTS snapshots {_COLUMNS}",
    f"CREATE TABLE IF NOT EXISTS set_aside {_COLUMNS}",
)
# Reads the snapshot as bytes, so that invalid UTF-8 is reported by `parse_stored` and not by `sqlite3`.
_READ = "SELECT token, tick, CAST(snapshot AS BLOB) FROM snapshots WHERE agent_id = ?"
_WRITE = "INSERT OR REPLACE INTO snapshots (agent_id, token, tick, snapshot) VALUES (?, ?, ?, ?)"
_KEEP = "INSERT OR REPLACE INTO set_aside SELECT * FROM snapshots WHERE agent_id = ?"

_Row = tuple[object, object, object]


class SqliteSnapshots:
    """The snapshots in the file `path`. The first use creates a missing file, but not a missing directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"sqlite:///{path}"
        self._reading = _Connection(path, self.name)
        self._writing = _Connection(path, self.name)

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        text = dump(snapshot)
        offered = version_of(snapshot, token)
        agent_id = snapshot.agent_id
        with self._transaction() as connection:
            row = _row(connection, agent_id)
            if row is not None and _version(row) is None:
                self._keep(connection, agent_id, "its version cannot be read")
            refuse_stale(agent_id, offered, _version(row))
            connection.execute(_WRITE, (str(agent_id), offered.token, offered.tick, text))

    def load(self, agent_id: UUID) -> Stored | None:
        with self._reading.used() as connection:
            row = _row(connection, agent_id)
        while row is not None:
            try:
                return _stored(row, agent_id)
            except InvalidRequest as error:
                row = self._replaced(agent_id, row, error.message)
        return None

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """See `SnapshotStore.set_aside`; moves the row to the table `set_aside`."""
        with self._transaction() as connection:
            stored = _version(_row(connection, agent_id))
            if stored is not None and stored <= upto:
                self._keep(connection, agent_id, reason)

    def delete(self, agent_id: UUID) -> None:
        with self._transaction() as connection:
            for table in ("snapshots", "set_aside"):
                connection.execute(f"DELETE FROM {table} WHERE agent_id = ?", (str(agent_id),))  # noqa: S608 (ours)
        # Without a checkpoint, the WAL keeps the deleted data. SQLite skips the checkpoint while another process reads.
        with self._writing.used() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        self._reading.close()
        self._writing.close()

    def _replaced(self, agent_id: UUID, damaged: _Row, reason: str) -> _Row | None:
        """Set the row `damaged` aside, unless another row has replaced it; returns the replacement, if any."""
        with self._transaction() as connection:
            now = _row(connection, agent_id)
            if now != damaged:
                return now
            self._keep(connection, agent_id, reason)
            return None

    def _keep(self, connection: sqlite3.Connection, agent_id: UUID, reason: str) -> None:
        connection.execute(_KEEP, (str(agent_id),))
        connection.execute("DELETE FROM snapshots WHERE agent_id = ?", (str(agent_id),))
        report_set_aside(self.name, agent_id, "a row of the table set_aside", reason)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing.used() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")


class _Connection:
    """A connection to the file, opened on first use, for one thread at a time."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection to the calling thread exclusively. An SQLite error closes the connection.

        Raises:
            SnapshotUnavailable: the file cannot be used.
        """
        if not self._lock.acquire(timeout=_QUEUE_S):
            raise SnapshotUnavailable(self._name, "other threads keep it busy", "Try again, or use another store.")
        try:
            yield self._connected()
        except sqlite3.Error as error:
            self._disconnect()
            raise SnapshotUnavailable(self._name, first_line(str(error)), _remedy(error)) from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Wait until no thread uses the connection, then close it."""
        with self._lock:
            self._disconnect()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(
                self._path, timeout=_WAIT_S / _TRIES, isolation_level=None, check_same_thread=False
            )
            _write_ahead(self._connection)
            for statement in _SET_UP:
                self._connection.execute(statement)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch a new file to WAL. Retries, because SQLite may fail while another process switches the file."""
    for _ in range(_TRIES - 1):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY:
                raise
        else:
            return
    connection.execute("PRAGMA journal_mode = WAL")


def _row(connection: sqlite3.Connection, agent_id: UUID) -> _Row | None:
    row: _Row | None = connection.execute(_READ, (str(agent_id),)).fetchone()
    return row


def _version(row: _Row | None) -> Version | None:
    """The row's version; `None` if there is no row, or if its token or tick is not an integer.

    A column of SQLite accepts values of any type.
    """
    match row:
        case (int(token), int(tick), _):
            return Version(token, tick)
        case _:
            return None


def _stored(row: _Row, agent_id: UUID) -> Stored:
    version, data = _version(row), row[2]
    if version is None or not isinstance(data, bytes):
        raise InvalidRequest("The snapshot cannot be read: a column is of another type.")
    return parse_stored(data, agent_id, version)


def _remedy(error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorcode", 0) & _PRIMARY:
        case sqlite3.SQLITE_FULL:
            return "Make room on its disk."
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return "Its directory must exist, and perdure's account must be able to write there."
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "Another process holds it: try again, and look for one that was stopped."
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return "Stop the workers and move the file away: they begin with a new one and lose nothing."
        case _:
            return "Check its disk, or set PERDURE_SNAPSHOTS to another store."
