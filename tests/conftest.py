"""Fixtures for all tests: a database per test, a Redis, a clock that tests move, a runtime.

All test processes (pytest-xdist) share one PostgreSQL. The first process starts it and migrates
the template from which all databases are copied. The last process stops the server. Each test
process has its own Redis, because Redis starts quickly.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import hypothesis
import psycopg2
import pytest
import redis as redis_py
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DisconnectionError

from perdure.agents import Agents
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.models.resolve import Models
from perdure.runtime import Runtime
from perdure.servers import postgres, redis
from perdure.settings import Settings
from perdure.snapshots.postgres import PostgresSnapshots
from tests.databases import ORDINARY, Copy, Databases
from tests.tls import Authority

LONG_LIMIT_S = 480

_SECONDS = {"processes": 3.0, "servers": 2.0, "examples": 2.0, "cli": 1.0}
"""Seconds for one test in each folder with processes, to order the files. A test in another folder takes 0.1 s."""

_LONG_SECONDS = 4.0
"""Seconds for one test with the mark `long` or `exhaustive` that is not a mere variant."""

_LONGEST_SECONDS = {"cli/test_schema.py": 90.0, "cli/test_up.py": 60.0, "turns/test_plans.py": 30.0}
"""Seconds for one test with this mark in the files that have few tests and take long."""

_shared = pytest.StashKey[Path]()

# Examples have no deadline, because a slow machine would exceed it. Each test has its own timeout.
for name, most in (("test", 15), ("check", 30), ("exhaustive", 150)):
    hypothesis.settings.register_profile(name, deadline=None, max_examples=most)

# Background jobs of a shell script ignore SIGINT. A process that a test starts would inherit this from the test, and
# ignore the test's SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--unprepared`, which runs the tests without prepared statements, as behind a pooler in transaction mode."""
    parser.addoption("--unprepared", action="store_true", help="run with PERDURE_DATABASE_PREPARE=false")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the test processes' shared directory and hypothesis's profile, which is named like a target of `make`."""
    given = getattr(config, "workerinput", {}).get("shared")
    config.stash[_shared] = Path(given or tempfile.mkdtemp(prefix="perdure-"))
    if given is None:
        # A client with TLS reads all trusted authorities, which takes 20 ms. No test connects to a public server, so
        # one authority is enough. The test processes and the processes that tests start inherit the variable.
        os.environ["SSL_CERT_FILE"] = str(Authority(config.stash[_shared], "nobody").file)
    left_out = config.option.markexpr
    profile = "test" if "not long" in left_out else "check" if "not exhaustive" in left_out else "exhaustive"
    hypothesis.settings.load_profile(profile)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the shared directory to a test process."""
    node.workerinput["shared"] = str(node.config.stash[_shared])


def pytest_unconfigure(config: pytest.Config) -> None:
    """In the main process, stop a PostgreSQL that a killed test process left, and remove the shared directory."""
    if hasattr(config, "workerinput"):
        return
    left = config.stash[_shared] / "postgres"
    if postgres.find(left) is not None:
        postgres.start(left).stop()
    shutil.rmtree(config.stash[_shared])


def shared_directory(config: pytest.Config) -> Path:
    """The directory shared by the test processes. It contains the suite's PostgreSQL."""
    return config.stash[_shared]


class RecordingWaker:
    """A waker that records each wake-up. While `away` is set, each call records nothing and returns `False`."""

    def __init__(self) -> None:
        self.sessions: list[UUID] = []
        self.deliveries: list[UUID] = []
        self.endings: list[UUID] = []
        self.consolidations: list[UUID | None] = []
        self.casebanks = 0
        self.away = False
        self.enough = False
        """What `has_enough` returns. While it is set, `drain` records nothing."""

    def drain(self, session_id: UUID, priority: int) -> bool:
        """Record the session, unless there are enough wake-ups."""
        return self.has_enough() or self.session(session_id, priority)

    def has_enough(self) -> bool:
        """Whether the test has set `enough`, and the broker is not away."""
        return self.enough and not self.away

    def session(self, session_id: UUID, priority: int) -> bool:
        """Record the session."""
        if not self.away:
            self.sessions.append(session_id)
        return not self.away

    def delivery(self, delivery_id: UUID) -> bool:
        """Record the delivery."""
        if not self.away:
            self.deliveries.append(delivery_id)
        return not self.away

    def ending(self, session_id: UUID) -> bool:
        """Record the session."""
        if not self.away:
            self.endings.append(session_id)
        return not self.away

    def consolidation(self, session_id: UUID | None) -> bool:
        """Record the session id, which may be `None`."""
        if not self.away:
            self.consolidations.append(session_id)
        return not self.away

    def casebank(self) -> bool:
        """Count the wake-up."""
        self.casebanks += not self.away
        return not self.away


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that only `make check` or `make exhaustive` runs, and run the files that take longest first.

    If one of these files ran last, the other test processes would be idle. A long test has four times the time limit of
    others, since a busy machine slows it most.

    With `--unprepared`, no test runs that uses no database, since none of its statements could be prepared.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    long = {item for item in items if item.get_closest_marker("long") or item.get_closest_marker("exhaustive")}
    for item in long:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_LIMIT_S))
    # With `--last-failed`, only the failed variants were collected, so the first one is not the first.
    for given in () if config.getoption("lf", default=False) else variants.values():
        _mark_variants(given)
    seconds: dict[Path, float] = {}
    left_out = [each for each in ("long", "exhaustive") if f"not {each}" in config.option.markexpr]
    for item in items:
        if not any(item.get_closest_marker(each) for each in left_out):
            seconds[item.path] = seconds.get(item.path, 0.0) + _estimated(item, long=item in long)
    if config.getoption("unprepared"):
        needless = [item for item in items if "databases" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=needless)
        items[:] = [item for item in items if item not in set(needless)]
    items.sort(key=lambda item: -seconds.get(item.path, 0.0))


def _mark_variants(variants: Sequence[pytest.Item]) -> None:
    """Mark a test's variants, unless the test itself says which of them are long.

    `make test` runs the first variant, and `make check` the last one, too. If the test itself is long, `make check` has
    only the first variant.
    """
    marked = [each for each in variants if each.get_closest_marker("long") or each.get_closest_marker("exhaustive")]
    if len(marked) in (0, len(variants)):
        first = next((n for n, each in enumerate(variants) if not each.get_closest_marker("exhaustive")), 0)
        chosen = {first} if marked else {0, len(variants) - 1}
        for number, each in enumerate(variants):
            if number not in chosen:
                each.add_marker(pytest.mark.exhaustive)
            elif number:
                each.add_marker(pytest.mark.long)
    for each in variants:
        if each.get_closest_marker("exhaustive"):
            each.add_marker(pytest.mark.long)


def _estimated(item: pytest.Item, *, long: bool) -> float:
    """The seconds that the test may take. `long`: it is long, and no mere variant."""
    if long:
        return _LONGEST_SECONDS.get(f"{item.path.parent.name}/{item.path.name}", _LONG_SECONDS)
    return _SECONDS.get(item.path.parent.name, 0.1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Exempt the collected tests and their modules from garbage collection. They are most objects of the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def databases(pytestconfig: pytest.Config) -> Iterator[Databases]:
    """A source of databases on the suite's PostgreSQL."""
    with postgres.start(pytestconfig.stash[_shared] / "postgres") as server:
        made = Databases(make_url(server.url), prepare=not pytestconfig.getoption("unprepared"))
        made.make_template()
        yield made
        made.close()


@pytest.fixture
def database_copy(databases: Databases, request: pytest.FixtureRequest) -> Iterator[tuple[URL, Copy]]:
    """A migrated, empty database."""
    with databases.one(warm="database" in request.fixturenames) as one:
        yield one


@pytest.fixture
def database_url(database_copy: tuple[URL, Copy]) -> str:
    """The URL of the test's database."""
    return database_copy[0].render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def embedded_redis() -> Iterator[str]:
    """The URL of this test process's Redis."""
    with tempfile.TemporaryDirectory(prefix="perdure-") as directory, redis.start(Path(directory)) as server:
        yield server.url


@pytest.fixture
def redis_url(embedded_redis: str) -> str:
    """The URL of an empty Redis, in the form that kombu accepts."""
    client = redis_py.Redis.from_url(redis.client_url(embedded_redis))
    client.flushall()
    client.close()
    return embedded_redis


@pytest.fixture
def clock() -> MovedClock:
    """A clock that the test moves. The test's database uses the time of this clock."""
    return MovedClock()


@pytest.fixture
def database(databases: Databases, database_copy: tuple[URL, Copy], clock: MovedClock) -> Iterator[Database]:
    """The test's database, whose `perdure_now()` follows the test's clock."""
    _, copy = database_copy
    before = set(threading.enumerate())
    made = databases.connected(copy)
    parts = dict(vars(made))

    def move(connection: Any, record: Any, proxy: Any) -> None:
        if record.info.get("clock") == (clock, clock.offset):
            return
        try:
            with connection.cursor() as cursor:
                if record.info.get("clock", (clock,))[0] is not clock:  # an earlier test used this connection
                    cursor.execute("RESET ALL; UNLISTEN *; DISCARD TEMP; SELECT pg_advisory_unlock_all()")
                offset = str(clock.offset.total_seconds())
                cursor.execute("SELECT set_config('perdure.clock_offset', %s, false)", [offset])
            if not connection.autocommit:
                connection.commit()
        except psycopg2.OperationalError as error:
            raise DisconnectionError("this connection has died in the pool") from error
        record.info["clock"] = clock, clock.offset

    event.listen(made.engine, "checkout", move)
    yield made
    event.remove(made.engine, "checkout", move)
    made.observe = None
    if vars(made) == parts and set(threading.enumerate()) <= before:
        databases.keep(copy, made)
    else:
        made.close()


@pytest.fixture
def prepared(pytestconfig: pytest.Config) -> None:
    """With `--unprepared`, skip the test, because it identifies statements by their prepared names."""
    if pytestconfig.getoption("unprepared"):
        pytest.skip("statements have no names")


@pytest.fixture
def settings() -> Settings:
    """The default settings, without `.env`."""
    return _settings(tuple(each for each in os.environ.items() if each[0].upper().startswith("PERDURE_")))


@cache
def _settings(_environment: tuple[tuple[str, str], ...]) -> Settings:
    """Reading the settings takes longer than many a test. They are frozen, so tests can share them."""
    return Settings(_env_file=None)


@pytest.fixture
def waker() -> RecordingWaker:
    """A waker that publishes nothing and records each wake-up."""
    return RecordingWaker()


@pytest.fixture
def agents() -> Agents:
    """The built-in agent. A test module that needs other agents overrides this fixture."""
    return Agents.from_module("perdure.builtin")


@pytest.fixture
def runtime(
    settings: Settings, clock: MovedClock, database: Database, agents: Agents, waker: RecordingWaker
) -> Runtime:
    """The runtime of one process. An agent that names no model uses the offline model."""
    return Runtime(settings, clock, database, agents, Models(settings, clock).get, waker, PostgresSnapshots(database))


@pytest.fixture
def granted(databases: Databases, database: Database) -> Iterator[Database]:
    """Connections of a role that owns nothing: it may only read and write the rows of perdure's tables."""
    role = f"granted_only_{uuid4().hex}"  # tests that run at the same time share the server
    databases.administer(f"CREATE ROLE {role} LOGIN ROLE {ORDINARY}")
    with database.engine.connect() as connection:
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA perdure TO {role}")
        connection.exec_driver_sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA perdure TO {role}")
        connection.exec_driver_sql(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA perdure TO {role}")
    made = Database(database.url.update_query_dict({"options": f"-c role={role}"}))
    yield made
    made.close()
    with database.engine.connect() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {role}")
    databases.administer(f"DROP ROLE {role}")
