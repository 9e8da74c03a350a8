"""Consolidation: extracts memories from ended sessions.

    ended ─▶ claimed ─▶ extracted, embedded ─▶ one transaction: merged and marked ─▶ consolidated

A run is one attempt to consolidate one session. Like a turn, it claims the session with a lease and a fencing token.
Several workers can therefore run consolidations concurrently without conflicts. If the user is erased during a run, the
run writes nothing. A run calls the model and the embedder without an open transaction. One commit writes the memories
and marks the session as consolidated, so that a crash neither loses nor duplicates memories.

If a run fails, it stores its error with the session, and a later run retries the session. After
`PERDURE_CONSOLIDATION__MAX_RUNS` failed runs the session is abandoned: it is not consolidated, and only
`retry_abandoned` makes it due again.

Called by `tasks.memory`, `perdure memory consolidate` and the sweeper.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from uuid import UUID
from zoneinfo import ZoneInfo

from perdure.access.tenants import UserKey
from perdure.clock import Clock
from perdure.database.engine import Database, Executor, as_json
from perdure.database.fencing import Fence
from perdure.errors import (
    CircuitBreakerOpen,
    ContentFiltered,
    ContextTooLong,
    PerdureError,
    ProviderError,
    RateLimited,
    Unavailable,
    loggable,
)
from perdure.memory.consolidation import queries
from perdure.memory.consolidation.candidates import Candidate
from perdure.memory.consolidation.extraction import (
    ConversationMessage,
    KnownMemory,
    UnusableExtraction,
    chunks,
    deduplicate,
    extract,
    message_chars,
)
from perdure.memory.consolidation.judging import Judge, Pair, guard
from perdure.memory.consolidation.merging import EmbeddedCandidate, Judged, MergeCounts, merge, near
from perdure.memory.embedding import register, vector_literal
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import CallAborted, Model, ModelCall, Role
from perdure.settings import ConsolidationSettings
from perdure.text.statements import Relation
from perdure.text.untrusted import cut, first_line
from perdure.text.zones import find_zone

log = logging.getLogger(__name__)

RETRY_S = 3_600
"""Seconds until the sweeper retries a failed session, doubled with each further failure.

`Consolidator.batch` ignores this pause.
"""

MAX_CONCURRENT_USERS = 4
"""The number of users that one batch processes concurrently. A batch mostly waits for the model."""

MOST_KNOWN = 30
"""The most current memories that an extraction is shown."""

_MOST_LINES = 32
_LINE_CHARS = 300
_KNOWN_EACH = 3
"""Of each of the `_MOST_LINES` longest lines of the user, cut to `_LINE_CHARS`, the nearest memories are shown."""

_MOST_JUDGED = 5
_PAIRS_A_CALL = 40
_OWNER = "consolidation"
_SESSIONS_PER_RETRY = 1_000
_ERROR_CHARS = 1_500
_SKIPPED = as_json({"skipped": True})


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The session's memories are stored."""

    merged: MergeCounts = field(default_factory=MergeCounts)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The session had too few turns and is marked as consolidated."""


@dataclass(frozen=True, slots=True)
class ConsolidationFailed:
    """The run failed, and `error` is stored with the session. A later run retries the session unless `given_up`."""

    error: str
    given_up: bool


@dataclass(frozen=True, slots=True)
class ConsolidationNotDue:
    """The session is not due, another process has it or an earlier one of its user, or the user was erased.

    A session is not due while it is open, and after it was consolidated or abandoned.
    """


ConsolidationOutcome = Consolidated | Skipped | ConsolidationFailed | ConsolidationNotDue


@dataclass(frozen=True, slots=True)
class ConsolidationCounts:
    """Counts of a batch. `processed` includes skipped and failed sessions."""

    processed: int = 0
    skipped: int = 0
    failed: int = 0
    stored: int = 0
    duplicates_merged: int = 0
    superseded: int = 0

    def including(self, outcome: ConsolidationOutcome) -> ConsolidationCounts:
        match outcome:
            case Consolidated(merged):
                return replace(
                    self,
                    processed=self.processed + 1,
                    stored=self.stored + merged.stored,
                    duplicates_merged=self.duplicates_merged + merged.duplicates_merged,
                    superseded=self.superseded + merged.superseded,
                )
            case Skipped():
                return replace(self, processed=self.processed + 1, skipped=self.skipped + 1)
            case ConsolidationFailed():
                return replace(self, processed=self.processed + 1, failed=self.failed + 1)
            case ConsolidationNotDue():
                return self

    def as_result(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a batch: `done` of `total` sessions, and the counts so far."""

    done: int
    total: int
    counts: ConsolidationCounts


@dataclass(frozen=True, slots=True)
class Backlog:
    """Counts of ended sessions that are not consolidated.

    `waiting`: sessions that a later run will process. `failing`: those waiting sessions that had at least one failed
    run. `given_up`: abandoned sessions.
    """

    waiting: int
    failing: int
    given_up: int


class _Tally:
    """Thread-safe counts of a batch; reports progress after each session."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None]) -> None:
        self.counts = ConsolidationCounts()
        self.stopped = False
        self._done, self._total, self._on_progress = 0, total, on_progress
        self._lock = threading.Lock()
        on_progress(Progress(0, total, self.counts))

    def add(self, outcome: ConsolidationOutcome) -> None:
        with self._lock:
            self._done += 1
            self.counts = self.counts.including(outcome)
            self._on_progress(Progress(self._done, self._total, self.counts))


class LeaseHold(Protocol):
    """The lease of a claimed session. The process's lease keeper renews the lease."""

    def step_within(self, seconds: float) -> None:
        """Begin a step of at most `seconds`; after that time the lease is no longer renewed."""
        ...

    def calling(self, call: ModelCall) -> AbstractContextManager[None]:
        """Abort `call` at its deadline or when the process shuts down."""
        ...


@dataclass(frozen=True, slots=True)
class Consolidator:
    """Consolidates sessions.

    `timeout_s` limits each call to the model or the embedder. `holding` returns a context manager that renews a claimed
    session's lease.
    """

    database: Database
    clock: Clock
    model: Model
    embedder: Embedder
    limits: ConsolidationSettings
    timeout_s: float
    lease_s: float
    holding: Callable[[UUID, Fence], AbstractContextManager[LeaseHold]]
    timezone: str = "UTC"
    """The zone of the dates of messages whose metadata name no `timezone`."""
    judge: Judge | None = None
    """Decides what the rules do not; `None`: the rules decide alone (`judging`)."""

    def batch(self, on_progress: Callable[[Progress], None] = lambda _: None) -> ConsolidationCounts:
        """Consolidate a batch of due sessions.

        The returned counts leave out sessions that other processes claimed.

        Users are processed concurrently. The sessions of one user are processed one by one, in the order in which they
        ended. `on_progress` is called at the start and after each session, by one thread at a time.

        Raises:
            CallAborted: the process shuts down; the remaining sessions stay due.
            Unavailable: the database cannot be reached; the remaining sessions stay due.
        """
        due = consolidations_due(self.database, self.limits, self.lease_s)
        tally = _Tally(sum(map(len, due)), on_progress)
        with ThreadPoolExecutor(MAX_CONCURRENT_USERS, thread_name_prefix="perdure-consolidation") as threads:
            futures = [threads.submit(self._in_order, sessions, tally) for sessions in due]
        for future in futures:
            future.result()
        return tally.counts

    def _in_order(self, sessions: Sequence[UUID], tally: _Tally) -> None:
        for session_id in sessions:
            if tally.stopped:
                return
            try:
                outcome = self.consolidate(session_id)
            except BaseException:
                tally.stopped = True
                raise
            tally.add(outcome)

    def consolidate(self, session_id: UUID) -> ConsolidationOutcome:
        """Consolidate one session if it is due and no other process has claimed it.

        Raises:
            CallAborted: the process shuts down; the session is released unchanged.
            Unavailable: the database cannot be reached; the session is due again when its lease expires.
        """
        parameters = {
            "session_id": session_id,
            "owner": _OWNER,
            "lease_s": self.lease_s,
            "max_runs": self.limits.max_runs,
        }
        rows = self.database.run(queries.CLAIM, parameters)
        if not rows:
            return ConsolidationNotDue()
        claim = rows[0]
        fence = Fence(claim.token, claim.nonce)
        fenced = fence.on(session_id)
        with self.holding(session_id, fence) as hold:
            if claim.own_turns < self.limits.min_turns:
                marked = self.database.run(queries.MARK, {**fenced, "outcome": _SKIPPED})
                return Skipped() if marked else ConsolidationNotDue()
            try:
                found = self._extract(session_id, UserKey(claim.user_id), claim.message_count, hold)
                judged = self._judge(UserKey(claim.user_id), found, hold)
            except CallAborted:
                released = {**fenced, "forgiven": True, "given_up": False, "error": None, "pause_s": RETRY_S}
                if not self.database.run(queries.RELEASE, released):
                    return (
                        ConsolidationNotDue()
                    )  # aborted because another process claimed the session, not by a shutdown
                raise
            except PerdureError as error:
                return self._failed(fenced, claim.runs, error)
            hold.step_within(self.lease_s)
            merge_arguments: dict[str, Any] = {
                "user_id": UserKey(claim.user_id),
                "embedder": self.embedder.name,
                "found": found,
                "limits": self.limits,
                "judged": judged,
            }
            merged = merge(self.database, self.clock, fenced, **merge_arguments)
        return ConsolidationNotDue() if merged is None else Consolidated(merged)

    def _extract(
        self, session_id: UUID, user_id: UserKey, message_count: int, hold: LeaseHold
    ) -> list[EmbeddedCandidate]:
        """The session's candidate memories and their vectors, ordered by the candidates' source messages.

        The model is shown the user's current memories that are near each part of the conversation. A part that is too
        long for the model is halved.

        Raises:
            CallAborted: the process shuts down.
            PerdureError: the model or the embedder failed.
        """
        calling = partial(self._calling, hold)
        conversation = read_conversation(self.database, session_id, message_chars(message_count), self.timezone)
        candidates: list[Candidate] = []
        shown: list[UUID] = []  # a candidate's `known` becomes a position in this list, counted from 1
        has_memories = bool(self.database.run(queries.HAS_MEMORIES, {"user_id": user_id}))
        unusable: UnusableExtraction | None = None
        usable = False
        parts = deque(part for part in chunks(conversation) if any(said.role is Role.USER for said in part))
        while parts:
            part = parts.popleft()
            try:
                known = self._known(user_id, part, calling) if has_memories else []
                found = extract(self.model, calling, part, known)
                candidates += [replace(each, known=each.known and each.known + len(shown)) for each in found]
                shown += [each.memory_id for each in known]
                usable = True
            except ContextTooLong:
                if len(part) == 1:
                    raise
                middle = len(part) // 2
                parts.extendleft((part[middle:], part[:middle]))
            except (ContentFiltered, UnusableExtraction) as error:
                log.warning("session %s: no memories are extracted from a part: %s", session_id, loggable(error))
                unusable = error if isinstance(error, UnusableExtraction) else unusable
        if unusable is not None and not usable:
            raise unusable
        return self._embedded(deduplicate(candidates), {said.seq: said for said in conversation}, shown, calling)

    @contextmanager
    def _calling(self, hold: LeaseHold) -> Iterator[ModelCall]:
        call = ModelCall(self.clock, self.timeout_s)
        hold.step_within(self.timeout_s)
        with hold.calling(call):
            yield call

    def _known(
        self,
        user_id: UserKey,
        part: Sequence[ConversationMessage],
        calling: Callable[[], AbstractContextManager[ModelCall]],
    ) -> list[KnownMemory]:
        """The current memories that are nearest to what the user says in a part, by words and by vectors."""
        lines = {
            cut(line, _LINE_CHARS): None
            for said in part
            if said.role is Role.USER
            for line in said.content.splitlines()
        }
        texts = sorted(lines, key=len, reverse=True)[:_MOST_LINES]
        if not texts:
            return []
        with calling() as call:
            vectors = self.embedder.embed(texts, call)
        parameters = {
            "user_id": user_id,
            "embedder_id": register(self.database, self.embedder.name, len(vectors[0])).embedder_id,
            "texts": texts,
            "vectors": list(map(vector_literal, vectors)),
            "each": _KNOWN_EACH,
            "most": MOST_KNOWN,
        }
        rows = self.database.run(queries.KNOWN, parameters)
        return [KnownMemory(row.memory_id, row.content, row.valid_from, row.attribute or "") for row in rows]

    def _judge(self, user_id: UserKey, found: Sequence[EmbeddedCandidate], hold: LeaseHold) -> Judged:
        """What the judge says about the candidates and the memories near them, where the rules do not tell.

        A memory that another session stores after this is compared by the rules alone.
        """
        if self.judge is None or not found:
            return {}
        embedder_id = register(self.database, self.embedder.name, len(found[0].vector)).embedder_id
        asked: dict[tuple[str, UUID], Pair] = {}
        for candidate in found:
            content, pairs = candidate.candidate.content, 0
            for row in near(self.database, user_id, embedder_id, candidate):
                pair = Pair(row.content, content, row.similarity)
                if pairs < _MOST_JUDGED and guard(pair, self.limits.similarity) is Relation.UNKNOWN:
                    asked[content, row.memory_id] = pair
                    pairs += 1
        judged: dict[tuple[str, UUID], Relation] = {}
        keys = list(asked)
        for start in range(0, len(keys), _PAIRS_A_CALL):
            batch = keys[start : start + _PAIRS_A_CALL]
            with self._calling(hold) as call:
                judged |= zip(batch, self.judge.judge([asked[key] for key in batch], call), strict=True)
        return judged

    def _embedded(
        self,
        candidates: Sequence[Candidate],
        said: dict[int, ConversationMessage],
        shown: Sequence[UUID],
        calling: Callable[[], AbstractContextManager[ModelCall]],
    ) -> list[EmbeddedCandidate]:
        """The candidates with their vectors. `shown`: the memories whose numbers, from 1, the candidates name."""
        if not candidates:
            return []
        with calling() as call:
            vectors = self.embedder.embed([candidate.content for candidate in candidates], call)
        return [
            _embedded_candidate(
                candidate,
                vector,
                [said[seq] for seq in candidate.sources],
                shown[candidate.known - 1] if candidate.known else None,
            )
            for candidate, vector in zip(candidates, vectors, strict=True)
        ]

    def _failed(self, fenced: dict[str, Any], runs: int, error: PerdureError) -> ConsolidationOutcome:
        """Store the error with the session. A failure caused by a provider outage does not count towards `max_runs`.

        A model whose replies are unusable is not asked again.
        """
        forgiven = _is_outage(error)
        given_up = isinstance(error, UnusableExtraction) or (not forgiven and runs >= self.limits.max_runs)
        message = f"{error.message} {error.details}" if isinstance(error, UnusableExtraction) else error.message
        kept = f"{error.code}: {first_line(message, _ERROR_CHARS)}"
        outcome = {"forgiven": forgiven, "given_up": given_up, "error": kept, "pause_s": RETRY_S}
        if not self.database.run(queries.RELEASE, {**fenced, **outcome}):
            return ConsolidationNotDue()
        log.warning(
            "session %s could not be consolidated (run %d%s): %s",
            fenced["session_id"], runs, ", the last" if given_up else "", loggable(error),
        )  # fmt: skip
        return ConsolidationFailed(kept, given_up)


def consolidations_due(database: Database, limits: ConsolidationSettings, lease_s: float) -> list[list[UUID]]:
    """A batch of due sessions, grouped by user. In each group, the session that ended first comes first."""
    rows = database.run(queries.DUE, {"most": limits.batch_size, "max_runs": limits.max_runs, "lease_s": lease_s})
    by_user: dict[UserKey, list[UUID]] = {}
    for row in rows:
        by_user.setdefault(UserKey(row.user_id), []).append(row.session_id)
    return list(by_user.values())


def consolidations_to_wake(
    database: Database, limits: ConsolidationSettings, most: int, backoff_s: float, lease_s: float
) -> list[UUID]:
    """Return at most `most` sessions for which the sweeper must send a new consolidation task.

    These are sessions whose task was lost, whose worker died, or whose last run failed and may now be repeated.
    """
    parameters = {"most": most, "backoff_s": backoff_s, "lease_s": lease_s, "max_runs": limits.max_runs}
    return [row.session_id for row in database.run(queries.TO_WAKE, parameters)]


def requeue(database: Database, session_ids: Sequence[UUID]) -> None:
    """Make these sessions due for the next sweep, because the broker did not accept their tasks."""
    database.run(queries.REQUEUE, {"session_ids": list(session_ids)})


def retry_abandoned(
    database: Database, limits: ConsolidationSettings, lease_s: float, session_ids: Sequence[UUID] | None = None
) -> int:
    """Make abandoned sessions due again, with a run count of 0. Returns the number of these sessions.

    `session_ids` limits the call to these sessions; `None` means all abandoned sessions. The next batch or sweep
    consolidates them.
    """
    bounds = {"max_runs": limits.max_runs, "lease_s": lease_s}
    if session_ids is not None:
        return len(database.run(queries.RETRY, {**bounds, "session_ids": list(session_ids)}))
    retried = 0
    while found := database.run(queries.GIVEN_UP, {"most": _SESSIONS_PER_RETRY}):
        again = database.run(queries.RETRY, {**bounds, "session_ids": [row.session_id for row in found]})
        retried += len(again)
        if not again:
            break
    return retried


def count_given_up(executor: Executor) -> int:
    """The number of sessions whose consolidation was abandoned."""
    count: int = executor.run(queries.COUNT_GIVEN_UP, {})[0].sessions
    return count


def backlog(database: Database, limits: ConsolidationSettings) -> Backlog:
    """Count the ended sessions that are not consolidated."""
    row = database.run(queries.BACKLOG, {"max_runs": limits.max_runs})[0]
    return Backlog(row.waiting, row.failing, row.given_up)


def read_conversation(
    database: Database, session_id: UUID, most_chars: int, timezone: str = "UTC"
) -> list[ConversationMessage]:
    """The user's and the assistant's messages of a session, oldest first, each cut to `most_chars` characters.

    Excludes messages that a fork copied from its source session, and those that a schedule sent. Also excludes tool
    results, because they may contain recalled memories. The zone of a message is the `timezone` of its turn's metadata,
    or else `timezone`.
    """
    default = ZoneInfo(timezone)
    rows = database.run(queries.CONVERSATION, {"session_id": session_id, "most_chars": most_chars})
    return [
        ConversationMessage(
            row.seq,
            Role(row.role),
            row.content,
            row.created_at,
            row.channel,
            row.author,
            find_zone(row.timezone) or default,
        )
        for row in rows
    ]


def _embedded_candidate(
    candidate: Candidate, vector: Vector, sources: Sequence[ConversationMessage], known_id: UUID | None
) -> EmbeddedCandidate:
    channels = tuple(sorted({said.channel for said in sources}))
    return EmbeddedCandidate(candidate, vector, max(said.said_at for said in sources), channels, known_id)


def _is_outage(error: PerdureError) -> bool:
    if isinstance(error, ProviderError):
        return error.transient is not False
    return isinstance(error, CircuitBreakerOpen | RateLimited | Unavailable)
