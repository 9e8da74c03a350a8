"""Plays the schedules of a system: one turn each, in which a worker is killed at one point.

Every system gets the same: a PostgreSQL and a Redis of its own, the number of workers that its documents assume, the
same turn, the same kills, and a supervisor that starts a killed worker again at once. Limits such as leases are those
of the system's documents.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Protocol
from uuid import uuid4

import psutil
from sqlalchemy.engine import URL

from benchmarks.crashes.counting import Played
from benchmarks.crashes.recorder import POINTS, Point, Recorder
from benchmarks.crashes.script import READY, RECORDER
from benchmarks.setup import BenchmarkFailed, Progress, Setup, ledger
from perdure.servers.process import launch
from perdure.servers.throwaway import servers

BOUND_S = 300.0
"""Seconds within which a turn must end."""

_MIGRATING = threading.Lock()  # alembic keeps its context in the module's variables
_START_S = 120.0
_LOOK_S = 0.02
_LOG_TAIL = 2_000
_WARM_UP, _UNDISTURBED = 5, 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a system runs: its servers, its database, and the recorder."""

    setup: Setup
    database: URL
    recorder: Recorder

    @property
    def redis(self) -> str:
        """The URL of Redis."""
        return self.setup.servers.redis.url

    @property
    def postgres(self) -> str:
        """The URL of the database for psycopg 3 and libpq."""
        return self.database.set(drivername="postgresql").render_as_string(hide_password=False)


class Sender(Protocol):
    """The process that accepts messages."""

    def send(self, turn: str) -> None:
        """Start a turn with the message `script.text_of(turn)`."""

    def has_ended(self, turn: str) -> bool:
        """Whether the system will do nothing more for the turn, its reply included."""


class System(ABC):
    """A system and how its documents set it up. The attributes are those of the table."""

    name: str
    limit: str
    """What decides when a turn is taken over: the defaults, and what differs from them."""
    document: str
    """The document that the set-up follows."""
    packages: tuple[str, ...]
    workers = 2
    lanes = 6
    """Schedules at once, each with servers and workers of its own. 1 if processor time decides the take-over."""
    has_tables = False
    """Whether the database has perdure's tables."""

    @abstractmethod
    def argv(self, place: Place, number: int) -> Sequence[str]:
        """The arguments of `python` that start the worker with this number."""

    @abstractmethod
    def opened(self, place: Place) -> AbstractContextManager[Sender]:
        """Create what the workers need, and yield the sender for the block. The workers start in the block."""

    def environment(self, place: Place) -> Mapping[str, str]:
        """The workers' environment, to which the recorder's URL is added."""
        return place.setup.environment(place.database)

    def versions(self) -> str:
        """The names and versions of the packages."""
        return ", ".join(f"{name} {version(name)}" for name in self.packages)


@dataclass(frozen=True, slots=True)
class Run:
    """The schedules of a system, and the bytes of WAL that a turn writes without a kill."""

    played: Sequence[Played]
    wal_bytes: float


def run(system: System, points: Sequence[Point], progress: Progress) -> Run:
    """Play a schedule for each point, `system.lanes` at once.

    Raises:
        BenchmarkFailed: a worker does not start, or a turn does not pass a point.
    """
    waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
    for point in points:
        waiting.put(point)
    at_once = min(system.lanes, len(points))
    with ThreadPoolExecutor(at_once) as pool:
        lanes = [pool.submit(_lane, system, waiting, progress, measures=at == 0) for at in range(at_once)]
    results = [lane.result() for lane in lanes]
    return Run([each for played, _ in results for each in played], results[0][1])


def _lane(
    system: System, waiting: queue.SimpleQueue[Point], progress: Progress, *, measures: bool
) -> tuple[list[Played], float]:
    played: list[Played] = []
    with _stack(system, progress) as stack:
        for _ in range(_WARM_UP):
            stack.undisturbed()
        wal_bytes = stack.wal() if measures else 0.0
        with suppress(queue.Empty):
            while True:
                point = waiting.get_nowait()
                progress(f"{system.name}: a kill {point}")
                played.append(stack.play(point))
    return played, wal_bytes


class Stack:
    """The workers of a system, which play one schedule after another."""

    def __init__(self, system: System, place: Place, sender: Sender) -> None:
        self._system, self._place, self._sender = system, place, sender
        self._workers = [_Worker(system, place, number) for number in range(system.workers)]

    def play(self, point: Point) -> Played:
        """Start a turn, kill the worker that passes `point`, start it again, and wait until the turn has ended."""
        recorder, turn = self._place.recorder, self._begin(point)
        if not self._wait(lambda: recorder.killed_at is not None, BOUND_S) or recorder.killed_at is None:
            raise BenchmarkFailed(f"{self._system.name}: no worker passed {point}\n{self._logs()}")
        killed_at = recorder.killed_at
        for worker in self._workers:
            if worker.is_dead():
                worker.start()
        has_ended = self._wait(lambda: self._sender.has_ended(turn), BOUND_S)
        return Played(recorder.events(turn), killed_at, has_ended)

    def undisturbed(self) -> None:
        """Run a turn without a kill, and check that each unit happens once, in order."""
        turn = self._begin(None)

        def passed() -> list[Point]:
            return [event.point for event in self._place.recorder.events(turn)]

        if not self._wait(lambda: self._sender.has_ended(turn) and len(passed()) >= len(POINTS), _START_S):
            raise BenchmarkFailed(f"{self._system.name}: a turn without a kill does not end\n{self._logs()}")
        if passed() != list(POINTS):
            raise BenchmarkFailed(f"{self._system.name}: a turn without a kill passes {passed()}")

    def wal(self) -> float:
        """The bytes of WAL of an undisturbed turn: the median, which leaves out most work of idle processes."""
        positions = [ledger(self._place.database).wal_bytes]
        for _ in range(_UNDISTURBED):
            self.undisturbed()
            positions.append(ledger(self._place.database).wal_bytes)
        return median(after - before for before, after in pairwise(positions))

    def signal(self, port: int, number: signal.Signals) -> None:
        """Send a signal to all processes of the worker that has the local TCP port."""
        for worker in self._workers:
            if worker.has(port):
                worker.signal(number)
                return
        raise BenchmarkFailed(f"{self._system.name}: no worker has the port {port}")

    def end(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.signal(signal.SIGKILL)

    def start(self) -> None:
        """Start all workers."""
        for worker in self._workers:
            worker.start()

    def _begin(self, point: Point | None) -> str:
        workers = self._workers
        self._wait(
            lambda: all(each.is_ready() for each in workers) or any(each.is_dead() for each in workers), _START_S
        )
        if not all(each.is_ready() for each in workers):
            raise BenchmarkFailed(f"{self._system.name}: the workers do not start\n{self._logs()}")
        turn = f"turn-{uuid4().hex}"
        self._place.recorder.arm(turn, point)
        self._sender.send(turn)
        return turn

    def _wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _logs(self) -> str:
        return "\n".join(worker.log() for worker in self._workers)


class _Worker:
    """A worker that is started again after each kill, with a log of its own each time."""

    def __init__(self, system: System, place: Place, number: int) -> None:
        self._argv = [sys.executable, *system.argv(place, number)]
        self._environment = {**system.environment(place), RECORDER: place.recorder.url, "PYTHONUNBUFFERED": "1"}
        self._directory = place.setup.servers.directory
        self._number, self._starts = number, 0
        self._process: psutil.Popen | None = None

    def start(self) -> None:
        self._starts += 1
        with self._path.open("wb") as log:
            self._process = psutil.Popen(
                launch.command(self._argv, dies_with_parent=True, death_signal=signal.SIGKILL),
                env=self._environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        return READY in self.log() and not self.is_dead()

    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def has(self, port: int) -> bool:
        return any(_has(process, port) for process in self._processes())

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if self._process is not None and number is signal.SIGKILL:
            self._process.wait()

    def log(self) -> str:
        text = self._path.read_text(errors="replace") if self._starts else ""
        return text if len(text) < _LOG_TAIL else f"{text[:_LOG_TAIL]}\n…\n{text[-_LOG_TAIL:]}"

    @property
    def _path(self) -> Path:
        return self._directory / f"worker-{self._number}-{self._starts}.log"

    def _processes(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []


def _has(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return port in [getattr(each.laddr, "port", None) for each in process.net_connections("tcp")]
    return False


@contextmanager
def _stack(system: System, progress: Progress) -> Iterator[Stack]:
    with ExitStack() as opened:
        setup = Setup(opened.enter_context(servers()), progress, quick=False)
        with _MIGRATING:
            url = opened.enter_context(setup.database("crashes", tables=system.has_tables))
        recorder = Recorder()
        opened.enter_context(recorder.serving())
        place = Place(setup, url, recorder)
        stack = Stack(system, place, opened.enter_context(system.opened(place)))
        recorder.signal = stack.signal
        opened.callback(stack.end)
        stack.start()
        yield stack
