"""Drains the installation: closes the intake, requests the end of sessions, and polls until no work runs.

A worker is quiet if it says so, over the broker or in its report to PostgreSQL. Each worker that was alive during the
drain must: one that does not answer, because it is suspended or the broker is unavailable, may still run turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from perdure.cli import connecting
from perdure.observe.presence import EVERY_S, WORKER, Running, read_processes
from perdure.runtime import Runtime
from perdure.sessions.ending import request_ends
from perdure.settings import Settings
from perdure.turns import drain
from perdure.turns.drain import DrainPhase

_REASON = "drain"
_POLL_S = 1.0
_QUIET_POLLS = 2
"""How many consecutive polls must find no work. One is not enough: a single poll may miss a worker that is starting."""


class Drain:
    """A drain of the installation. The constructor closes the intake."""

    def __init__(self, runtime: Runtime, *, end_sessions: bool) -> None:
        self.quiet = False
        self._runtime = runtime
        self._database = runtime.database
        self._end_sessions = end_sessions
        self._began = time.monotonic()
        self._ends_requested = 0
        self._workers: dict[str, dict[str, Any]] = {}
        self._expected: set[str] = set()
        self.unheard: list[str] = []
        self.unrequested = False
        drain.begin(self._database)
        self._found = drain.running(self._database)
        self.left = drain.unfinished(self._database)

    def wait(self, limit_s: float) -> None:
        """With `end_sessions`, request the sessions' end. Poll until no work runs or `limit_s` seconds have passed.

        After `limit_s` seconds, `unrequested` tells whether the end of some sessions is still to be requested.
        """
        with _progress() as show, connecting.control() as ask:
            if self._end_sessions:
                self._request_ends(limit_s, show)
            quiet = 0
            while quiet < _QUIET_POLLS:
                self._workers = ask("perdure", _POLL_S)
                self.left = drain.unfinished(self._database)
                self.unheard = self._find_unheard(read_processes(self._database))
                quiet = quiet + 1 if self._is_quiet() else 0
                show(self._line())
                if self._is_late(limit_s):
                    break
            self.quiet = quiet == _QUIET_POLLS

    def report(self) -> dict[str, Any]:
        """The fields that the command prints."""
        settled = drain.settled(self._database, self._found)
        return {
            "intake": "closed",
            "quiet": self.quiet,
            "turns_finished": settled,
            "turns_parked": max(len(self._found) - settled - self.left.running, 0),
            "turns_running": self.left.running,
            "turns_waiting": self.left.waiting,
            "sessions_asked_to_end": self._ends_requested,
            "sessions_ending": self.left.ending,
            "sessions_held_back": self.left.held_back,
            "workers": len(self._workers),
            "workers_unheard": self.unheard,
            "flushed_sessions": sum(worker.get("flushed_sessions", 0) for worker in self._workers.values()),
            "flushed_entries": sum(worker.get("flushed_entries", 0) for worker in self._workers.values()),
            "seconds": round(time.monotonic() - self._began, 3),
        }

    def _request_ends(self, limit_s: float, show: Callable[[str], None]) -> None:
        for session_ids in drain.live_sessions(self._database):
            if self._is_late(limit_s):
                self.unrequested = True
                return
            requested = request_ends(self._database, session_ids, _REASON)
            for each in requested:
                each.wake(self._runtime.wake)
            self._ends_requested += len(requested)
            show(f"{self._ends_requested} sessions are asked to end")

    def _is_late(self, limit_s: float) -> bool:
        return time.monotonic() - self._began >= limit_s

    def _is_quiet(self) -> bool:
        if self.left.running or self.unheard or (self._end_sessions and (self.left.ending or self.unrequested)):
            return False
        return all(map(self._has_answered, self._workers))

    def _has_answered(self, name: str) -> bool:
        return self._workers.get(name, {}).get("intake") == DrainPhase.QUIET

    def _find_unheard(self, processes: Sequence[Running]) -> list[str]:
        """The names of the workers that were alive during this drain, and have not said that they are quiet or stop."""
        workers = [each for each in processes if each.kind == WORKER]
        self._expected |= {each.name for each in workers if each.is_alive}

        def is_heard(name: str) -> bool:
            named = [each for each in workers if each.name == name]
            alive = [each for each in named if each.is_alive]  # of processes with one name, each counts
            answered = len(alive) <= 1 and self._has_answered(name)
            return answered or all(each.quiet or each.stopped for each in alive or named[-1:])

        return sorted(name for name in self._expected if not is_heard(name))

    def _line(self) -> str:
        known = self._workers.keys() | self._expected
        busy = {name for name in self._workers if not self._has_answered(name)} | set(self.unheard)
        line = f"{self.left.running} turns are running, {len(busy)} of {len(known)} workers are not quiet"
        return f"{line}, {self.left.ending} sessions are ending" if self._end_sessions else line


def budget_s(settings: Settings, *, end_sessions: bool) -> float:
    """Seconds for every worker to notice the drain, finish or park its turns, flush, report it and answer the polls."""
    sweep_s, shutdown = settings.turn.sweep_s, settings.shutdown
    quiet_s = sweep_s + shutdown.hard_exit_s + shutdown.flush_s + EVERY_S + _QUIET_POLLS * _POLL_S
    return quiet_s + settings.model_timeout_s if end_sessions else quiet_s


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        printed: list[str] = []

        def show(line: str) -> None:
            if printed[-1:] != [line]:
                printed.append(line)
                console.print(line)

        yield show
        return
    with console.status("closing the intake") as status:
        yield status.update
