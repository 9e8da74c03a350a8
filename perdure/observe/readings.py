"""Reads the condition of an installation from PostgreSQL and Redis, for the metrics and `perdure status`.

Each reading stands alone: one that fails is missing and named in `Readings.failed`, and the others are read. A reading
takes at most `LIMIT_S` seconds on the server. `Latest` reads again only after some seconds, one caller at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import Row

from perdure.clock import Clock
from perdure.database.engine import Database, Statement
from perdure.errors import PerdureError, Unavailable, loggable
from perdure.ids import first_id
from perdure.observe import queries
from perdure.observe.disks import DiskState
from perdure.observe.presence import GONE_S, Running, read_processes
from perdure.observe.servers import BrokerState, RedisServer, RedisState, broker_state
from perdure.resilience.registry import Metrics, Switchboard
from perdure.timetable.entry import ScheduleEntry
from perdure.timetable.reading import EntryStatus, read_schedules

log = logging.getLogger(__name__)

MOST = 10_000
"""The most rows that one number counts. A number that equals it means this many or more."""

_FIRST = 10
"""How many sessions of each range are asked for the age of their oldest turn."""

LIMIT_S = 2.0

_LOST_S = 3_600.0

LATELY = timedelta(hours=1)
"""The time for which failed turns are counted, from their acceptance."""

SWEEPS = ("turns", "schedules", "erasures", "files", "statistics", "memory indexes", "case indexes")
"""The sweeps that have a due time: the sweeper's rounds, and the duties of `perdure.workers.upkeep`."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of rows, and the age of the oldest in seconds (`None`: there is none)."""

    number: int
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class Counted:
    """A number of rows with the same labels."""

    labels: tuple[str, ...]
    number: int


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of PostgreSQL, which answers and accepts writes."""

    size_bytes: int
    oldest_transaction_s: float
    connections: int
    max_connections: int


@dataclass(frozen=True)
class Readings:
    """What was read. A member is `None` or empty if its reading failed.

    Attributes:
        due: The sessions whose turn may run and that no worker holds, by priority.
        amounts: The numbers of the statement `observe.amounts`, by their names.
        unsettled: Turns by agent and status.
        failures: Turns accepted within `LATELY` that failed, by agent and error code.
        parked: Sessions whose turn waits for a model, by model.
        sweeps: By how many seconds each sweep is late.
        schedules: By how many seconds the newest slot of each entry is late.
        processes: The workers and beats.
        failed: The readings that failed, each with the reason.
    """

    due: Mapping[int, Amount] = field(default_factory=dict)
    amounts: Mapping[str, Amount] = field(default_factory=dict)
    unsettled: Sequence[Counted] = ()
    failures: Sequence[Counted] = ()
    parked: Sequence[Counted] = ()
    sweeps: Mapping[str, float] = field(default_factory=dict)
    schedules: Mapping[str, float] = field(default_factory=dict)
    processes: Sequence[Running] = ()
    intake_closed: bool | None = None
    server: ServerState | None = None
    breakers: Sequence[Metrics] = ()
    broker: BrokerState | None = None
    redis: Sequence[RedisState] = ()
    disks: Sequence[DiskState] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the reading `name` succeeded. If `server` has failed, the others were not tried."""
        return not self.failed.keys() & {name, "server"}

    @property
    def workers(self) -> list[Running]:
        """The workers that run turns and are alive. Says nothing unless `has("processes")`."""
        return [each for each in self.processes if each.runs_turns and each.is_alive]

    @property
    def lost(self) -> list[Running]:
        """The processes that stopped reporting within the last hour: they were killed, or hang."""
        return [each for each in self.processes if not each.is_alive and not each.stopped and each.seen_s < _LOST_S]


class Source:
    """Where the readings come from.

    Args:
        servers: The Redis servers whose state is read.
        broker_reachable: Returns whether the broker can be reached. A call may block for about a second.
        disks: Reads the disks, given the size of the database.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        entries: Sequence[ScheduleEntry] = (),
        servers: Sequence[RedisServer] = (),
        breakers: Switchboard | None = None,
        *,
        broker_reachable: Callable[[], bool] | None = None,
        disks: Callable[[int | None], Sequence[DiskState]] = lambda _: (),
    ) -> None:
        self._database = database
        self._clock = clock
        self._entries = entries
        self.servers = servers
        self._breakers = breakers
        self._broker_reachable = broker_reachable
        self._disks = disks
        self._read_at: float | None = None
        self._lost_at: float | None = None
        self._outage: tuple[float, float] | None = None

    def read(self) -> Readings:
        """Read all. Never raises."""
        failed: dict[str, str] = {}

        def tried(name: str, read: Callable[[], Result], otherwise: Result) -> Result:
            if "server" in failed:  # PostgreSQL cannot be reached: each further reading would wait for it
                return otherwise
            try:
                return read()
            except Exception as error:
                log.warning("the reading %r failed: %s", name, loggable(error), exc_info=not _is_expected(error))
                failed[name] = _said(error)
                return otherwise

        server = tried("server", self._server, None)
        self._follow_outage(is_over=server is not None)
        return Readings(
            due=tried("due", self._due, {}),
            amounts=tried("amounts", self._amounts, {}),
            unsettled=tried("unsettled", lambda: self._counted(queries.UNSETTLED, "agent", "status"), ()),
            failures=tried("failures", self._failures, ()),
            parked=tried("parked", lambda: self._counted(queries.PARKED, "model"), ()),
            sweeps=tried("sweeps", self._sweeps, {}),
            schedules=tried("schedules", self._schedules, {}),
            processes=tried("processes", self._processes, ()),
            intake_closed=tried("intake", lambda: bool(self._run(queries.INTAKE)[0].closed), None),
            server=server,
            breakers=tried("breakers", lambda: self._breakers.list() if self._breakers else (), ()),
            broker=None if self._broker_reachable is None else broker_state(self._broker_reachable),
            redis=[each.read() for each in self.servers],
            disks=tried("disks", lambda: self._disks(None if server is None else server.size_bytes), ()),
            failed=failed,
        )

    def _follow_outage(self, *, is_over: bool) -> None:
        """Keep when PostgreSQL was read last before its last outage, and first after it."""
        now = self._clock.monotonic()
        if is_over and self._lost_at is not None:
            self._outage, self._lost_at = (self._lost_at, now), None
        elif not is_over and self._lost_at is None:
            self._lost_at = now if self._read_at is None else self._read_at
        if is_over:
            self._read_at = now

    def _processes(self) -> list[Running]:
        """The processes. None can report during an outage of PostgreSQL: then, silence counts from the outage's end."""
        found = read_processes(self._database)
        if self._outage is None:
            return found
        lost_s, over_s = (self._clock.monotonic() - at for at in self._outage)
        return [
            replace(each, seen_s=min(each.seen_s, over_s)) if each.seen_s < lost_s + GONE_S else each for each in found
        ]

    def stuck(self, stuck_s: float, most: int) -> list[Row[Any]]:
        """Up to `most` sessions whose oldest unsettled turn was accepted more than `stuck_s` seconds ago."""
        return list(self._run(queries.STUCK, {"stuck_s": stuck_s, "most": most}))

    def entries(self) -> list[EntryStatus]:
        """The state of perdure's own periodic tasks."""
        return read_schedules(self._database, self._entries)

    def close(self) -> None:
        """Close the connections to Redis."""
        for each in self.servers:
            each.close()

    def _run(self, statement: Statement, given: Mapping[str, Any] | None = None) -> Sequence[Row[Any]]:
        """Run a statement that the server ends after `LIMIT_S` seconds."""
        with self._database.transaction(statement.name) as transaction:
            transaction.run(queries.BOUND, {"milliseconds": str(int(LIMIT_S * 1_000))})
            return transaction.run(statement, given or {})

    def _due(self) -> dict[int, Amount]:
        rows = self._run(queries.DUE, {"most": MOST, "first": _FIRST})
        return {row.priority: Amount(row.number, row.oldest_s) for row in rows}

    def _amounts(self) -> dict[str, Amount]:
        return {row.what: Amount(row.number, row.oldest_s) for row in self._run(queries.AMOUNTS, {"most": MOST})}

    def _counted(self, statement: Statement, *labels: str, **given: Any) -> list[Counted]:
        rows = self._run(statement, {"most": MOST, **given})
        return [Counted(tuple(str(getattr(row, label)) for label in labels), row.number) for row in rows]

    def _failures(self) -> list[Counted]:
        return self._counted(queries.FAILED, "agent", "error_code", since=first_id(self._clock.now() - LATELY))

    def _sweeps(self) -> dict[str, float]:
        return {row.name: row.late_s for row in self._run(queries.SWEEPS, {"names": list(SWEEPS)})}

    def _schedules(self) -> dict[str, float]:
        found = read_schedules(self._database, self._entries)
        now = self._clock.now()
        return {
            each.entry: 0.0 if each.running else max((now - each.next_due).total_seconds(), 0.0)
            for each in found
            if each.since is not None
        }

    def _server(self) -> ServerState:
        self._database.run(queries.WRITABLE, {})
        row = self._run(queries.SERVER)[0]
        return ServerState(row.size_bytes, row.oldest_transaction_s, row.connections, row.max_connections)


class Latest:
    """The latest readings of a process, at most `every_s` seconds old when `read` returns. Thread-safe."""

    def __init__(self, read: Callable[[], Readings], clock: Clock, every_s: float) -> None:
        self._read = read
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._found: tuple[float, Readings] | None = None

    def __call__(self) -> Readings:
        """The latest readings. Callers wait for the one that reads."""
        with self._lock:
            now = self._clock.monotonic()
            if self._found is None or now - self._found[0] >= self._every_s:
                self._found = now, self._read()
            return self._found[1]


def _said(error: Exception) -> str:
    """What operators are shown of the error of a reading."""
    if isinstance(error, Unavailable):
        return error.explained
    return error.message if isinstance(error, PerdureError) else type(error).__name__


def _is_expected(error: Exception) -> bool:
    return isinstance(error, PerdureError)
