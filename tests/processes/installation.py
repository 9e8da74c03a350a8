"""An installation under test: its servers and workers, and the test's process, which accepts messages.

Leases and time limits are short, so that recovery takes seconds. Tests read outcomes with the engine's own reading
functions. `check` asserts the invariants.
"""

from __future__ import annotations

import base64
import concurrent.futures
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey
from perdure.agents import Agent, Agents
from perdure.assembly import Addresses
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.models.protocol import ForeignModel, Message, Model, ModelRequest, Role, ToolCall
from perdure.models.providers.chat_wire import request_body
from perdure.runtime import Runtime
from perdure.settings import Settings, TurnSettings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import SettlementWatch, read_turn
from perdure.turns.transcript import REJECTED
from perdure.workers.publish.wake import CeleryWaker
from tests.models.openai_server import validate_transcript
from tests.processes.faults import SCENE, Faults, Place, wait_until
from tests.processes.model_server import ModelServer
from tests.processes.nodes import RedisContainer, Worker, WorkerContainer

NATIVE, ADAPTED, JUDGING, DELEGATING, ASKING = "tester", "adapted", "judging", "delegating", "asking"
"""The agents of workers: perdure's own, one of pydantic-ai, one whose output is repaired, one that asks other agents,
and one that asks the user.
"""

MODULES = {
    NATIVE: "tests.processes.agents",
    ADAPTED: "tests.processes.adapted_agents",
    JUDGING: "tests.processes.judging_agents",
    DELEGATING: "tests.processes.delegating_agents",
    ASKING: "tests.processes.asking_agents",
    **dict.fromkeys(("rewriting", "impatient", "cautious", "serving"), "tests.processes.asking_agents"),
    **dict.fromkeys(("drawing", "painting", "everything"), "tests.processes.drawing_agents"),
}

ROOT = Path(__file__).resolve().parents[2]

LEASE_S, HEARTBEAT_S, SWEEP_S, TOOL_TIMEOUT_S = 1.5, 0.5, 0.3, 1.5
DRAIN_S = 1.0
SECRET = "whsec_" + base64.b64encode(b"the secret of these tests").decode()
REPLY_QUEUE = "another service"

RECOVERY_S = LEASE_S + SWEEP_S + 3
"""Seconds within which another worker continues the turns of a killed worker."""

_SETTINGS = {
    "PERDURE_TURN__LEASE_S": str(LEASE_S),
    "PERDURE_TURN__HEARTBEAT_S": str(HEARTBEAT_S),
    "PERDURE_TURN__SWEEP_S": str(SWEEP_S),
    "PERDURE_TURN__TOOL_TIMEOUT_S": str(TOOL_TIMEOUT_S),
    "PERDURE_SHUTDOWN__DRAIN_S": str(DRAIN_S),
    "PERDURE_SHUTDOWN__HARD_EXIT_S": "10",
    "PERDURE_MODEL": "openai:test",
    "PERDURE_WEBHOOK_SECRET": SECRET,
    "PERDURE_REPLY_TASKS": f"replies.*@{REPLY_QUEUE}",
    "PERDURE_REPLY_URLS": "127.0.0.0/8",
    "OPENAI_API_KEY": "none",
}


class Installation:
    """The servers and workers of one test, and what the test's process needs to accept messages."""

    def __init__(
        self,
        database_url: str,
        redis: RedisContainer,
        model_server: ModelServer,
        directory: Path,
        broker_url: str | None = None,
        *,
        pooled_url: str | None = None,
        agent: str = NATIVE,
    ) -> None:
        """`agent` is the agent of the accepted messages. The workers have its module."""
        self._agent = agent
        self._pooled: Database | None = None
        self.redis = redis
        self.model_server = model_server
        self.directory = directory
        self.faults = Faults(directory)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "OPENAI_"))},
            **_SETTINGS,
            "PERDURE_AGENTS": MODULES[agent],
            "PYTHONPATH": str(ROOT),
            "PERDURE_DATABASE_URL": database_url,
            "PERDURE_REDIS_URL": redis.url,
            "PERDURE_BROKER_URL": broker_url or redis.url,
            "PERDURE_DATA_DIR": str(directory / "data"),
            "OPENAI_BASE_URL": model_server.server.base_url,
            SCENE: str(directory),
        }
        settings = _settings(self.environment)
        self.database = accepting = Database(database_url, lease_s=LEASE_S)
        if pooled_url is not None:
            self.environment |= {"PERDURE_DATABASE_URL": pooled_url, "PERDURE_DATABASE_PREPARE": "false"}
            accepting = self._pooled = Database(pooled_url, prepare=False, lease_s=LEASE_S)
        self._waker = CeleryWaker(settings, Addresses(database_url, redis.url, broker_url or redis.url))
        agents = Agents([Agent(name, "Runs in the workers only.") for name in MODULES])
        snapshots = PostgresSnapshots(accepting)
        self.runtime = Runtime(settings, SystemClock(), accepting, agents, _no_model, self._waker, snapshots)
        self.watch = SettlementWatch(self.database)
        self.workers: list[Worker] = []

    def worker(self, *options: str, **environment: str) -> Worker:
        """Start another worker, with additional command-line options and environment variables."""
        name = f"worker-{len(self.workers) + 1}"
        container = WorkerContainer(name, {**self.environment, **environment}, self.directory, options)
        self.workers.append(Worker(container, app=None))
        container.start()
        return self.workers[-1]

    @contextmanager
    def killed_once(self, place: Place, **environment: str) -> Iterator[None]:
        """Two new workers, of which one is killed at the place within the block."""
        workers = [self.worker(**environment) for _ in range(2)]
        for each in workers:
            each.ready()
        self.faults.arm(place, signal.SIGKILL)
        yield
        struck = wait_until(self.faults.fired, f"the fault at {place} fires", 60)
        next(each for each in workers if each.pid == struck.pid).container.wait()

    @property
    def waker(self) -> CeleryWaker:
        """Publishes wake-ups from this process."""
        return self._waker

    def accept(self, text: str, user: str = "ana", **more: Any) -> Accepted:
        """Accept a message, as a gateway does. A message with `parts` has no other text."""
        said = {} if "parts" in more else {"text": text}
        return accept(self.runtime, Incoming(**{"user": UserKey(user), "agent": self._agent, **said, **more}))

    def settled(self, *turn_ids: UUID | str, within_s: float = 30.0) -> list[dict[str, Any]]:
        """Wait until the turns are settled; returns what `read_turn` returns for each turn."""
        ids = [UUID(str(turn_id)) for turn_id in turn_ids]
        waiting = [self.watch.settled(turn_id) for turn_id in ids]
        _, missing = concurrent.futures.wait(waiting, within_s)
        if missing:
            for future in missing:
                future.cancel()
            states = Counter(read_turn(self.database, turn_id)["status"] for turn_id in ids)
            raise AssertionError(f"{len(missing)} of {len(ids)} turns are not settled within {within_s:g} s: {states}")
        return [read_turn(self.database, turn_id) for turn_id in ids]

    def query(self, sql: str, **parameters: Any) -> Sequence[Any]:
        """Run a statement; returns its rows."""
        with self.database.engine.connect() as connection:
            return connection.exec_driver_sql(sql, parameters).fetchall()

    def transcript(self, session_id: UUID | str) -> list[Any]:
        """The rows of a session's transcript, in order."""
        return list(self.query("SELECT * FROM messages WHERE session_id = %(id)s ORDER BY seq", id=session_id))

    def lease_owner(self, session_id: UUID) -> int:
        """The id of the process that holds the session's lease."""
        rows = self.query("SELECT lease_owner FROM sessions WHERE session_id = %(id)s", id=session_id)
        return int(rows[0].lease_owner.split()[0].rpartition(":")[2])

    def snapshot(self) -> dict[str, list[Any]]:
        """The rows of six tables, by table, without the columns that the sweeper or a late tool result may change."""
        return {
            "sessions": self._rows("sessions", "woken_at", "wakes"),
            "turns": self._rows("turns"),
            "inbox": self._rows("inbox"),
            "messages": self._rows("messages"),
            "tool_effects": self._rows("tool_effects", "result", "finished_at"),
            "deliveries": self._rows("deliveries"),
        }

    def check(self) -> None:
        """Assert the invariants: all turns are settled, and each message is answered once, in order."""
        for row in self.query("SELECT session_id, unsettled, turn_count, message_count FROM sessions"):
            messages = self.transcript(row.session_id)
            assert row.unsettled == 0
            assert [message.seq for message in messages] == list(range(1, row.message_count + 1))
            assert not (problems := validate_transcript(_wire(messages))), problems
            self._check_turns(row.session_id, messages)

    def _check_turns(self, session_id: UUID, messages: Iterable[Any]) -> None:
        inbox = self.query(
            "SELECT i.turn_id, i.text, t.seq, t.status FROM inbox AS i JOIN turns AS t USING (turn_id) "
            "WHERE t.session_id = %(id)s AND NOT EXISTS ("  # but for answers to questions, which are results of calls
            "SELECT FROM tool_effects AS e LEFT JOIN tool_effects AS d ON d.effect_id = e.turn_id "  # of a child
            "WHERE i.turn_id IN (e.turn_id, d.turn_id) AND e.waits_for = 'user' "
            "AND e.payload -> 'said' @> jsonb_build_array(jsonb_build_object('text', i.text))"
            ") ORDER BY t.seq, i.position",
            id=session_id,
        )
        begun = [row for row in inbox if row.status != "cancelled"]
        shown = [message for message in messages if message.turn_id in {row.turn_id for row in begun}]
        texts = [(message.turn_id, message.content) for message in shown if message.role == "user"]
        assert texts == [(row.turn_id, row.text) for row in begun], (
            "each message is in the transcript once, in the order accepted"
        )
        replies = Counter(
            message.turn_id
            for message in shown
            if message.role == "assistant" and not message.tool_calls and message.stop_reason != REJECTED
        )
        assert replies == dict.fromkeys((row.turn_id for row in begun), 1), "each turn has one reply"
        order = [message.turn_id for message in shown]
        assert order == sorted(order, key=[row.turn_id for row in begun].index), "turns do not interleave"

    def close(self) -> None:
        """Stop the workers and close this process's connections."""
        for worker in self.workers:
            worker.teardown()
        self.watch.close()
        self._waker.close()
        self.database.close()
        if self._pooled is not None:
            self._pooled.close()

    def _rows(self, table: str, *but: str) -> list[Any]:
        columns = self.query(
            "SELECT column_name FROM information_schema.columns WHERE table_name = %(table)s", table=table
        )
        kept = ", ".join(sorted(row.column_name for row in columns if row.column_name not in but))
        return sorted(map(str, self.query(f"SELECT {kept} FROM {table}")))  # noqa: S608 (names of this file)


def _settings(environment: dict[str, str]) -> Settings:
    """The settings with which this process accepts messages. The reply targets come from the workers' `environment`."""
    return Settings(
        _env_file=None,
        reply_tasks=(environment["PERDURE_REPLY_TASKS"],),
        reply_urls=(environment["PERDURE_REPLY_URLS"],),
        turn=TurnSettings(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, sweep_s=SWEEP_S, tool_timeout_s=TOOL_TIMEOUT_S),
    )


def _no_model(name: str | ForeignModel) -> Model:
    raise AssertionError(f"the accepting side requested the model {name}")


def _wire(rows: Iterable[Any]) -> Any:
    """The transcript's messages as the next model call would send them."""
    messages = [
        Message(
            Role(row.role),
            row.content,
            tuple(ToolCall.from_dict(call) for call in row.tool_calls or ()),
            row.tool_call_id,
        )
        for row in rows
    ]
    return request_body("test", ModelRequest(tuple(messages)))["messages"]
