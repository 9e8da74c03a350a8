"""The systems of the crash table, from outside: how their workers start, how a turn is sent, and when it has ended.

The packages of other systems are imported on use, because they may not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.crashes import on_celery, on_perdure, script
from benchmarks.crashes.harness import Place, System
from perdure.access.tenants import UserKey
from perdure.agents import Agent, Agents
from perdure.assembly import Addresses
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.models.protocol import ForeignModel, Model
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming, ReplyTo
from perdure.workers.publish.wake import CeleryWaker

_RECEIVERS = "127.0.0.0/8"
_ENDED = """
    SELECT settled_at IS NOT NULL AND NOT EXISTS (
        SELECT FROM deliveries WHERE deliveries.turn_id = turns.turn_id AND deliveries.status = 'pending')
    FROM turns WHERE turn_id = %(turn_id)s
"""


@dataclass(frozen=True, slots=True)
class Turns:
    """Starts a turn, and returns a function that returns whether it has ended."""

    start: Callable[[str], Callable[[], bool]]
    turns: dict[str, Callable[[], bool]]

    def send(self, turn: str) -> None:
        self.turns[turn] = self.start(turn)

    def has_ended(self, turn: str) -> bool:
        return self.turns[turn]()


class Perdure(System):
    """perdure, two workers with default settings, as `perdure up` starts them. The reply goes to a `reply_to` URL."""

    limit = "lease 30 s, sweep 5 s, tool 30 s, delivery 60 s"
    document = "docs/operating.md, docs/agents-and-tools.md"
    packages = ("perdure", "celery")
    has_tables = True

    def __init__(self, agent: Agent, declared: str) -> None:
        self._agent = agent
        self.name = f"perdure, {declared}"

    def argv(self, _place: Place, number: int) -> Sequence[str]:
        """The command of a worker."""
        return ["-P", "-m", "perdure.cli", "worker", "--name", f"crashes{number}"]

    def environment(self, place: Place) -> Mapping[str, str]:
        """Default settings, with the agents, the model and the receiver."""
        return place.setup.environment(
            place.database,
            PERDURE_AGENTS=on_perdure.__name__,
            PERDURE_MODEL=on_perdure.ScriptedModel.name,
            PERDURE_REPLY_URLS=_RECEIVERS,
        )

    @contextmanager
    def opened(self, place: Place) -> Iterator[Turns]:
        """A process that accepts messages."""
        settings = Settings(_env_file=None, reply_urls=(_RECEIVERS,))
        url = place.database.render_as_string(hide_password=False)
        agents = Agents([on_perdure.unsafe, on_perdure.probed, on_perdure.idempotent])
        with (
            closing(Database(place.database)) as database,
            closing(CeleryWaker(settings, Addresses(url, place.redis, place.redis))) as waker,
        ):
            snapshots = PostgresSnapshots(database)
            runtime = Runtime(settings, SystemClock(), database, agents, _no_model, waker, snapshots)

            def start(turn: str) -> Callable[[], bool]:
                incoming = Incoming(
                    user=UserKey(turn),
                    text=script.text_of(turn),
                    agent=self._agent.name,
                    reply_to=ReplyTo(url=f"{place.recorder.url}/replies/{turn}"),
                )
                parameters = {"turn_id": accept(runtime, incoming).turn_id}

                def has_ended() -> bool:
                    with database.engine.connect() as connection:
                        return bool(connection.exec_driver_sql(_ENDED, parameters).scalar_one())

                return has_ended

            yield Turns(start, {})


def _no_model(name: str | ForeignModel) -> Model:
    raise AssertionError(f"the accepting process has no model {name}")


class Dbos(System):
    """DBOS on a single server without Conductor: a process that is started again recovers its workflows."""

    name = "DBOS"
    limit = "the start of the process"
    document = "docs.dbos.dev/production/workflow-recovery, ai.pydantic.dev/durable_execution/dbos"
    packages = ("dbos", "pydantic-ai-slim")
    workers = lanes = 1

    def argv(self, place: Place, _number: int) -> Sequence[str]:
        """The command of the process."""
        return ["-m", "benchmarks.crashes.on_dbos", place.postgres]

    @contextmanager
    def opened(self, place: Place) -> Iterator[Turns]:
        """A client. It connects on its first use, because the process creates the tables."""
        with closing(_DbosClient(place.postgres)) as client:
            yield Turns(client.start, {})


class _DbosClient:
    def __init__(self, database: str) -> None:
        self._database = database
        self._client: Any = None

    def start(self, turn: str) -> Callable[[], bool]:
        self._client = self._client or import_module("dbos").DBOSClient(system_database_url=self._database)
        options = {"queue_name": script.QUEUE, "workflow_name": script.TASK, "workflow_id": turn}
        handle = self._client.enqueue(options, turn)
        return lambda: handle.get_status().status not in ("ENQUEUED", "PENDING")

    def close(self) -> None:
        if self._client is not None:
            self._client.destroy()


class LangGraph(System):
    """LangGraph in one process. A client's request starts a turn, and is repeated until it is answered."""

    name = "LangGraph"
    limit = "the start of the process"
    document = "docs.langchain.com/oss/python/langgraph/durable-execution"
    packages = ("langgraph", "langgraph-checkpoint-postgres")
    workers = lanes = 1

    def argv(self, place: Place, _number: int) -> Sequence[str]:
        """The command of the process."""
        return ["-m", "benchmarks.crashes.on_langgraph", place.postgres]

    @contextmanager
    def opened(self, place: Place) -> Iterator[Turns]:
        """The client."""
        yield Turns(place.recorder.request, {})


class Celery(System):
    """Celery with Redis, two workers."""

    name = "Celery"
    limit = f"visibility timeout {on_celery.VISIBILITY_S} s, not 3600; sweep 10 s, not 100"
    document = "docs.celeryq.dev: userguide/tasks, getting-started/backends-and-brokers/redis"
    packages = ("celery", "kombu")

    def argv(self, _place: Place, number: int) -> Sequence[str]:
        """The command of a worker."""
        app = on_celery.__name__
        return ["-m", "celery", "-A", app, "worker", "-l", "INFO", "-c", "1", "-n", f"crashes{number}@%h"]

    def environment(self, place: Place) -> Mapping[str, str]:
        """The address of Redis."""
        return {**super().environment(place), on_celery.REDIS: place.redis}

    @contextmanager
    def opened(self, place: Place) -> Iterator[Turns]:
        """An application that sends tasks."""
        with on_celery.application(place.redis) as app:
            yield Turns(lambda turn: app.send_task(script.TASK, [turn]).ready, {})


class Absurd(System):
    """Absurd, two workers."""

    name = "Absurd"
    limit = "claim timeout 120 s"
    document = "earendil-works.github.io/absurd: concepts, sdks/python"
    packages = ("absurd-sdk", "absurdctl", "pydantic-ai-slim")

    def argv(self, place: Place, number: int) -> Sequence[str]:
        """The command of a worker."""
        return ["-m", "benchmarks.crashes.on_absurd", place.postgres, f"worker {number}"]

    @contextmanager
    def opened(self, place: Place) -> Iterator[Turns]:
        """The tables of `absurdctl init`, a queue, and a client."""
        with import_module("psycopg").connect(place.postgres, autocommit=True) as connection:
            connection.execute(import_module("absurdctl").BUNDLED_SCHEMA_SQL)
        with closing(import_module("absurd_sdk").Absurd(place.postgres, queue_name=script.QUEUE)) as client:
            client.create_queue(script.QUEUE)

            def start(turn: str) -> Callable[[], bool]:
                task_id = client.spawn(script.TASK, {"turn": turn}, queue=script.QUEUE)["task_id"]
                return lambda: client.fetch_task_result(task_id).state in ("completed", "failed", "cancelled")

            yield Turns(start, {})


SYSTEMS: Mapping[str, Sequence[System]] = {
    "perdure": [
        Perdure(on_perdure.unsafe, "unsafe"),
        Perdure(on_perdure.probed, "unsafe, probe"),
        Perdure(on_perdure.idempotent, "idempotent"),
    ],
    "dbos": [Dbos()],
    "langgraph": [LangGraph()],
    "celery": [Celery()],
    "absurd_sdk": [Absurd()],
}
"""By the module that must be installed."""
