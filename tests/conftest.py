"""What every test may ask for: its own database, a Redis, a clock to move, a runtime.

One PostgreSQL and one Redis run for the whole suite. The tables are migrated once into a
template; a test's database is a copy of it, gone afterwards. Each test process (pytest-xdist)
has servers of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import hypothesis
import psycopg2
import pytest
import redis as redis_py
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DisconnectionError

from perdure.agents import Agents
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.database.migrate import migrate
from perdure.models.resolve import Models
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.snapshots.postgres import PostgresSnapshots
from workers.embedded.redis import client_url
from workers.embedded.throwaway import Servers, servers

_numbers = itertools.count(1)

# A loaded machine is no failure: what an example may take is bounded by the test's own timeout.
hypothesis.settings.register_profile("perdure", deadline=None)
hypothesis.settings.load_profile("perdure")


class RecordingWaker:
    """A waker that remembers what it was asked, and refuses while `away`."""

    def __init__(self) -> None:
        self.sessions: list[UUID] = []
        self.deliveries: list[UUID] = []
        self.endings: list[UUID] = []
        self.consolidations: list[UUID | None] = []
        self.away = False

    def session(self, session_id: UUID, priority: int) -> bool:
        """Remember the session."""
        if not self.away:
            self.sessions.append(session_id)
        return not self.away

    def delivery(self, delivery_id: UUID) -> bool:
        """Remember the delivery."""
        if not self.away:
            self.deliveries.append(delivery_id)
        return not self.away

    def ending(self, session_id: UUID) -> bool:
        """Remember the session."""
        if not self.away:
            self.endings.append(session_id)
        return not self.away

    def consolidation(self, session_id: UUID | None) -> bool:
        """Remember the session."""
        if not self.away:
            self.consolidations.append(session_id)
        return not self.away


@pytest.fixture(scope="session")
def embedded() -> Iterator[Servers]:
    """The suite's servers."""
    with servers() as running:
        yield running


@pytest.fixture(scope="session")
def template(embedded: Servers) -> URL:
    """A database that has the tables, and that nobody is connected to."""
    url = make_url(embedded.postgres.url)
    _administer(url, "CREATE DATABASE template_perdure")
    migrate(url.set(database="template_perdure"))
    return url.set(database="template_perdure")


@pytest.fixture
def database_url(template: URL) -> Iterator[str]:
    """A fresh database with the tables and nothing in them."""
    name = f"test_{next(_numbers)}"
    _administer(template, f"CREATE DATABASE {name} TEMPLATE template_perdure STRATEGY wal_log")
    yield template.set(database=name).render_as_string(hide_password=False)
    _administer(template, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def redis_url(embedded: Servers) -> str:
    """The suite's Redis, emptied, in kombu's spelling."""
    client = redis_py.Redis.from_url(client_url(embedded.redis.url))
    client.flushall()
    client.close()
    return embedded.redis.url


@pytest.fixture
def clock() -> MovedClock:
    """A clock that the test moves; the database of the test follows it."""
    return MovedClock()


@pytest.fixture
def database(database_url: str, clock: MovedClock) -> Iterator[Database]:
    """The test's database, whose `perdure_now()` follows the test's clock."""
    made = Database(database_url)

    @event.listens_for(made.engine, "checkout")
    def _move(connection: Any, record: Any, proxy: Any) -> None:
        if record.info.get("clock_offset") == clock.offset:
            return
        try:
            with connection.cursor() as cursor:
                offset = str(clock.offset.total_seconds())
                cursor.execute("SELECT set_config('perdure.clock_offset', %s, false)", [offset])
            if not connection.autocommit:
                connection.commit()
        except psycopg2.OperationalError as error:
            raise DisconnectionError("this connection has died in the pool") from error
        record.info["clock_offset"] = clock.offset

    yield made
    made.close()


@pytest.fixture
def settings() -> Settings:
    """The defaults, whatever the environment says."""
    return Settings(_env_file=None)


@pytest.fixture
def waker() -> RecordingWaker:
    """A waker that remembers."""
    return RecordingWaker()


@pytest.fixture
def agents() -> Agents:
    """The built-in agent. A test module that needs others overrides this."""
    return Agents.from_module("perdure.builtin")


@pytest.fixture
def runtime(
    settings: Settings, clock: MovedClock, database: Database, agents: Agents, waker: RecordingWaker
) -> Runtime:
    """The parts of one process, with the offline model unless a test's agent says otherwise."""
    return Runtime(settings, clock, database, agents, Models(settings, clock).get, waker, PostgresSnapshots(database))


def _administer(url: URL, statement: str) -> None:
    engine = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()
