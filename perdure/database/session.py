"""The server settings of perdure's connections, which do not depend on those of the role, the database or libpq.

A role or a database may have defaults that perdure's statements are not written for: an isolation level at which
concurrent statements fail, read-only transactions, another encoding, time limits for statements. perdure replaces them
on each of its connections:

- `connect_arguments` has the settings as startup options, which cost no round trip.
- `local` has them as statements for the start of a transaction. Behind a pooler in transaction mode, startup options do
  not reach the server, and the next transaction may run on another server connection.
- `maintenance_engine` is for migrations and grants, which set their own time limits and `search_path`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine, make_url

from perdure.database.schema import quoted

_CONNECT_TIMEOUT_S = 5
LOCK_TIMEOUT_S = 2

_SEARCH_WIDTH = 200
"""The value of pgvector's `hnsw.ef_search`. With this value, a search finds 98% of the ten nearest among 100,000
vectors of similar sentences. A search for one user's rows scans further until it has found enough rows, or has reached
`hnsw.max_scan_tuples` (20,000). For a user who owns half of all rows, the first scan suffices.
"""

_ONE_PLAN = {"plan_cache_mode": "force_generic_plan"}
"""Prepared statements are written for plans that hold for all parameters. By default, PostgreSQL compares the estimated
costs of such a plan with those of plans for single executions, and plans a message's acceptance at each execution once
the tables are large, which takes four times as long as executing it.
"""

_ENCODED = {"client_encoding": "UTF8"}
"""The driver's argument for the encoding. It takes precedence over the URL, `PGCLIENTENCODING` and the role."""

_WRITABLE = {"default_transaction_read_only": "off"}

_UNTIMED = {"statement_timeout": "0", "idle_session_timeout": "0"}
"""A role's time limits for web requests must not end an erasure or a pooled connection."""

_FIXED = {
    "default_transaction_isolation": "read committed",
    "standard_conforming_strings": "on",
    "DateStyle": "ISO",
    "TimeZone": "UTC",
}
"""Settings that decide what perdure's statements, the functions of its tables and the driver's answers mean.

The driver returns each time with the offset of `TimeZone`, and answers show it. Dates are taken from such times.
"""

_OF_SESSIONS = ("default_", "idle_session", "plan_cache")
"""Prefixes of the settings that have no effect on a transaction that has begun, or on unprepared statements."""

_LOCAL_TRANSACTION = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; "
"""Replaces the `default_transaction_*` settings, which a transaction reads when it begins."""

_SET_IF_KNOWN = """
    SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted (name, value)
    WHERE current_setting(name, true) IS NOT NULL
"""
"""PostgreSQL before 17 has no `transaction_timeout`."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of one database's connections. The `options` of the URL may override `defaults`, but not `fixed`."""

    defaults: Mapping[str, str]
    fixed: Mapping[str, str]

    @classmethod
    def of(cls, schema: str, lease_s: float) -> ServerSettings:
        """The settings for tables in `schema`.

        `idle_in_transaction_session_timeout` makes a paused client lose its locks within a third of the lease.
        """
        defaults = {
            "idle_in_transaction_session_timeout": str(int(min(lease_s / 3, 10) * 1000)),
            "lock_timeout": str(LOCK_TIMEOUT_S * 1000),
            "hnsw.iterative_scan": "relaxed_order",
            "hnsw.ef_search": str(_SEARCH_WIDTH),
            **_UNTIMED,
            **_WRITABLE,
            **_ONE_PLAN,
        }
        return cls(defaults, {**_FIXED, "search_path": quoted(schema)})

    def local(self) -> str:
        """SQL that makes the settings until the end of a transaction, to be followed by its first statement."""
        settings = {**self.defaults, **self.fixed}.items()
        sets = (f"SET LOCAL {name} = {value}; " for name, value in settings if not name.startswith(_OF_SESSIONS))
        return _LOCAL_TRANSACTION + "".join(sets)

    def options(self, given: str) -> str:
        """The settings as startup options, with those `given` by the URL."""
        return " ".join(filter(None, [*_as_options(self.defaults), given, *_as_options(self.fixed)]))


def connect_arguments(url: URL, settings: ServerSettings | None) -> dict[str, Any]:
    """The driver's arguments. Without `settings`, the only startup options are those of the URL."""
    given = url.query.get("options", ())
    text = given if isinstance(given, str) else " ".join(given)
    options = text if settings is None else settings.options(text)
    return {
        **({"options": options} if options else {}),
        **_ENCODED,
        "application_name": "perdure",
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }


def with_driver(url: str | URL) -> URL:
    """`url` with the driver psycopg2, since SQLAlchemy may have another default driver for `postgresql://`."""
    return make_url(url).set(drivername="postgresql+psycopg2")


def maintenance_engine(url: str | URL) -> Engine:
    """An engine for migrations and grants. Each connection makes the settings by a statement, after it has begun."""
    engine = create_engine(with_driver(url), isolation_level="READ COMMITTED", connect_args=_ENCODED)

    @event.listens_for(engine, "connect")
    def _set(connection: Any, _: object) -> None:
        settings = {**_UNTIMED, "transaction_timeout": "0", **_WRITABLE, **_FIXED}
        with connection.cursor() as cursor:
            cursor.execute(_SET_IF_KNOWN, (list(settings), list(settings.values())))
        connection.commit()

    return engine


def _as_options(settings: Mapping[str, str]) -> list[str]:
    return [f"-c {name}={_escaped(value)}" for name, value in settings.items()]


def _escaped(value: str) -> str:
    return "".join(f"\\{letter}" if letter == "\\" or letter.isspace() else letter for letter in value)
