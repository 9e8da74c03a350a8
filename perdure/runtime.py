"""The objects that a process creates at its start and that all its threads share.

The packages that implement turns, sessions and memory import neither Celery nor the web framework. They notify the
workers through a `Waker`, which each process supplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from perdure.models.embedders.hashing import HashEmbedder
from perdure.observe.traces import OFF, Traces
from perdure.resilience.duties import Duties
from perdure.settings import Settings, TurnSettings
from perdure.tools.leaks import Leaks

if TYPE_CHECKING:
    from perdure.agents import Agents
    from perdure.casebank.lookup import CaseLookup
    from perdure.clock import Clock
    from perdure.database.engine import Database
    from perdure.events.writer import EventWriter
    from perdure.files.store import Files
    from perdure.memory.recall.search import Recall
    from perdure.memory.redis.memory import RedisMemory
    from perdure.models.embedders.protocol import Embedder
    from perdure.models.protocol import ForeignModel, Model
    from perdure.models.windows import LearnedWindows
    from perdure.observe.measures import Measures
    from perdure.resilience.registry import Switchboard
    from perdure.snapshots.store import SnapshotStore
    from perdure.tools.awaited.port import TaskCalls
    from perdure.tools.mcp.connections import Connections
    from perdure.users.erase import Eraser, RedisFile


class Waker(Protocol):
    """Tells the workers that there is work. Each method publishes one hint through the broker; a hint may be lost.

    A method may queue its hint instead, for a background thread that publishes the hint. Each method returns within
    about a second and never raises. A method returns False if its hint was neither published nor queued. The sweeper
    publishes lost hints again.
    """

    def session(self, session_id: UUID, priority: int) -> bool:
        """Wake a worker to claim this session, which has unsettled turns."""
        ...

    def drain(self, session_id: UUID, priority: int) -> bool:
        """Wake a worker to run the turns of due sessions, this one among them, after its commit.

        Publishes nothing while the broker still has enough wake-ups that no worker has taken (`has_enough`).
        """
        ...

    def has_enough(self) -> bool:
        """Whether the broker has so many wake-ups that no worker has taken that another one would start no drain.

        Every worker that can run a turn takes wake-ups at once, so all workers are busy. The next one with room takes a
        wake-up, and then runs whatever is due. This holds whatever process dies: a wake-up that a killed worker has
        taken no longer counts.
        """
        ...

    def delivery(self, delivery_id: UUID) -> bool:
        """Wake a worker to send this delivery."""
        ...

    def ending(self, session_id: UUID) -> bool:
        """Wake a worker to end this session. The end was requested, and the session has no unsettled turn."""
        ...

    def consolidation(self, session_id: UUID | None) -> bool:
        """Wake a worker to consolidate this ended session, or a batch of due sessions if `session_id` is `None`."""
        ...

    def casebank(self) -> bool:
        """Wake a worker to continue the CaseBank's pending run."""
        ...


class AcceptingRuntime(Protocol):
    """The part of a `Runtime` that a process needs to accept messages."""

    @property
    def settings(self) -> Settings: ...

    @property
    def clock(self) -> Clock:
        """The clock. Its time becomes part of the ids of turns."""
        ...

    @property
    def database(self) -> Database: ...

    @property
    def agents(self) -> Agents:
        """The agents that a message may name."""
        ...

    @property
    def files(self) -> Files: ...

    @property
    def wake(self) -> Waker:
        """The `Waker` to call after a message is committed."""
        ...

    @property
    def traces(self) -> Traces:
        """Traces the accept of a message."""
        ...


class Recording(Protocol):
    """A recorded turn that is replayed: what its prompts quoted, and the results of its calls."""

    @property
    def parts(self) -> Sequence[Mapping[str, Any]]:
        """The quoted parts of the prompt (`turns.prompt.parts.Part`), as dictionaries."""
        ...

    @property
    def case_ids(self) -> tuple[str, ...]: ...

    def answer(self, tool: str, arguments: str) -> tuple[str, str] | None:
        """Status and text of the recorded result of a call; `None` if the tool itself runs."""
        ...


def _measures() -> Measures:
    from perdure.observe.measures import Measures  # noqa: PLC0415 (a process that only accepts messages measures nothing)

    return Measures()


@dataclass(frozen=True)
class Runtime:
    """The objects that one process creates at its start, and the services that use these objects."""

    settings: Settings
    clock: Clock
    database: Database
    agents: Agents
    models: Callable[[str | ForeignModel], Model]
    """Returns the model with a name in the form of `PERDURE_MODEL`, or from a model object of pydantic-ai."""
    wake: Waker
    snapshots: SnapshotStore
    """The store of snapshots that `PERDURE_SNAPSHOTS` selects."""
    redis_memory: RedisMemory | None = None
    """The layers of memory in Redis; `None` in a process that neither runs turns nor ends sessions."""
    embedder: Embedder = field(default_factory=lambda: HashEmbedder(384))
    breakers: Switchboard | None = None
    """The circuit breakers, for commands and HTTP routes. Models from `models` already use these breakers."""
    connections: Connections | None = None
    """Connections to the agents' MCP servers; `None` in a process that runs no turns."""
    leaks: Leaks = field(default_factory=lambda: Leaks(TurnSettings().max_leaked_threads))
    """Counts the threads that still run a tool or a hook after its time limit."""
    quoting_key: bytes = field(default=b"", repr=False)
    """The HMAC key for the codes that mark quotations in prompts. If it is empty, the process uses a random key.

    All workers share the key, so that an unchanged prompt stays in the provider's prompt cache.
    """
    redis_file: RedisFile | None = None
    """The append-only file of the embedded Redis; `None` if Redis is not embedded."""
    redis_url: str | None = None
    """The URL of the Redis from which the gateway reads event streams."""
    events: EventWriter | None = None
    """Writes the events of turns; `None` in a process that runs no turns."""
    calls: TaskCalls | None = None
    """Sends the tasks of Celery tools; `None` in a process that runs no turns."""

    recording: Recording | None = None
    """The recorded turn that this runtime replays, for `perdure.testing.recorded`."""

    tools_left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The tools that do not fit an agent's prompts, by agent, as this process has logged them."""

    measures: Measures = field(default_factory=_measures)
    """What this process counts and times."""

    traces: Traces = OFF
    """Traces turns, if the environment asks for that."""

    @cached_property
    def duties(self) -> Duties:
        return Duties(self.clock, self.settings.turn.sweep_s, observe=self.measures.duty)

    @cached_property
    def recall(self) -> Recall:
        """The search over messages and memories."""
        from perdure.memory.recall.reranking import resolve_reranker  # noqa: PLC0415 (as the next)
        from perdure.memory.recall.search import Recall  # noqa: PLC0415 (a process that only accepts messages never searches)

        settings = self.settings
        reranker = resolve_reranker(settings, lambda: self.models(settings.summary_model or settings.model))
        return Recall(self.database, self.embedder, settings.memory, self.clock, settings.timezone, reranker)

    @cached_property
    def cases(self) -> CaseLookup:
        from perdure.casebank.lookup import CaseLookup  # noqa: PLC0415 (as above)

        return CaseLookup(self.database, self.embedder, self.settings.casebank, lambda: self.agents.banks)

    @cached_property
    def files(self) -> Files:
        """The files of messages."""
        from perdure.files.store import Files  # noqa: PLC0415 (as above)

        return Files(self.database, self.settings.files, self.clock)

    @cached_property
    def windows(self) -> LearnedWindows:
        """The windows of models, as far as refused prompts have shown them."""
        from perdure.models.windows import LearnedWindows  # noqa: PLC0415 (as above)

        return LearnedWindows(self.database, self.clock)

    @cached_property
    def eraser(self) -> Eraser:
        """Erases users."""
        from perdure.users.erase import Eraser  # noqa: PLC0415 (as above)

        return Eraser(
            database=self.database,
            clock=self.clock,
            snapshots=self.snapshots,
            redis_memory=self.redis_memory,
            lease_s=self.settings.turn.lease_s,
            files=self.files,
            file=self.redis_file,
            revoke=None if self.calls is None else self.calls.revoke,
        )

    def called_models(self, *, summaries: bool = False) -> set[str]:
        """The names of the models that turns call, with the fallbacks. `summaries`: the one for summaries, too."""
        from perdure.models.endpoints import canonical  # noqa: PLC0415 (as above)
        from perdure.models.protocol import name_of  # noqa: PLC0415 (as above)

        settings = self.settings
        named = [
            settings.model,
            *settings.fallback_models,
            *(agent.asked_model(settings.model) for agent in self.agents),
        ]
        if summaries and settings.summary_model is not None:
            named.append(settings.summary_model)
        return {canonical(name_of(each), settings) for each in named}

    def close(self) -> None:
        """Export the traces, and close the connections to MCP servers, Redis, the snapshot store and PostgreSQL.

        All other threads of the process must have ended.
        """
        self.traces.close()
        for each in (self.connections, self.redis_memory, self.snapshots, self.breakers, self.database):
            if each is not None:
                each.close()
