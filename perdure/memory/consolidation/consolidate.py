"""From what was said to what is known: ended sessions become memories.

    ended ─▶ claimed ─▶ extracted, embedded ─▶ one transaction: merged and marked ─▶ consolidated

The laws: a session is claimed by the same lease and token as its turns were, so that workers share
a batch without meeting and whoever erases its user fences it off; models and embedders are called
outside of any transaction; what is found is written together with the mark that it was, or not at
all, so a crash neither loses nor doubles. What fails keeps its error, is tried in a later run and
given up after so many: it is never marked as done without being done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from uuid import UUID

from perdure.clock import Clock
from perdure.database.engine import Database, Executor, as_json
from perdure.database.fencing import Fence
from perdure.errors import CircuitBreakerOpen, PerdureError, ProviderError, RateLimited, Unavailable, loggable
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.candidates import Candidate
from perdure.memory.consolidation.extraction import ConversationMessage, chunks, deduplicate, extract, message_chars
from perdure.memory.consolidation.merging import EmbeddedCandidate, MergeCounts, merge
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import CallAborted, Model, ModelCall, Role
from perdure.settings import ConsolidationSettings
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

RETRY_S = 3_600
"""Seconds that a session which failed waits for the sweeper; twice as long each time. A run does not wait."""

MAX_CONCURRENT_USERS = 4
"""Users whose sessions one batch has in work at once: most of the time is waiting for the model."""

_OWNER = "consolidation"
_RETRIED_AT_ONCE = 1_000
_SKIPPED = as_json({"skipped": True})


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The session's memories are stored, `merged` says how."""

    merged: MergeCounts = field(default_factory=MergeCounts)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The session had too few turns; it is marked, and never looked at again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The session stays as it was, with `error`, until a later run; `given_up` says that none follows."""

    error: str
    given_up: bool


@dataclass(frozen=True, slots=True)
class NotDue:
    """Not ended, consolidated already, given up, being consolidated elsewhere, or erased meanwhile."""


ConsolidationOutcome = Consolidated | Skipped | Failed | NotDue


@dataclass(frozen=True, slots=True)
class ConsolidationCounts:
    """What became of a batch. `processed` counts every session taken, those skipped and failed among them."""

    processed: int = 0
    skipped: int = 0
    failed: int = 0
    stored: int = 0
    duplicates_merged: int = 0
    superseded: int = 0

    def including(self, outcome: ConsolidationOutcome) -> ConsolidationCounts:
        """These, and one session more."""
        match outcome:
            case Consolidated(merged):
                return self._plus(1, 0, 0, merged)
            case Skipped():
                return self._plus(1, 1, 0, MergeCounts())
            case Failed():
                return self._plus(1, 0, 1, MergeCounts())
            case NotDue():
                return self

    def as_result(self) -> dict[str, int]:
        """As `memory.consolidate` returns it."""
        return asdict(self)

    def _plus(self, processed: int, skipped: int, failed: int, merged: MergeCounts) -> ConsolidationCounts:
        return ConsolidationCounts(
            self.processed + processed,
            self.skipped + skipped,
            self.failed + failed,
            self.stored + merged.stored,
            self.duplicates_merged + merged.duplicates_merged,
            self.superseded + merged.superseded,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Of the sessions of a batch, how many were looked at, and what became of them so far."""

    done: int
    total: int
    counts: ConsolidationCounts


@dataclass(frozen=True, slots=True)
class Backlog:
    """Ended sessions without memories: those that wait, those among them that failed before, those given up."""

    waiting: int
    failing: int
    given_up: int


class _Tally:
    """What becomes of a batch, noted by several threads."""

    def __init__(self, total: int, tell: Callable[[Progress], None]) -> None:
        self.counts = ConsolidationCounts()
        self.broken_off = False
        self._done, self._total, self._tell = 0, total, tell
        self._lock = threading.Lock()
        tell(Progress(0, total, self.counts))

    def add(self, outcome: ConsolidationOutcome) -> None:
        with self._lock:
            self._done += 1
            self.counts = self.counts.including(outcome)
            self._tell(Progress(self._done, self._total, self.counts))


class LeaseHold(Protocol):
    """What consolidating a session knows of its lease, which somebody else keeps."""

    def step_within(self, seconds: float) -> None:
        """The step that begins now ends within `seconds`; later, its lease is not renewed."""
        ...

    def calling(self, call: ModelCall) -> AbstractContextManager[None]:
        """Have `call` ended when its time is up or the process shuts down."""
        ...


@dataclass(frozen=True, slots=True)
class Consolidator:
    """What consolidating takes. `holding` keeps the lease that was taken under a fence."""

    database: Database
    clock: Clock
    model: Model
    embedder: Embedder
    limits: ConsolidationSettings
    timeout_s: float
    lease_s: float
    holding: Callable[[UUID, Fence], AbstractContextManager[LeaseHold]]

    def batch(self, tell: Callable[[Progress], None] = lambda _: None) -> ConsolidationCounts:
        """Consolidate the sessions that are due, as many as a batch has; what others took is theirs to count.

        Several users' sessions are in work at once, one user's one after another as they ended. `tell`
        hears of each, and is called by one thread at a time.

        Raises:
            CallAborted: the process shuts down; the rest is still due.
            Unavailable: the database cannot be reached; the rest is still due.
        """
        due = consolidations_due(self.database, self.limits, self.lease_s)
        tally = _Tally(sum(map(len, due)), tell)
        with ThreadPoolExecutor(MAX_CONCURRENT_USERS, thread_name_prefix="perdure-consolidation") as threads:
            works = [threads.submit(self._one_after_another, sessions, tally) for sessions in due]
        for work in works:
            work.result()
        return tally.counts

    def _one_after_another(self, sessions: Sequence[UUID], tally: _Tally) -> None:
        for session_id in sessions:
            if tally.broken_off:
                return
            try:
                outcome = self.consolidate(session_id)
            except BaseException:
                tally.broken_off = True
                raise
            tally.add(outcome)

    def consolidate(self, session_id: UUID) -> ConsolidationOutcome:
        """Turn one session into memories, if it is due and nobody is at it.

        Raises:
            CallAborted: the process shuts down; the session is given back as it was.
            Unavailable: the database cannot be reached; it is due again when its lease has run out.
        """
        asked = {"session_id": session_id, "owner": _OWNER, "lease_s": self.lease_s, "max_runs": self.limits.max_runs}
        rows = self.database.run(queries.CLAIM, asked)
        if not rows:
            return NotDue()
        claim = rows[0]
        fence = Fence(claim.token, claim.nonce)
        tenure = fence.on(session_id)
        with self.holding(session_id, fence) as hold:
            if claim.own_turns < self.limits.min_turns:
                return Skipped() if self.database.run(queries.MARK, {**tenure, "outcome": _SKIPPED}) else NotDue()
            try:
                found = self._found(session_id, claim.message_count, hold)
            except CallAborted:
                given_back = {**tenure, "forgiven": True, "given_up": False, "error": None, "pause_s": RETRY_S}
                if not self.database.run(queries.RELEASE, given_back):
                    return NotDue()  # it was not the process that ended the call, but somebody's claim
                raise
            except PerdureError as error:
                return self._failed(tenure, claim.runs, error)
            hold.step_within(self.lease_s)
            given = {"user_id": claim.user_id, "embedder": self.embedder.name, "found": found, "limits": self.limits}
            merged = merge(self.database, self.clock, tenure, **given)
        return NotDue() if merged is None else Consolidated(merged)

    def _found(self, session_id: UUID, message_count: int, hold: LeaseHold) -> list[EmbeddedCandidate]:
        """What the session holds that is worth remembering, with vectors, in the order in which it was said.

        Raises:
            CallAborted: the process shuts down.
            PerdureError: the model or the embedder failed.
        """

        @contextmanager
        def calling() -> Iterator[ModelCall]:
            call = ModelCall(self.clock, self.timeout_s)
            hold.step_within(self.timeout_s)
            with hold.calling(call):
                yield call

        conversation = read_conversation(self.database, session_id, message_chars(message_count))
        candidates = [candidate for part in chunks(conversation) for candidate in extract(self.model, calling, part)]
        return self._embedded(deduplicate(candidates), {said.seq: said for said in conversation}, calling)

    def _embedded(
        self,
        candidates: Sequence[Candidate],
        said: dict[int, ConversationMessage],
        calling: Callable[[], AbstractContextManager[ModelCall]],
    ) -> list[EmbeddedCandidate]:
        if not candidates:
            return []
        with calling() as call:
            vectors = self.embedder.embed([candidate.content for candidate in candidates], call)
        return [
            _found(candidate, vector, [said[seq] for seq in candidate.sources])
            for candidate, vector in zip(candidates, vectors, strict=True)
        ]

    def _failed(self, tenure: dict[str, Any], runs: int, error: PerdureError) -> ConsolidationOutcome:
        """Keep the error with the session. An outage is no fault of the session's, and costs it no run."""
        forgiven = _is_outage(error)
        given_up = not forgiven and runs >= self.limits.max_runs
        kept = f"{error.code}: {first_line(error.message)}"
        outcome = {"forgiven": forgiven, "given_up": given_up, "error": kept, "pause_s": RETRY_S}
        if not self.database.run(queries.RELEASE, {**tenure, **outcome}):
            return NotDue()
        log.warning(
            "session %s could not be consolidated (run %d%s): %s",
            tenure["session_id"], runs, ", the last" if given_up else "", loggable(error),
        )  # fmt: skip
        return Failed(kept, given_up)


def consolidations_due(database: Database, limits: ConsolidationSettings, lease_s: float) -> list[list[UUID]]:
    """A batch of ended sessions to consolidate that nobody is at, those that ended first; user by user, in order."""
    rows = database.run(queries.DUE, {"most": limits.batch_size, "max_runs": limits.max_runs, "lease_s": lease_s})
    by_user: dict[str, list[UUID]] = {}
    for row in rows:
        by_user.setdefault(row.user_id, []).append(row.session_id)
    return list(by_user.values())


def consolidations_to_wake(
    database: Database, limits: ConsolidationSettings, most: int, backoff_s: float, lease_s: float
) -> list[UUID]:
    """For the sweeper: sessions whose wake-up or whose worker was lost, and those that failed a while ago."""
    asked = {"most": most, "backoff_s": backoff_s, "lease_s": lease_s, "max_runs": limits.max_runs}
    return [row.session_id for row in database.run(queries.FORGOTTEN, asked)]


def requeue(database: Database, session_ids: Sequence[UUID]) -> None:
    """Wake-ups that nobody took, or that came where there was no room: the sweeper issues them again."""
    database.run(queries.UNWAKE, {"session_ids": list(session_ids)})


def retry_abandoned(
    database: Database, limits: ConsolidationSettings, lease_s: float, session_ids: Sequence[UUID] | None = None
) -> int:
    """Make sessions that were given up due again, with all their runs; returns how many there were.

    `session_ids`: only those among them; `None`: all. The next batch, or the sweeper, consolidates them.

    Raises:
        Unavailable: the database cannot be reached.
    """
    bounds = {"max_runs": limits.max_runs, "lease_s": lease_s}
    if session_ids is not None:
        return len(database.run(queries.RETRY, {**bounds, "session_ids": list(session_ids)}))
    retried = 0
    while found := database.run(queries.GIVEN_UP, {"most": _RETRIED_AT_ONCE}):
        again = database.run(queries.RETRY, {**bounds, "session_ids": [row.session_id for row in found]})
        retried += len(again)
        if not again:
            break
    return retried


def count_given_up(executor: Executor) -> int:
    """How many sessions' consolidation was given up."""
    count: int = executor.run(queries.COUNT_GIVEN_UP, {})[0].sessions
    return count


def backlog(database: Database, limits: ConsolidationSettings) -> Backlog:
    """What is still to be consolidated."""
    row = database.run(queries.BACKLOG, {"max_runs": limits.max_runs})[0]
    return Backlog(row.waiting, row.failing, row.given_up)


def read_conversation(database: Database, session_id: UUID, most_chars: int) -> list[ConversationMessage]:
    """What user and assistant said in a session, oldest first, each message up to `most_chars` characters.

    Neither the results of tools are among it (what was recalled is one) nor, in a fork, what was copied.
    """
    rows = database.run(queries.CONVERSATION, {"session_id": session_id, "most_chars": most_chars})
    return [
        ConversationMessage(row.seq, Role(row.role), row.content, row.created_at, row.channel, row.author)
        for row in rows
    ]


def _found(candidate: Candidate, vector: Vector, sources: Sequence[ConversationMessage]) -> EmbeddedCandidate:
    channels = tuple(sorted({said.channel for said in sources}))
    return EmbeddedCandidate(candidate, vector, max(said.said_at for said in sources), channels)


def _is_outage(error: PerdureError) -> bool:
    if isinstance(error, ProviderError):
        return error.transient is not False
    return isinstance(error, CircuitBreakerOpen | RateLimited | Unavailable)
