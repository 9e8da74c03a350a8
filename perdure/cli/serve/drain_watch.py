"""Drains the installation: closes the intake, requests the end of sessions, and polls until no work runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from perdure.cli import connecting
from perdure.errors import Conflict
from perdure.runtime import Runtime
from perdure.sessions.ending import request_end
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
        drain.begin(self._database)
        self._found = drain.running(self._database)
        self.left = drain.unfinished(self._database)

    def wait(self, limit_s: float) -> None:
        """With `end_sessions`, request the sessions' end. Poll until no work runs or `limit_s` seconds have passed."""
        with _progress() as show, connecting.control() as ask:
            if self._end_sessions:
                self._request_ends()
            quiet = 0
            while quiet < _QUIET_POLLS:
                self._workers = ask("perdure", _POLL_S)
                self.left = drain.unfinished(self._database)
                quiet = quiet + 1 if self._is_quiet() else 0
                show(self._line())
                if time.monotonic() - self._began >= limit_s:
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
            "flushed_sessions": sum(worker.get("flushed_sessions", 0) for worker in self._workers.values()),
            "flushed_entries": sum(worker.get("flushed_entries", 0) for worker in self._workers.values()),
            "seconds": round(time.monotonic() - self._began, 3),
        }

    def _request_ends(self) -> None:
        for session_id in drain.live_sessions(self._database):
            try:
                requested = request_end(self._database, session_id, _REASON)
            except Conflict:
                continue  # the session has ended since it was listed
            self._ends_requested += 1
            requested.wake(self._runtime.wake)

    def _is_quiet(self) -> bool:
        if self.left.running or (self._end_sessions and self.left.ending):
            return False
        return all(worker.get("intake") == DrainPhase.QUIET for worker in self._workers.values())

    def _line(self) -> str:
        busy = sum(1 for worker in self._workers.values() if worker.get("intake") != DrainPhase.QUIET)
        line = f"{self.left.running} turns are running, {busy} of {len(self._workers)} workers are not quiet"
        return f"{line}, {self.left.ending} sessions are ending" if self._end_sessions else line


def budget_s(settings: Settings, *, end_sessions: bool) -> float:
    """Seconds for every worker to notice the drain, finish or park its turns, flush, and answer the last polls."""
    sweep_s, shutdown = settings.turn.sweep_s, settings.shutdown
    quiet_s = sweep_s + shutdown.hard_exit_s + shutdown.flush_s + _QUIET_POLLS * _POLL_S
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
