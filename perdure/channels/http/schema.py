"""What the gateway takes and answers, for readers of /openapi.json and for tests that hold the gateway to it.

Answers are made by the domain's own readers and are not passed through these models: a long
transcript would be checked on the event loop, message by message.
"""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt

from perdure.channels.http.errors import CODES, MEDIA_TYPE
from perdure.memory.recall.search import MAX_K, Layer
from perdure.text.untrusted import STORABLE_PATTERN, whole
from perdure.turns.inbox.incoming import MAX_REASON_CHARS, Name, Text

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
    tenant: str | None
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
    k: Annotated[StrictInt, Field(ge=1, le=MAX_K), BeforeValidator(whole)] = 10
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
    tenant: str | None
    user_id: str | None
    bank: str
    shared_at: str | None


class SharedCase(_Answer):
    """A case, and since when an administrator lets it enter everybody's prompts."""

    case_id: str
    shared_at: str | None


class NearCases(_Answer):
    """The nearest cases, nearest first."""

    results: list[NearCase]


class KilledWorker(_Answer):
    """A worker that its watchdog killed, because none of its threads ran for `silent_s` seconds."""

    worker: str
    pid: int
    silent_s: float
    killed_at: datetime


class Health(_Answer):
    """That the gateway lives, or that it can work. `killed_workers` is absent if there are none of the last hour."""

    status: Literal["alive", "ready"]
    killed_workers: list[KilledWorker] = []


class Problem(_Answer):
    """An error (RFC 9457); `code` is stable, `detail` a sentence for people."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["about:blank"]
    title: str
    status: int
    detail: str
    code: Annotated[str, Field(json_schema_extra={"enum": sorted(set().union(*CODES.values()))})]


Responses = dict[int | str, dict[str, Any]]

_KEYED = (401, 403, 429, 500, 503)
"""What any route that takes a key may answer."""

_BODY = (400, 408, 413)
"""What any route that takes a body may answer."""

_EMBEDDING = (502, 504)
"""What a route that embeds the caller's text may answer."""


def _errors(*statuses: int) -> Responses:
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": f"{HTTPStatus(status).phrase}: {', '.join(CODES[status])}.", "content": content}
        for status in sorted(statuses)
    }


def _answers(model: Any, status: int = 200, description: str = "", errors: tuple[int, ...] = ()) -> Responses:
    return {status: {"model": model, "description": description or "As asked."}, **_errors(*_KEYED, *errors)}


ACCEPTED: Responses = {
    **_answers(Accepted, 202, "Accepted: it will be answered.", (*_BODY, 404, 409)),
    200: {"model": Accepted, "description": "Accepted before."},
}
TURN = _answers(Turn, errors=(400, 404))
CANCELLING = _answers(Turn, 202, "Asked for; the turn as it is now.", (404,))
DECIDING = _answers(Turn, 202, "Decided; the turn as it is now.", (*_BODY, 404, 409))
THANKED = _answers(Turn, 202, "Noted; the turn as it is.", (*_BODY, 404, 409))
PRUNED: Responses = {
    **_answers(Pruned, 200, "It is finished.", _BODY),
    202: {
        "model": Pruned | PruningProgress,
        "description": "The plan, which waits for approval; or where the run stands, which is not finished.",
    },
}
DRY_RUN: Responses = {
    **_answers(Pruned, 200, "The plan as a run would make it now.", _BODY),
    202: {"model": PruningProgress, "description": "Where the dry run stands, which is not finished."},
}
PRUNING_RUN = _answers(PruningRun, errors=(404,))
PRUNING_RUNS = _answers(list[PruningProgress], errors=(400,))
DECIDED = _answers(PruningRun, 202, "Decided; the run as it is now.", (404, 409))
RESTORED = _answers(Restored, errors=(404,))
NEAR_CASES = _answers(NearCases, errors=(400, *_EMBEDDING))
SHARED = _answers(SharedCase, errors=(404, 409))
BREAKERS = _answers(BreakerList)
BREAKER = _answers(Breaker, 200, "It is closed.", (404,))
SESSION = _answers(Session, errors=(404,))
ENDING = _answers(Session, 202, "Asked for; the session as it is now.", (*_BODY, 404, 409))
FORKED = _answers(Forked, 201, "Made; messages with its `session_id` reach it.", (*_BODY, 404, 409))
SESSIONS = _answers(list[Session], errors=(400,))
MESSAGES = _answers(list[Message], errors=(400, 404))
FOUND = _answers(Found, errors=(*_BODY, *_EMBEDDING))
CONSOLIDATING = _answers(Consolidating, 202, "Asked for.", (*_BODY, 404))
EXPORT = _answers(Export, errors=(400, 404))
ERASED = _answers(Erased, errors=(400,))
HEALTH: Responses = {200: {"model": Health, "description": "As asked."}, **_errors(500, 503)}


def _body(name: str) -> dict[str, Any]:
    """A request body that is required, by the name of its schema."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


INCOMING = _body("Incoming")
SEARCH = _body("Search")
DECISION = _body("Decision")
FEEDBACK = _body("Feedback")


def _optional_body(name: str = "", described: dict[str, Any] | None = None) -> dict[str, Any]:
    """A request body that may be left out, as may its one member, if it has one."""
    members = {} if described is None else {name: described}
    shape = {"type": "object", "properties": members, "additionalProperties": False}
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": shape}}}}


SESSION_ID = _optional_body("session_id", {"type": ["string", "null"], "format": "uuid"})
REASON = _optional_body(
    "reason", {"type": ["string", "null"], "maxLength": MAX_REASON_CHARS, "pattern": STORABLE_PATTERN}
)
TICK = _optional_body("tick", {"type": ["integer", "null"], "minimum": 0, "description": "Default: the session's own."})
NOTHING = _optional_body()
UNGUARDED: dict[str, Any] = {"security": []}
"""A route that needs no key."""
