"""Recall, an agent's own memory and the CaseBank, with the parts of a process.

What briefing, tools, routes and commands share.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from perdure.access.tenants import tenant_of
from perdure.casebank.search import Found, Within, search_for_user
from perdure.casebank.search import search as search_cases
from perdure.casebank.similarity import least_similarity
from perdure.errors import Abandoned, PerdureError
from perdure.memory.recall.agent_memory import Means, OwnMemory
from perdure.memory.recall.search import Recall, embedded_text
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import ModelCall
from perdure.runtime import Runtime
from perdure.settings import CaseScope
from perdure.turns.lease.claim import TurnRef


class Once:
    """An embedder that is asked once for each text, by whoever asks it, also where it fails."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._made: dict[tuple[str, ...], list[Vector] | PerdureError] = {}

    @property
    def name(self) -> str:
        """Of the embedder that is asked."""
        return self._embedder.name

    @property
    def dimensions(self) -> int | None:
        """Likewise."""
        return self._embedder.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """As the embedder does, or did."""
        asked = tuple(texts)
        if asked not in self._made:
            try:
                self._made[asked] = self._embedder.embed(texts, call)
            except Abandoned:
                raise
            except PerdureError as error:
                self._made[asked] = error
        made = self._made[asked]
        if isinstance(made, PerdureError):
            raise made
        return made


def recall_of(runtime: Runtime, embedder: Embedder | None = None) -> Recall:
    """How this process recalls; with `embedder`, by the vectors that it makes."""
    settings = runtime.settings
    return Recall(runtime.database, embedder or runtime.embedder, settings.memory, runtime.clock, settings.timezone)


def cases_near(
    runtime: Runtime,
    query: str,
    k: int,
    within: Within,
    *,
    bank: str | None = None,
    include_archived: bool = False,
) -> list[Found]:
    """The `k` cases of the users `within` whose questions are nearest to `query`, however far: for administrators.

    With a `bank` only cases in it.

    Raises:
        PerdureError: the question could not be made a vector.
        Unavailable: the database cannot be reached.
    """
    embedder = runtime.embedder
    vector = embedder.embed([embedded_text(query)])[0]
    banks = None if bank is None else [bank]
    return search_cases(
        runtime.database, vector, embedder.name, k, within, banks=banks, include_archived=include_archived
    )


def cases_seen_by(runtime: Runtime, user: str, query: str, k: int, *, bank: str | None = None) -> list[Found]:
    """The `k` active cases nearest to `query`, however far, that the prompts of `user` (a user's key) could have.

    Those that the user may see, in the banks of the installation's agents, or in `bank` of these.

    Raises:
        PerdureError: the question could not be made a vector.
    """
    embedder = runtime.embedder
    vector = embedder.embed([embedded_text(query)])[0]
    used = [each for each in runtime.agents.banks if bank in {None, each}]
    return _seen_by(runtime, user, vector, embedder.name, k, banks=used)


def cases_for(
    runtime: Runtime, user: str, query: str, k: int, *, bank: str, embedder: Embedder, call: ModelCall
) -> list[Found]:
    """The cases in `bank` for the prompt of a user who asks `query`: at most `k`, the nearest first.

    `user` is the user's key. Only those of the user's tenant that `PERDURE_CASEBANK__SCOPE` allows and that are as near
    as `PERDURE_CASEBANK__MIN_SIMILARITY` demands.

    Raises:
        PerdureError: the question could not be made a vector.
        Unavailable: the database cannot be reached.
    """
    limits = runtime.settings.casebank
    vector = embedder.embed([embedded_text(query)], call)[0]
    least = least_similarity(embedder.name, limits.min_similarity)
    return _seen_by(runtime, user, vector, embedder.name, k, banks=[bank], least=least)


def _seen_by(
    runtime: Runtime,
    user: str,
    vector: Vector,
    embedder: str,
    k: int,
    *,
    banks: Sequence[str],
    least: float | None = None,
) -> list[Found]:
    """The active cases in `banks` that `PERDURE_CASEBANK__SCOPE` allows in this user's prompts."""
    if runtime.settings.casebank.scope is CaseScope.ALL:
        within = Within(tenant_of(user))
        return search_cases(runtime.database, vector, embedder, k, within, banks=banks, least=least)
    return search_for_user(runtime.database, user, vector, embedder, k, banks=banks, least=least)


def own_memory(runtime: Runtime, session_id: UUID, turn: TurnRef, effect_id: UUID) -> OwnMemory:
    """The memory of the user of `turn`, for one call of a tool."""
    settings = runtime.settings
    means = Means(recall_of(runtime), settings.consolidation, settings.memory.recall_timeout_s)
    return OwnMemory(means, turn.user_id, session_id, turn.turn_id, effect_id, turn.channel)
