"""A throw-away installation with two workers, which plays one schedule after another.

Leases and pauses are short, so that another worker continues a turn within seconds. A tool with a call in doubt is
waited for until its time limit is over, which is why that is short, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from redis import Redis

from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.assembly import Addresses
from perdure.certify import worker
from perdure.certify.faults import Faults, Fired, Note, Place, lines
from perdure.certify.model import ENDPOINT, ScenarioModel, text_of
from perdure.certify.schedules import MODEL, Schedule
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.database.migrate import migrate
from perdure.errors import Conflict, PerdureError, Unavailable
from perdure.models.protocol import ForeignModel, Model
from perdure.redis import client_url
from perdure.runtime import Runtime
from perdure.servers import throwaway
from perdure.servers.process import launch
from perdure.settings import ApprovalSettings, Settings, TurnSettings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.turns.calls.approvals import OPERATOR, Decision, decide
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import read_turn
from perdure.workers.publish.wake import CeleryWaker

T = TypeVar("T")

WORKERS = 2
_LEASE_S, _HEARTBEAT_S, _SWEEP_S = 1.5, 0.5, 0.3
_LOOK_S = 0.02
_START_S = 60.0
_PATIENCE_S = 30.0
"""Seconds beyond the limits of the calls within which a turn must be settled."""
_REACHED_S = 10.0
"""Seconds within which an armed fault must fire, beyond the limits of the calls."""
_READY = " ready."
_LOG_TAIL = 2_000


class StackError(PerdureError):
    """The workers of a certification did not start, or ended by themselves."""

    code = Unavailable.code
    http_status = Unavailable.http_status


@dataclass(frozen=True, slots=True)
class Played:
    """What a schedule showed. `reached`: whether the turn passed the place of the kill."""

    turn: dict[str, Any]
    events: list[dict[str, Any]]
    """The executions and probes of the turn's calls, in order."""
    effects: list[dict[str, Any]]
    """The turn's effect rows: `effect_id`, `tool`, `status`, `result`."""
    notes: list[Note]
    model_calls: int
    reached: bool = True


class Stack:
    """The servers, the model and the workers. `module` is the author's, and `agents` its agents.

    `turns` is the file by which the executions of tools take turns, over all stacks of a certification.
    """

    def __init__(self, module: str, agents: Agents, tool_timeout_s: float, turns: Path) -> None:
        self._tool_timeout_s = tool_timeout_s
        self._armed: tuple[int, Place] | None = None
        self._struck: Fired | None = None
        self._stopped: threading.Event | None = None
        self._cases = 0
        with ExitStack() as stack:
            found = stack.enter_context(throwaway.servers())
            self._directory = found.directory / "certify"
            self._directory.mkdir()
            self._faults = Faults(self._directory)
            self._redis_url = found.redis.url
            migrate(found.postgres.url)
            self._model = ScenarioModel(self._asked)
            stack.enter_context(self._model.serving())
            self._database = Database(found.postgres.url, lease_s=_LEASE_S)
            stack.callback(self._database.close)
            settings = Settings(
                _env_file=None,
                turn=TurnSettings(
                    lease_s=_LEASE_S, heartbeat_s=_HEARTBEAT_S, sweep_s=_SWEEP_S, tool_timeout_s=tool_timeout_s
                ),
                approval=ApprovalSettings(),
            )
            waker = CeleryWaker(settings, Addresses(found.postgres.url, found.redis.url, found.redis.url))
            stack.callback(waker.close)
            snapshots = PostgresSnapshots(self._database)
            self._runtime = Runtime(settings, SystemClock(), self._database, agents, _no_model, waker, snapshots)
            self._environment = self._of_workers(module, found.postgres.url, found.redis.url, turns)
            self._workers: list[subprocess.Popen[bytes]] = []
            stack.callback(self._end)
            self._workers += [self._start(number) for number in range(WORKERS)]
            self._until_ready()
            self._stack = stack.pop_all()

    @classmethod
    @contextmanager
    def running(cls, module: str, agents: Agents, tool_timeout_s: float, turns: Path) -> Iterator[Stack]:
        """A stack for the block.

        Raises:
            EmbeddedServerError: a server cannot be started.
            StackError: the workers do not start.
        """
        made = cls(module, agents, tool_timeout_s, turns)
        try:
            yield made
        finally:
            made._stack.close()

    def play(self, schedule: Schedule, stopped: threading.Event | None = None) -> Played:
        """Play a schedule, and wait until its turn is settled.

        Raises:
            StackError: a worker ended that was not killed, or `stopped` was set.
        """
        self._stopped = stopped
        self._cases += 1
        case, since = self._cases, len(self._faults.notes())
        self._model.play(case, schedule.scenario)
        limit_s = (self._tool_timeout_s + _LEASE_S) * 2
        self._arm(case, schedule.place)
        accepted = accept(
            self._runtime,
            Incoming(
                user=UserKey(schedule.scenario.user_id),
                text=text_of(schedule.scenario, case),
                agent=schedule.agent.name,
                conversation=f"case {case}",
            ),
        )
        reached = schedule.place is None or self._until_killed(schedule, accepted.turn_id, limit_s)
        self._faults.disarm()
        turn = self._until_settled(accepted.turn_id, limit_s * len(schedule.scenario.steps) + _PATIENCE_S)
        effects = self._query(
            "SELECT effect_id, tool, status, result FROM tool_effects WHERE turn_id = %(turn_id)s",
            turn_id=accepted.turn_id,
        )
        return Played(
            turn,
            self._events(accepted.turn_id),
            [{"effect_id": str(row[0]), "tool": row[1], "status": row[2], "result": row[3]} for row in effects],
            self._faults.notes(since),
            self._model.calls(case),
            reached,
        )

    def _arm(self, case: int, place: Place | None) -> None:
        self._struck = None
        self._armed = None if place is None else (case, place)
        if place is not None and place.name != MODEL:
            self._faults.arm(place)

    def _asked(self, case: int, number: int) -> None:
        """Kill the worker that asks the model, if the schedule says so. Called in a thread of the model's server."""
        if self._armed != (case, Place("within", MODEL, number)):
            return
        self._armed = None
        rows = self._query(
            "SELECT lease_owner FROM sessions WHERE session_id = (SELECT session_id FROM turns JOIN inbox USING"
            " (turn_id) WHERE text LIKE %(text)s)",
            text=f"%(case {case})",
        )
        pid = int(rows[0].lease_owner.split()[0].rpartition(":")[2])
        os.kill(pid, signal.SIGKILL)
        self._struck = Fired(time.monotonic(), pid)

    def _until_killed(self, schedule: Schedule, turn_id: UUID, limit_s: float) -> bool:
        """Wait until the fault has fired, and restart the killed worker; returns False if it does not fire."""
        in_model = schedule.place is not None and schedule.place.name == MODEL

        def ended() -> Fired | dict[str, Any] | None:
            return self._struck if in_model else self._faults.fired()

        fired = self._wait(
            lambda: ended() or self._look_at(turn_id), limit_s * len(schedule.scenario.steps) + _REACHED_S
        )
        if not isinstance(fired, Fired):
            return False
        pid = fired.pid
        number = next(at for at, each in enumerate(self._workers) if each.pid == pid)
        self._workers[number].wait()
        if schedule.flush:
            client = Redis.from_url(client_url(self._redis_url), socket_timeout=10)
            client.flushall()
            client.close()
        self._workers[number] = self._start(number)
        return True

    def _until_settled(self, turn_id: UUID, within_s: float) -> dict[str, Any]:
        """Wait until the turn is settled, and approve its calls; returns it, unsettled if the time is over."""
        return self._wait(lambda: self._look_at(turn_id), within_s) or read_turn(self._database, turn_id)

    def _look_at(self, turn_id: UUID) -> dict[str, Any] | None:
        """The turn if it is settled. Approves the calls that wait for a person."""
        turn = read_turn(self._database, turn_id)
        for each in turn["pending_approvals"]:
            with suppress(Conflict):  # decided just now
                decide(self._runtime, turn_id, Decision(call_id=each["call_id"], decision="approve"), OPERATOR)
        return turn if turn["settled_at"] else None

    def _events(self, turn_id: UUID) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in lines(self._directory / worker.EXECUTIONS)]
        return [each for each in found if each["turn_id"] == str(turn_id)]

    def _query(self, sql: str, **parameters: Any) -> list[Any]:
        with self._database.engine.connect() as connection:
            return list(connection.exec_driver_sql(sql, parameters).fetchall())

    def _wait(self, condition: Callable[[], T | None], within_s: float) -> T | None:
        """The first true value of `condition`; `None` if the time is over."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            self._require_workers()
            time.sleep(_LOOK_S)
        return None

    def _require_workers(self) -> None:
        if self._stopped is not None and self._stopped.is_set():
            raise StackError("The certification was stopped.")
        for number, each in enumerate(self._workers):
            status = each.poll()
            if status is not None and status != -signal.SIGKILL:
                raise StackError(f"A worker ended with status {status}:\n{self._log(number)}")

    def _until_ready(self) -> None:
        if not self._wait(lambda: all(_READY in self._log(at) for at in range(WORKERS)), _START_S):
            raise StackError(f"The workers did not start within {_START_S:g} s:\n{self._log(0)}")

    def _log(self, number: int) -> str:
        path = self._directory / f"worker{number + 1}.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return text[-_LOG_TAIL:]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-P", "-m", "perdure.cli", "worker", "--name", f"certify{number + 1}"]
        with (self._directory / f"worker{number + 1}.log").open("ab") as log:
            return subprocess.Popen(
                launch.command([*argv, "--concurrency", "4"], dies_with_parent=True, death_signal=signal.SIGKILL),
                env=self._environment,
                cwd=self._directory,  # without a `.env`
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self) -> None:
        for each in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    def _of_workers(self, module: str, database_url: str, redis_url: str, turns: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        paths = [os.path.abspath(each) for each in sys.path if each]  # noqa: PTH100 (links stay)
        return {
            **kept,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(paths),
            "PERDURE_AGENTS": worker.__name__,
            worker.MODULE: module,
            worker.DIRECTORY: str(self._directory),
            worker.TURNS: str(turns),
            "PERDURE_DATA_DIR": str(self._directory / "data"),
            "PERDURE_DATABASE_URL": database_url,
            "PERDURE_REDIS_URL": redis_url,
            f"PERDURE_ENDPOINTS__{ENDPOINT.upper()}__URL": self._model.url,
            "PERDURE_TURN__LEASE_S": str(_LEASE_S),
            "PERDURE_TURN__HEARTBEAT_S": str(_HEARTBEAT_S),
            "PERDURE_TURN__SWEEP_S": str(_SWEEP_S),
            "PERDURE_TURN__TOOL_TIMEOUT_S": str(self._tool_timeout_s),
        }


def _no_model(name: str | ForeignModel) -> Model:
    raise StackError(f"the accepting process has no model {name}")
