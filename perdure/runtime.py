"""What a process of perdure is made of: given once at its start, shared by all its threads.

The domain knows neither Celery nor the web, so whoever starts a process hands in how its
wake-ups travel (`Waker`); everything else follows from the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from perdure.agents import Agents
from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.memory.redis.memory import RedisMemory
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder
from perdure.models.protocol import Model
from perdure.resilience.registry import Switchboard
from perdure.settings import Settings, TurnSettings
from perdure.snapshots.store import SnapshotStore
from perdure.tools.leaks import Leaks
from perdure.tools.mcp.connections import Connections
from perdure.users.erase import RedisFile


class Waker(Protocol):
    """Hints to the workers. Each returns within about a second, and never raises.

    What they return says whether the broker took the hint; that it did not is no error, for
    the sweeper issues it again.
    """

    def session(self, session_id: UUID, priority: int) -> bool:
        """Somebody should claim this session: it has turns to run."""
        ...

    def delivery(self, delivery_id: UUID) -> bool:
        """Somebody should send this delivery."""
        ...

    def ending(self, session_id: UUID) -> bool:
        """Somebody should end this session: that was asked for, and it has nothing left to run."""
        ...

    def consolidation(self, session_id: UUID | None) -> bool:
        """Somebody should draw memories from this session, which has ended; None: from all that wait for it."""
        ...

    def casebank(self) -> bool:
        """A worker should go on with the run of the CaseBank that waits for one."""
        ...


@dataclass(frozen=True)
class Runtime:
    """The parts of one process. `models` finds a model by its name in `PERDURE_MODEL`'s form.

    `snapshots` is where `PERDURE_SNAPSHOTS` says that sessions are saved before they answer.

    `leaks` counts the threads of tools and hooks that ran past their time.

    `breakers` are the fleet's, for those who look at them; models have theirs already.

    `redis_memory` is the memory in Redis, None in a process that neither runs turns nor ends sessions.

    `redis_file` is the append-only file of an embedded Redis, None where Redis is another's.

    `connections` are those to the agents' MCP servers, None in a process that runs no turns.

    `quoting_key` makes the codes of quotations in prompts; empty: each process has its own. Workers share one, so that
    a prompt's prefix does not depend on which of them sends it.

    `embedder` makes the vectors that memory is searched by; the built-in one unless another is given.
    """

    settings: Settings
    clock: Clock
    database: Database
    agents: Agents
    models: Callable[[str], Model]
    wake: Waker
    snapshots: SnapshotStore
    redis_memory: RedisMemory | None = None
    embedder: Embedder = field(default_factory=lambda: HashEmbedder(384))
    breakers: Switchboard | None = None
    connections: Connections | None = None
    leaks: Leaks = field(default_factory=lambda: Leaks(TurnSettings().max_leaked_threads))
    quoting_key: bytes = field(default=b"", repr=False)
    redis_file: RedisFile | None = None
