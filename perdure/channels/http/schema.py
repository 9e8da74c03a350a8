"""What the gateway answers, for readers of /openapi.json and for a test that holds the answers to it.

Answers are made by the domain's own readers and are not passed through these models: a long
transcript would be checked on the event loop, message by message.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from pydantic.json_schema import models_json_schema

from perdure.channels.http import problems
from perdure.memory.recall import MAX_K, Layer
from perdure.turns.approvals import Decision
from perdure.turns.feedback import Feedback
from perdure.turns.incoming import MAX_REASON_CHARS, Incoming, Name, Text

Status = Literal["accepted", "running", "waiting_approval", "parked", "done", "failed", "cancelled"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Accepted(_Answer):
    """Where a message went."""

    turn_id: UUID
    session_id: UUID
    seq: int
    status: Status
    duplicate: bool


class Reply(_Answer):
    """What was said in the end."""

    text: str
    format: Literal["text"]


class Error(_Answer):
    """Why a turn failed: a stable code and a sentence."""

    code: str
    message: str


class Delay(_Answer):
    """Why an answer is delayed, and when a model is asked again at the latest, unless it is being asked now."""

    code: str
    message: str
    until: datetime | None


class Approval(_Answer):
    """A tool call that waits for a person."""

    call_id: str
    tool: str
    arguments: dict[str, Any]
    expires_at: datetime


class Turn(_Answer):
    """A message on its way to a reply. `done`, `failed` and `cancelled` are final."""

    turn_id: UUID
    session_id: UUID
    seq: int
    status: Status
    attempts: int
    steps: int
    reply: Reply | None
    error: Error | None
    delayed: Delay | None
    usage: dict[str, int] | None
    pending_approvals: list[Approval]
    accepted_at: datetime
    started_at: datetime | None
    settled_at: datetime | None


class Consolidation(_Answer):
    """Whether memories were drawn from a session that has ended; `error` is why the last of its `runs` failed."""

    status: Literal["waiting", "done", "skipped", "given_up"]
    runs: int
    error: str | None


class Session(_Answer):
    """A conversation. `summary_kind` is `extractive` where no model wrote the summary."""

    session_id: UUID
    user_id: str
    agent: str
    state: str
    turn_count: int
    message_count: int
    created_at: datetime
    last_activity_at: datetime
    ended_at: datetime | None
    channels: list[str]
    summary: str | None
    summary_kind: Literal["model", "extractive"] | None
    key_topics: list[str]
    consolidation: Consolidation | None


class Forked(_Answer):
    """The session that a fork made."""

    session_id: UUID


class Call(_Answer):
    """A tool call that the model asked for; `arguments` is text where the model gave no object."""

    id: str
    name: str
    arguments: dict[str, Any] | str


class Message(_Answer):
    """One committed message of a transcript."""

    seq: int
    turn_id: UUID
    role: Literal["user", "assistant", "tool"]
    content: str
    tool_calls: list[Call] = []
    tool_call_id: str = ""
    channel: str
    token_count: int
    model: str = ""
    fallback: bool = False
    created_at: datetime


class Search(BaseModel):
    """What to look for in the memory of a user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user_id: Name
    query: Text
    k: Annotated[StrictInt, Field(ge=1, le=MAX_K)] = 10
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)] = (Layer.EPISODIC, Layer.SEMANTIC)


class Recollection(_Answer):
    """Something recalled: a message with its one id, or a memory with the messages that it came from."""

    layer: Literal["episodic", "semantic"]
    id: str
    content: str
    score: float
    message_ids: list[str]
    occurred_at: datetime


class Found(_Answer):
    """What was found, best first."""

    results: list[Recollection]


class Consolidating(_Answer):
    """That it was asked for; null: of all sessions that wait for it."""

    session_id: UUID | None


class Export(_Answer):
    """Everything that is held about a user: rows by table, and what happened lately."""

    user_id: str
    exported_at: datetime
    tables: dict[str, list[dict[str, Any]]]
    stream: list[dict[str, str]]


class Erased(_Answer):
    """How many rows went, by table. `everywhere`: Redis and the snapshots are clean now, too; else a worker does it."""

    user_id: str
    rows: dict[str, int]
    everywhere: bool


class Breaker(_Answer):
    """A circuit breaker of the fleet. Moments are in milliseconds since 1970."""

    name: str
    state: Literal["closed", "open", "half_open"]
    failure_count: int
    success_count: int
    last_failure_time: int | None
    opened_at: int | None


class BreakerList(_Answer):
    """The breakers that were asked in the last week."""

    breakers: list[Breaker]


class Merged(_Answer):
    """A duplicate, and the case that takes over its counts."""

    keeper: str
    removed: str
    similarity: float


class Spared(_Answer):
    """A case that a rule would take, another spares."""

    case_id: str
    rule: str
    reason: str


class PruningDetails(_Answer):
    """Case by case."""

    removed: list[str]
    merged: list[Merged]
    archived: list[str]
    spared: list[Spared]


class Pruning(_Answer):
    """What goes and what is spared."""

    removed_cases: int
    merged_cases: int
    archived_cases: int
    details: PruningDetails


class Pruned(Pruning):
    """What went, or with `dry_run` would go; `phase` is a run's."""

    dry_run: bool
    run_id: UUID | None
    phase: str | None = None


class PruningProgress(_Answer):
    """Where a run, or a dry run, stands."""

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
    started_at: datetime
    planned_at: datetime | None
    notified_at: datetime | None
    expires_at: datetime | None
    finished_at: datetime | None


class PruningRun(PruningProgress):
    """A run: where it stands, its plan once there is one, its outcome as far as it is applied."""

    plan: Pruning | None
    outcome: Pruning | None


class Restored(_Answer):
    """A case that is active again."""

    case_id: str
    status: Literal["restored"]


class NearCase(_Answer):
    """A case and the cosine of its question with what was asked."""

    case_id: str
    query: str
    response_text: str
    category_path: str | None
    usage_count: int
    success_rate: float | None
    status: Literal["active", "archived"]
    similarity: float
    user_id: str | None


class NearCases(_Answer):
    """The nearest cases, nearest first."""

    results: list[NearCase]


class Health(_Answer):
    """That the gateway lives, or that it can work."""

    status: Literal["alive", "ready"]


class Problem(_Answer):
    """An error (RFC 9457); `code` is stable, `detail` a sentence for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str


Responses = dict[int | str, dict[str, Any]]

_PROBLEM: Responses = {
    "default": {
        "description": "An error.",
        "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


def _answers(model: Any, status: int = 200, description: str = "") -> Responses:
    return {status: {"model": model, "description": description or "As asked."}, **_PROBLEM}


ACCEPTED: Responses = {
    **_answers(Accepted, 202, "Accepted: it will be answered."),
    200: {"model": Accepted, "description": "Accepted before."},
}
TURN = _answers(Turn)
CANCELLING = _answers(Turn, 202, "Asked for; the turn as it is now.")
DECIDING = _answers(Turn, 202, "Decided; the turn as it is now.")
THANKED = _answers(Turn, 202, "Noted; the turn as it is.")
PRUNED: Responses = {
    **_answers(Pruned, 200, "It is finished."),
    202: {
        "model": Pruned | PruningProgress,
        "description": "The plan, which waits for approval; or where the run stands, which is not finished.",
    },
}
DRY_RUN: Responses = {
    **_answers(Pruned, 200, "The plan as a run would make it now."),
    202: {"model": PruningProgress, "description": "Where the dry run stands, which is not finished."},
}
PRUNING_RUN = _answers(PruningRun)
PRUNING_RUNS = _answers(list[PruningProgress])
DECIDED = _answers(PruningRun, 202, "Decided; the run as it is now.")
RESTORED = _answers(Restored)
NEAR_CASES = _answers(NearCases)
BREAKERS = _answers(BreakerList)
BREAKER = _answers(Breaker, 200, "It is closed.")
SESSION = _answers(Session)
ENDING = _answers(Session, 202, "Asked for; the session as it is now.")
FORKED = _answers(Forked, 201, "Made; messages with its `session_id` reach it.")
SESSIONS = _answers(list[Session])
MESSAGES = _answers(list[Message])
FOUND = _answers(Found)
CONSOLIDATING = _answers(Consolidating, 202, "Asked for.")
EXPORT = _answers(Export)
ERASED = _answers(Erased)
HEALTH = _answers(Health)


def _body(name: str) -> dict[str, Any]:
    """A request body that is required, by the name of its schema."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


INCOMING = _body("Incoming")
SEARCH = _body("Search")
DECISION = _body("Decision")
FEEDBACK = _body("Feedback")


def _optional_body(name: str, described: dict[str, Any]) -> dict[str, Any]:
    """A request body that may be left out, as may its one member."""
    shape = {"type": "object", "properties": {name: described}, "additionalProperties": False}
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": shape}}}}


SESSION_ID = _optional_body("session_id", {"type": "string", "format": "uuid"})
REASON = _optional_body("reason", {"type": "string", "maxLength": MAX_REASON_CHARS})
TICK = _optional_body("tick", {"type": "integer", "minimum": 0, "description": "Default: the session's own."})


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, named = models_json_schema(
            [
                *((body, "validation") for body in (Incoming, Search, Decision, Feedback)),
                (Problem, "serialization"),
            ],
            ref_template="#/components/schemas/{model}",
        )
        components = made.setdefault("components", {})
        components.setdefault("schemas", {}).update(named["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}, {}]
        app.openapi_schema = made
    return app.openapi_schema
