"""`perdure drain`: every worker finishes or parks its turns and starts none, until `perdure drain --resume`.

The closed intake is a row in PostgreSQL, so it survives restarts and the end of this command. The command then polls
PostgreSQL for running turns, and each reachable worker for its flush.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_fields, write_json
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.errors import Conflict
from perdure.runtime import Runtime
from perdure.sessions.ending import request_end
from perdure.settings import Settings
from perdure.turns import drain as intake
from perdure.turns.drain import Phase

_REASON = "drain"
_LOOK_S = 1.0
_LOOKS = 2
"""So often in a row must all be quiet: a worker that begins just now is not asked in time."""


def drain(
    *,
    end_sessions: Annotated[bool, typer.Option("--end-sessions", help="End every session, too.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take work in again.")] = False,
    within: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait until all is quiet; default: the settings' budgets.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Refuse new work, finish or park running turns, and flush.

    What is closed stays closed, over restarts too, until --resume. Status 1 if it is not quiet
    when the time is up, or if sessions cannot end before their turns are run.
    """
    if resume and end_sessions:
        raise Failure("--resume takes no --end-sessions: it opens what a drain has closed.", WRONG_USAGE)
    with connecting.runtime() as runtime:
        if resume:
            intake.reopen(runtime.database)
            _write(
                {"intake": Phase.OPEN.value, "turns_waiting": intake.unfinished(runtime.database).waiting},
                as_json=as_json,
            )
            return
        watched = _Drain(runtime, end_sessions=end_sessions)
        limit_s = _budget_s(runtime.settings, end_sessions=end_sessions) if within is None else within
        watched.wait(limit_s)
    _write(watched.report(), as_json=as_json)
    if not watched.quiet:
        raise Failure(f"Not quiet within {limit_s:g} s. The intake stays closed; look again with `perdure drain`.")
    if end_sessions and watched.left.held_back:
        raise Failure(
            f"{watched.left.held_back} sessions have turns to run first: they end after `perdure drain --resume`."
        )


class _Drain:
    """One drain, watched from outside."""

    def __init__(self, runtime: Runtime, *, end_sessions: bool) -> None:
        self.quiet = False
        self._runtime = runtime
        self._database = runtime.database
        self._end_sessions = end_sessions
        self._began = time.monotonic()
        self._asked_to_end = 0
        self._workers: dict[str, dict[str, Any]] = {}
        intake.close(self._database)
        self._found = intake.running(self._database)
        self.left = intake.unfinished(self._database)

    def wait(self, limit_s: float) -> None:
        """Ask what is to end to end, and watch until all is quiet or the time is up."""
        with _progress() as show, connecting.control() as ask:
            if self._end_sessions:
                self._ask_to_end()
            quiet = 0
            while quiet < _LOOKS:
                self._workers = ask("perdure", _LOOK_S)
                self.left = intake.unfinished(self._database)
                quiet = quiet + 1 if self._is_quiet() else 0
                show(self._line())
                if time.monotonic() - self._began >= limit_s:
                    break
            self.quiet = quiet == _LOOKS

    def report(self) -> dict[str, Any]:
        """What became of it."""
        settled = intake.settled(self._database, self._found)
        return {
            "intake": "closed",
            "quiet": self.quiet,
            "turns_finished": settled,
            "turns_parked": max(len(self._found) - settled - self.left.running, 0),
            "turns_running": self.left.running,
            "turns_waiting": self.left.waiting,
            "sessions_asked_to_end": self._asked_to_end,
            "sessions_ending": self.left.ending,
            "sessions_held_back": self.left.held_back,
            "workers": len(self._workers),
            "flushed_sessions": sum(worker.get("flushed_sessions", 0) for worker in self._workers.values()),
            "flushed_entries": sum(worker.get("flushed_entries", 0) for worker in self._workers.values()),
            "seconds": round(time.monotonic() - self._began, 3),
        }

    def _ask_to_end(self) -> None:
        for session_id in intake.live_sessions(self._database):
            try:
                requested = request_end(self._database, session_id, _REASON)
            except Conflict:
                continue  # it has ended since
            self._asked_to_end += 1
            requested.wake(self._runtime.wake)

    def _is_quiet(self) -> bool:
        if self.left.running or (self._end_sessions and self.left.ending):
            return False
        return all(worker.get("intake") == Phase.QUIET for worker in self._workers.values())

    def _line(self) -> str:
        busy = sum(1 for worker in self._workers.values() if worker.get("intake") != Phase.QUIET)
        line = f"{self.left.running} turns run, {busy} of {len(self._workers)} workers are not quiet"
        return f"{line}, {self.left.ending} sessions end" if self._end_sessions else line


def _budget_s(settings: Settings, *, end_sessions: bool) -> float:
    """Until a worker knows, has finished or given up, and has looked again."""
    sweep_s, shutdown = settings.turn.sweep_s, settings.shutdown
    known_s = sweep_s + shutdown.hard_exit_s + shutdown.flush_s + _LOOKS * _LOOK_S
    return known_s + settings.model_timeout_s if end_sessions else known_s


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        said: list[str] = []

        def say(line: str) -> None:
            if said[-1:] != [line]:
                said.append(line)
                console.print(line)

        yield say
        return
    with console.status("closing the intake") as status:
        yield status.update


def _write(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(report)
    else:
        write_fields(report)
