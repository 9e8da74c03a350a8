"""Runs a session's turns in a child process, so that a crash harms no other turn.

After two claims without progress, a turn runs in a child process. The child process is
`python -m perdure.workers.isolated.child SESSION_ID`. It claims the session, runs its turns and exits, while the parent
waits. At most `MOST_AT_ONCE` children run concurrently. If no further child may run, the sweeper wakes the session
again.

The parent kills an unresponsive child whose turn was cancelled, was claimed by another worker, or has exceeded its time
limit (`perdure.workers.isolated.kill`). On Linux, the kernel kills the children if the parent ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from uuid import UUID

from celery.app.utils import find_app

from perdure.assembly import addresses, assemble
from perdure.errors import SettingsError, Unavailable, loggable
from perdure.observe.current import working_on
from perdure.observe.measures import Entry, Measures
from perdure.servers.process import launch
from perdure.settings import Settings
from perdure.text.untrusted import error_summary, first_line
from perdure.tools.mcp.connections import Connections
from perdure.turns.lease.claim import Ran, Unequipped
from perdure.turns.run.child_watch import ChildEnd
from perdure.turns.run.loop import Runner
from perdure.workers.isolated.kill import Warden, owner
from perdure.workers.logs import configure
from perdure.workers.publish.calls import CeleryCalls
from perdure.workers.publish.wake import CeleryWaker
from perdure.workers.shutdown.flush import flush, flushers

log = logging.getLogger(__name__)

MOST_AT_ONCE = 4

APPLICATION = "_PERDURE_APPLICATION"
"""The environment variable that passes the import path of the worker's Celery application to its children."""

_UNAVAILABLE = 75
"""The exit status of a child that cannot reach a server (`EX_TEMPFAIL`). The turn's next attempt may succeed."""

_MOST_REPORTED = 65_536
"""The bytes that a pipe holds: the worker reads the report once the child has ended."""

_MOST_MEASUREMENTS, _MOST_OUTCOMES = 300, 50
"""The most measurements and outcomes in a report, which is smaller than the pipe."""

_LOOK_S = 1.0


class Isolation:
    """Starts the child processes: at most `MOST_AT_ONCE` at a time, and at most one for each session.

    `environment`: environment variables for the children, in addition to this process's variables. `measured` is
    called with the measurements of each child.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        measured: Callable[[Sequence[Entry]], None] = lambda _journal: None,
    ) -> None:
        self._measured = measured
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._sessions: set[UUID] = set()
        self._children: dict[UUID, subprocess.Popen[bytes]] = {}
        self._stopping = False

    @property
    def running(self) -> int:
        return len(self._children)

    def run(self, session_id: UUID) -> ChildEnd | None:
        """Run a session's turns in a child process, and wait until the process has ended.

        Returns `None`, without starting a child, if `MOST_AT_ONCE` children run or the session already has a child. A
        session may already have a child, because the sweeper may issue another wake-up before the child claims the
        session. After `stop`, no child is started.
        """
        with self._lock:
            if session_id in self._sessions or len(self._sessions) == MOST_AT_ONCE:
                log.info("session %s waits for a child process", session_id)
                return None
            self._sessions.add(session_id)
        try:
            log.warning("the turn of session %s ended earlier processes: it runs in a child process now", session_id)
            return self._run(session_id)
        finally:
            with self._lock:
                self._sessions.remove(session_id)

    def watch(self, warden: Warden) -> None:
        """Call `warden.check` once a second, with the running children. Does not return."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                children = dict(self._children)
            try:
                warden.check(children)
            except Unavailable as error:
                log.warning("the child processes could not be checked: %s", loggable(error))
            except Exception:
                log.exception("a check of the child processes failed; the next one follows")

    def stop_turns(self) -> int:
        """Send SIGTERM to each child, so that it leaves its turn to a later worker; returns the number of children.

        A second call makes the children release their leases and exit.
        """
        with self._lock:
            for child in self._children.values():
                child.terminate()
            return len(self._children)

    def stop(self) -> None:
        """Stop the turns of all children. Later calls of `run` start no child."""
        with self._lock:
            self._stopping = True
        self.stop_turns()

    def end(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for the children to end, then kill the remaining children."""
        until = time.monotonic() + within_s
        with self._lock:
            children = list(self._children.values())
        for child in children:
            try:
                child.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                child.kill()

    def _run(self, session_id: UUID) -> ChildEnd:
        """Run a child; after `stop`, start none."""
        began = time.monotonic()
        reports, reporting = os.pipe()
        try:
            argv = [sys.executable, "-m", "perdure.workers.isolated.child", str(session_id), str(reporting)]
            with self._lock:
                if self._stopping:
                    return ChildEnd(0.0)
                # SIGKILL, since a process in which a call holds the interpreter lock handles no other signal.
                child = subprocess.Popen(
                    launch.command(argv, death_signal=signal.SIGKILL),
                    env=os.environ | self._environment,
                    pass_fds=(reporting,),
                )
                self._children[session_id] = child
            try:
                status = child.wait()
            finally:
                with self._lock:
                    del self._children[session_id]
            log.info("the child process of session %s ended with status %s", session_id, status)
            ended = _end(status, reports, time.monotonic() - began)
            self._measured(ended.measured)
            return ended
        finally:
            os.close(reports)
            os.close(reporting)


def _end(status: int, reports: int, seconds: float) -> ChildEnd:
    """Read how a child process ended. `reports` is the pipe of its report."""
    os.set_blocking(reports, False)
    try:
        report = json.loads(os.read(reports, _MOST_REPORTED))
    except BlockingIOError:  # the child reported nothing
        if status == -signal.SIGTERM:
            return ChildEnd(seconds)
        return ChildEnd(seconds, f"it ended with status {status} before it took the turn")
    return ChildEnd(
        seconds,
        report["error"],
        charged=report["charged"],
        left=report["left"] and Unequipped(**report["left"]),
        outcomes=tuple(report["outcomes"]),
        measured=report["measured"],
    )


def main(session_id: UUID, reporting: int | None = None) -> None:
    """Run the session's turns in this process. Reports to the pipe `reporting` that they ran, or why they did not."""
    if reporting is not None:
        os.set_inheritable(reporting, False)  # noqa: FBT003 (its only parameter)
    report = _Report(reporting)
    try:
        with working_on(session_id=session_id):
            _run(session_id, report)
    except Unavailable as error:
        with working_on(session_id=session_id):
            log.warning("the turn of session %s does not run: %s", session_id, loggable(error))
        report.send(error.message, charged=False)
        sys.exit(_UNAVAILABLE)
    except (Exception, SystemExit) as error:
        report.send(str(error) if isinstance(error, SettingsError) else error_summary(error))
        raise


class _Report:
    """Writes the report of this process to the pipe `reporting`: the first one only, which the worker reads."""

    def __init__(self, reporting: int | None) -> None:
        self._reporting = reporting

    def send(
        self,
        error: str | None = None,
        *,
        charged: bool = True,
        left: Unequipped | None = None,
        outcomes: Sequence[str] = (),
        measured: Sequence[Entry] = (),
    ) -> None:
        """Report that the turns ran, or why they did not (see `ChildEnd`). Later calls do nothing."""
        reporting, self._reporting = self._reporting, None
        if reporting is not None:
            lacking = left and {"lacks": first_line(left.lacks), "priority": left.priority}
            report = {
                "error": error and first_line(error),
                "charged": charged,
                "left": lacking,
                "outcomes": outcomes[:_MOST_OUTCOMES],
                "measured": measured[:_MOST_MEASUREMENTS],
            }
            os.write(reporting, json.dumps(report).encode())


def _run(session_id: UUID, report: _Report) -> None:
    settings = Settings.load()
    configure(form=settings.log.format)
    if application := os.environ.get(APPLICATION):
        find_app(application)  # `assemble` sets it up
    where = addresses(settings)
    waker = CeleryWaker(settings, where)
    calls = CeleryCalls.at(settings, where)
    journal: list[Entry] = []
    measures = Measures(journal)
    runtime = assemble(settings, where.database_url, waker, where.redis_url, turns=True, calls=calls, measures=measures)
    runner = Runner(runtime, owner=owner())
    runner.start()
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, for its whole group: the worker sends SIGTERM
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _drain_then_exit(runner, runtime.connections))
    outcome = runner.run(session_id, alone=True)
    log.info("%s", outcome)
    report.send(
        left=outcome if isinstance(outcome, Unequipped) else None,
        outcomes=outcome.outcomes if isinstance(outcome, Ran) else (),
        measured=journal,
    )
    flush(runner.keeper.touched(), flushers(runtime), settings.shutdown.flush_s)
    runner.close()
    waker.close()
    calls.close()
    runtime.close()


def _drain_then_exit(runner: Runner, connections: Connections | None) -> Callable[[int, FrameType | None], None]:
    """Make a signal handler. The first signal stops the turn; the second signal makes the process exit at once."""
    actions = iter((runner.keeper.begin_shutdown, partial(_exit_now, runner, connections)))

    def handle(_signal: int, _frame: FrameType | None) -> None:
        action = next(actions, None)
        if action is not None:
            threading.Thread(target=action, name="perdure-drain", daemon=True).start()

    return handle


def _exit_now(runner: Runner, connections: Connections | None) -> None:
    try:
        runner.keeper.release_all()
    except Unavailable as error:
        log.warning("the lease was not released; it expires: %s", error.message)
    if connections is not None:
        connections.close(0)
    os._exit(1)


if __name__ == "__main__":
    main(UUID(sys.argv[1]), *map(int, sys.argv[2:]))
