"""The CaseBank: the bodies and answers of `/v1/casebank` and `/v1/consolidation`."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from perdure.channels.http.schemas.answer import Answer, Instant


class NoMembers(BaseModel):
    """A body without members. Members such as `dry_run` are refused: the caller may mean the other route."""

    model_config = ConfigDict(extra="forbid")


class Merged(Answer):
    """A duplicate, and the case that takes over its counts."""

    keeper: str
    removed: str
    similarity: float


class Spared(Answer):
    """A case that one rule would remove and another protects."""

    case_id: str
    rule: str
    reason: str


class PruningDetails(Answer):
    """The cases of a plan."""

    removed: list[str]
    merged: list[Merged]
    archived: list[str]
    spared: list[Spared]


class Pruning(Answer):
    """The cases that are removed, and those that are spared."""

    removed_cases: int
    merged_cases: int
    archived_cases: int
    details: PruningDetails


class Pruned(Pruning):
    """What a run removed, or what a dry run would remove; `phase` is a run's."""

    dry_run: bool
    run_id: UUID | None
    phase: str | None = None


class PruningProgress(Answer):
    """The progress of a run or a dry run."""

    run_id: UUID
    dry_run: bool
    phase: Literal[
        "planning", "notifying", "waiting_approval", "applying", "reporting", "done", "withheld", "rejected", "expired"
    ]
    done: int
    total: int
    under_way: bool
    decided_by: str | None
    error: str | None
    started_at: Instant
    planned_at: Instant | None
    notified_at: Instant | None
    expires_at: Instant | None
    finished_at: Instant | None


class PruningRun(PruningProgress):
    """A run: its progress, its plan once there is one, and its outcome as far as it is applied."""

    plan: Pruning | None
    outcome: Pruning | None


class Restored(Answer):
    """A case that is active again."""

    case_id: str
    status: Literal["restored"]


class NearCase(Answer):
    """A case, and the cosine similarity of its question to the query."""

    case_id: str
    query: str
    response_text: str
    category_path: str | None
    usage_count: int
    success_rate: float | None
    status: Literal["active", "archived"]
    similarity: float
    tenant: str | None
    user_id: str | None
    bank: str
    shared_at: str | None


class NearCases(Answer):
    """The nearest cases, nearest first."""

    results: list[NearCase]


class SharedCase(Answer):
    """A case, and the time at which it was shared with all users of its bank; null: it is not shared."""

    case_id: str
    shared_at: str | None
