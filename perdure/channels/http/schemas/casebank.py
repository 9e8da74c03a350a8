"""The CaseBank: the bodies and answers of `/v1/casebank` and `/v1/consolidation`."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from perdure.channels.http.schemas.answer import RUN_ID, Answer, Instant, examples

_PLAN = {
    "removed_cases": 1,
    "merged_cases": 1,
    "archived_cases": 0,
    "details": {
        "removed": ["case-3"],
        "merged": [{"keeper": "case-17", "removed": "case-21", "similarity": 0.97}],
        "archived": [],
        "spared": [{"case_id": "case-8", "rule": "protected_usage", "reason": "used 512 times"}],
    },
}
_PROGRESS = {
    "run_id": RUN_ID,
    "dry_run": False,
    "phase": "waiting_approval",
    "done": 0,
    "total": 2,
    "under_way": True,
    "decided_by": None,
    "error": None,
    "started_at": "2026-05-03T03:00:00+00:00",
    "planned_at": "2026-05-03T03:00:02+00:00",
    "notified_at": "2026-05-03T03:00:02+00:00",
    "expires_at": "2026-05-10T03:00:02+00:00",
    "finished_at": None,
}


class NoMembers(BaseModel):
    """An empty object. A member such as `dry_run` is refused, because the caller may mean the route `/dry-run`."""

    model_config = ConfigDict(extra="forbid")


class Merged(Answer):
    """Two merged cases: the duplicate (`removed`), and the case that takes over the duplicate's counts (`keeper`)."""

    keeper: str
    removed: str
    similarity: float


class Spared(Answer):
    """A case that one rule would remove, but another rule protects."""

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
    """How many cases are removed, merged and archived. `details` lists these cases and the spared cases."""

    removed_cases: int
    merged_cases: int
    archived_cases: int
    details: PruningDetails


class Pruned(Pruning):
    """The outcome of a run, or the run's plan if the plan is not applied yet."""

    model_config = examples({**_PLAN, "dry_run": False, "run_id": RUN_ID, "phase": "done"})

    dry_run: bool
    run_id: UUID | None
    phase: str | None = None


class DryRun(Pruned):
    """The plan of a dry run: the changes that a run would make."""

    model_config = examples({**_PLAN, "dry_run": True, "run_id": RUN_ID, "phase": "done"})


class PruningProgress(Answer):
    """The progress of a run or a dry run."""

    model_config = examples(_PROGRESS)

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
    """A run: its progress, its plan, and the outcome of the changes that are applied so far.

    `plan` is null until the plan is made. `outcome` is null until the run begins to apply the plan.
    """

    model_config = examples({**_PROGRESS, "plan": _PLAN, "outcome": None})

    plan: Pruning | None
    outcome: Pruning | None


class Restored(Answer):
    """A case that is active again."""

    model_config = examples({"case_id": "case-17", "status": "restored"})

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

    model_config = examples(
        {
            "results": [
                {
                    "case_id": "case-17",
                    "query": "How do I reset the router?",
                    "response_text": "Hold the button at its back for ten seconds.",
                    "category_path": None,
                    "usage_count": 9,
                    "success_rate": 88.9,
                    "status": "active",
                    "similarity": 0.91,
                    "tenant": None,
                    "user_id": "ann",
                    "bank": "common",
                    "shared_at": None,
                }
            ]
        }
    )

    results: list[NearCase]


class SharedCase(Answer):
    """A case, and the time when it was shared with all users of its bank."""

    model_config = examples({"case_id": "case-17", "shared_at": "2026-05-02T09:30:00+00:00"})

    case_id: str
    shared_at: str


class UnsharedCase(Answer):
    """A case that is not shared: only the prompts of its author may contain it."""

    model_config = examples({"case_id": "case-17", "shared_at": None})

    case_id: str
    shared_at: None


class ReportLine(Answer):
    """A case in a run's plan, with its text. `keeper_…` is the case that absorbs a duplicate's uses.

    `outcome` is null until the line is applied; `outcome_rule` and `outcome_reason` say why it was spared then.
    """

    model_config = examples(
        {
            "position": 0,
            "action": "merge",
            "case_id": "case-17",
            "rule": "duplicate",
            "reason": "similarity 0.98 to case-4, which has more uses",
            "keeper_id": "case-4",
            "similarity": 0.98,
            "usage_count": 3,
            "success_rate": 66.7,
            "last_accessed_at": None,
            "outcome": None,
            "outcome_rule": None,
            "outcome_reason": None,
            "query": "reset the router",
            "response_text": "Hold the button for ten seconds.",
            "keeper_query": "how do I reset the router",
            "keeper_response_text": "Hold the reset button for ten seconds.",
        }
    )

    position: int
    action: Literal["remove", "merge", "archive", "spare"]
    case_id: str
    rule: str
    reason: str
    keeper_id: str | None
    similarity: float | None
    usage_count: int
    success_rate: float | None
    last_accessed_at: Instant | None
    outcome: str | None
    outcome_rule: str | None
    outcome_reason: str | None
    query: str | None
    response_text: str | None
    keeper_query: str | None
    keeper_response_text: str | None
