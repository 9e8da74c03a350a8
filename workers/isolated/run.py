"""A turn in a child process, so that a crash harms no other turn.

From the third claim without progress a turn runs here. `python -m perdure.workers.isolated.run SESSION_ID` claims the
session, runs its turns, and exits; the parent waits. Only a few run concurrently; the sweeper wakes a session again if
there was no room.

A child that cannot end by itself is killed: by its parent when its turn is cancelled, lost or past its time limit
(`perdure.workers.isolated.kill`), by the kernel when its parent ends (Linux only).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from uuid import UUID

from perdure.embedded.process import launch
from perdure.errors import Unavailable
from perdure.settings import Settings
from perdure.tools.mcp.connections import Connections
from perdure.turns.run.runner import Runner
from perdure.workers.assembly import addresses, assemble
from perdure.workers.isolated.kill import Warden, owner
from perdure.workers.logs import configure
from perdure.workers.publish.wake import CeleryWaker
from perdure.workers.shutdown.flush import flush, flushers

log = logging.getLogger(__name__)

MOST_AT_ONCE = 4

_LOOK_S = 1.0


class Isolation:
    """Starts such processes, at most `MOST_AT_ONCE` at a time, and one for a session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: set[UUID] = set()
        self._children: dict[UUID, subprocess.Popen[bytes]] = {}
        self._leaving = False

    @property
    def running(self) -> int:
        """How many such processes run."""
        return len(self._children)

    def run(self, session_id: UUID) -> bool:
        """Run a session's turns in a process of their own and wait for its end; False if it must wait for one.

        While its process starts, the session looks idle and is issued again: a second one would take others' room.
        """
        with self._lock:
            if session_id in self._sessions or len(self._sessions) == MOST_AT_ONCE:
                log.info("session %s waits for a process of its own", session_id)
                return False
            self._sessions.add(session_id)
        try:
            log.warning("session %s has cost processes their lives: it runs alone now", session_id)
            status = self._run(session_id)
            log.info("the process of session %s ended with status %s", session_id, status)
        finally:
            with self._lock:
                self._sessions.remove(session_id)
        return True

    def watch(self, warden: Warden) -> None:
        """Have `warden` look at the processes once a second. Does not return."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                children = dict(self._children)
            try:
                warden.look(children)
            except Unavailable as error:
                log.warning("the processes of isolated turns could not be looked after: %s", error.message)
            except Exception:
                log.exception("the warden met an error and goes on")

    def park(self) -> int:
        """Have the turns parked that run in such processes; how many. Asked again, they give back and leave."""
        with self._lock:
            for child in self._children.values():
                child.terminate()
            return len(self._children)

    def leave(self) -> None:
        """The worker shuts down: park them, and start no more."""
        with self._lock:
            self._leaving = True
        self.park()

    def end(self, within_s: float) -> None:
        """The worker leaves: kill the processes that have not ended within `within_s` seconds."""
        until = time.monotonic() + within_s
        with self._lock:
            children = list(self._children.values())
        for child in children:
            try:
                child.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                child.kill()

    def _run(self, session_id: UUID) -> int | None:
        """Run a process until it ends or is ended; its status, None if it was too late to start it."""
        argv = [sys.executable, "-m", "perdure.workers.isolated.run", str(session_id)]
        with self._lock:
            if self._leaving:
                return None
            # SIGKILL: a process whose interpreter's lock is held handles no other signal.
            child = subprocess.Popen(launch.command(argv, death_signal=signal.SIGKILL))
            self._children[session_id] = child
        try:
            return child.wait()
        finally:
            with self._lock:
                del self._children[session_id]


def main(session_id: UUID) -> None:
    """Run the session's turns in this process."""
    settings = Settings.load()
    configure()
    where = addresses(settings)
    waker = CeleryWaker(settings, where)
    runtime = assemble(settings, where.database_url, waker, where.redis_url, turns=True)
    runner = Runner(runtime, owner=owner())
    runner.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the worker too, which has the say
    signal.signal(signal.SIGTERM, _leave(runner, runtime.connections))
    log.info("%s", runner.run(session_id, alone=True))
    flush(runner.keeper.touched(), flushers(runtime), settings.shutdown.flush_s)
    runner.close()
    if runtime.connections is not None:
        runtime.connections.close()
    waker.close()
    if runtime.redis_memory is not None:
        runtime.redis_memory.close()
    if runtime.breakers is not None:
        runtime.breakers.close()
    runtime.database.close()


def _leave(runner: Runner, connections: Connections | None) -> Callable[[int, FrameType | None], None]:
    """The first time it drains; the second time it leaves the hard way."""
    ways = iter((runner.keeper.drain, partial(_leave_now, runner, connections)))

    def handle(_signal: int, _frame: FrameType | None) -> None:
        way = next(ways, None)
        if way is not None:
            threading.Thread(target=way, name="perdure-drain", daemon=True).start()

    return handle


def _leave_now(runner: Runner, connections: Connections | None) -> None:
    try:
        runner.keeper.release_all()
    except Unavailable as error:
        log.warning("the lease was not given back, and runs out: %s", error.message)
    if connections is not None:
        connections.close(0)
    os._exit(1)


if __name__ == "__main__":
    main(UUID(sys.argv[1]))
