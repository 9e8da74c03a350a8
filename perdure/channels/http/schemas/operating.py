"""The condition of the installation: the answers of the operator's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from perdure.access.tenants import PATTERN
from perdure.channels.http.parameters import User
from perdure.channels.http.schemas.answer import SESSION_ID, TURN_ID, Answer, Instant, examples
from perdure.turns.inbox.incoming import Name

DELIVERY_ID = "01931e73-2b4c-7d22-8e63-3c8d0f2a1b44"
"""The delivery's id in the examples."""

_STATUS: dict[str, Any] = {
    "status": "warning",
    "release": "0.1.0",
    "faults": [{"part": "beat", "severity": "warning", "message": "No beat runs: the last one was seen 2 h ago."}],
    "processes": [],
    "intake_closed": False,
    "due": {"5": {"number": 3, "oldest_s": 1.5}},
    "amounts": {"deliveries_pending": {"number": 0, "oldest_s": None}},
    "unsettled": [{"agent": "assistant", "status": "running", "turns": 3}],
    "failures": [],
    "parked": [],
    "sweeps_late_s": {"turns": 0.0},
    "schedules_late_s": {},
    "breakers": [],
    "database": None,
    "broker": {"fault": None},
    "redis": [],
    "disks": [],
    "stuck": [],
    "budgets": [],
    "unread": {},
    "counted_up_to": 10000,
}


class Condition(Answer):
    """The condition of the installation, as `perdure status --json` prints it.

    `status` is `down` if no message would be answered. A number that equals `counted_up_to` means this many or more.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [_STATUS]})

    status: Literal["ok", "warning", "down"]
    release: str
    faults: list[dict[str, Any]]
    processes: list[dict[str, Any]]
    due: dict[str, Any]
    amounts: dict[str, Any]
    stuck: list[dict[str, Any]]
    budgets: list[dict[str, Any]]


class LiveSession(Answer):
    """A session with an unsettled turn. `turn_id`, `status` and `age_s` are those of its oldest one.

    `reason` says which process holds the session, or what the turn waits for.
    """

    model_config = examples(
        {
            "session_id": SESSION_ID,
            "tenant": None,
            "user_id": "ann",
            "state": "thinking",
            "unsettled": 1,
            "turn_id": TURN_ID,
            "agent": "assistant",
            "status": "running",
            "age_s": 2.5,
            "reason": "held by worker-1:4711 until 2026-05-02T09:30:30+00:00",
        }
    )

    session_id: str
    tenant: str | None
    user_id: str
    state: str
    unsettled: int
    turn_id: str
    agent: str
    status: str
    age_s: float
    reason: str


class NewPause(BaseModel):
    """Whose turns do not begin: those to which all that is given applies. At least one member is given."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"user_id": "ann"}]})

    tenant: Annotated[Name, Field(json_schema_extra={"pattern": PATTERN})] | None = None
    user_id: User | None = None
    agent: Name | None = None


class Pause(Answer):
    """A pause: turns to which all its members apply wait. A member of null applies to all."""

    model_config = examples({"tenant": None, "user_id": "ann", "agent": None, "paused_at": "2026-05-02T09:30:00+00:00"})

    tenant: str | None
    user_id: str | None
    agent: str | None
    paused_at: Instant


class PauseChanged(Answer):
    """Whether turns now wait, and the number of unsettled turns that this concerns."""

    model_config = examples({"paused": True, "turns": 3})

    paused: bool
    turns: int


class UsageRow(Answer):
    """What a user, a tenant, an agent, a model or a day used. `cost_usd` leaves out the `unpriced` replies.

    A count is null if no reply reports it. `name` is null for users without a tenant if usage is added up by tenant.
    """

    model_config = examples(
        {
            "name": "assistant",
            "tenant": None,
            "replies": 12,
            "input_tokens": 20300,
            "cached_tokens": 12000,
            "output_tokens": 900,
            "cost_usd": "0.0412",
            "unpriced": 0,
        }
    )

    name: str | None
    tenant: str | None
    replies: int
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    cost_usd: str | None
    unpriced: int


class ScheduleEntry(Answer):
    """One of perdure's own periodic tasks. `next_due` is in the past while its newest slot waits for a worker."""

    model_config = examples(
        {
            "entry": "casebank-prune",
            "task": "casebank.prune",
            "schedule": "0 2 * * SUN",
            "since": "2026-05-01T00:00:00+00:00",
            "last_slot": None,
            "last_done_slot": None,
            "last_done_at": None,
            "running": False,
            "attempts": 0,
            "error": None,
            "next_due": "2026-05-03T02:00:00+00:00",
        }
    )

    entry: str
    task: str
    schedule: str
    since: Instant | None
    last_slot: Instant | None
    last_done_slot: Instant | None
    last_done_at: Instant | None
    running: bool
    attempts: int
    error: str | None
    next_due: Instant


class Delivery(Answer):
    """A delivery of a reply, of a request for approval or of a question. A `failed` one is attempted no more."""

    model_config = examples(
        {
            "delivery_id": DELIVERY_ID,
            "turn_id": TURN_ID,
            "tenant": None,
            "user_id": "ann",
            "target": {"url": "https://example.com/replies"},
            "status": "failed",
            "attempts": 12,
            "last_error": "the server answered 500",
            "created_at": "2026-05-02T09:30:00+00:00",
            "due_at": None,
            "delivered_at": None,
        }
    )

    delivery_id: UUID
    turn_id: UUID
    tenant: str | None
    user_id: str
    target: dict[str, Any]
    status: Literal["pending", "delivered", "failed"]
    attempts: int
    last_error: str | None
    created_at: Instant
    due_at: Instant | None
    delivered_at: Instant | None


class ResendFailed(BaseModel):
    """Which failed deliveries to send again: those to a URL, a task or `CHANNEL:CHAT` that matches the glob `to`."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"to": "https://shop.example/*", "dry_run": True}, {}]}
    )

    to: Annotated[str, Field(max_length=500)] | None = None
    dry_run: StrictBool = False


class Resent(Answer):
    """The number of deliveries that are due again or, of a dry run, would be."""

    model_config = examples({"deliveries": 1, "due": True})

    deliveries: int
    due: bool


class ListedTurn(Answer):
    """A turn in a list."""

    model_config = examples(
        {
            "turn_id": TURN_ID,
            "session_id": SESSION_ID,
            "tenant": None,
            "user_id": "ann",
            "seq": 1,
            "status": "failed",
            "agent": "assistant",
            "channel": "http",
            "attempts": 5,
            "error": {"code": "BUDGET_EXHAUSTED", "message": "The turn was attempted 5 times."},
            "accepted_at": "2026-05-02T09:30:00+00:00",
            "started_at": "2026-05-02T09:30:01+00:00",
            "settled_at": "2026-05-02T09:31:00+00:00",
        }
    )

    turn_id: UUID
    session_id: UUID
    tenant: str | None
    user_id: str
    seq: int
    status: str
    agent: str
    channel: str
    attempts: int
    error: dict[str, str | None] | None
    accepted_at: Instant
    started_at: Instant | None
    settled_at: Instant | None


_CALL = {
    "call": "01931e6f-5d6b-7a11-8c22-1f0e9d8c7b6a",
    "seq": 2,
    "position": 0,
    "tool": "pay",
    "effect": "unsafe",
    "status": "done",
    "waits_for": None,
    "is_list": False,
    "intended_at": "2026-05-02T09:30:02+00:00",
    "sent_at": None,
    "decide_at": "2026-05-02T09:30:32+00:00",
    "finished_at": "2026-05-02T09:30:03+00:00",
    "approver": "user",
    "decided_by": "user:ann",
    "decided_at": "2026-05-02T09:30:02+00:00",
}


class Timeline(Answer):
    """When a turn was accepted, begun, taken over by another worker and settled, with its steps, calls and deliveries.

    A step is a model's reply, at the time of its commit. A call of status `unknown` is in doubt: its worker died, and
    the call may have happened. `held_by` is the process that runs the turn now.
    """

    model_config = examples(
        {
            "turn_id": TURN_ID,
            "session_id": SESSION_ID,
            "agent": "assistant",
            "fingerprint": None,
            "channel": "http",
            "status": "done",
            "attempts": 2,
            "attempt_error": None,
            "error_code": None,
            "held_by": None,
            "accepted_at": "2026-05-02T09:30:00+00:00",
            "started_at": "2026-05-02T09:30:01+00:00",
            "cancel_requested_at": None,
            "settled_at": "2026-05-02T09:30:45+00:00",
            "now": "2026-05-02T09:31:00+00:00",
            "takeovers": [{"at": "2026-05-02T09:30:40+00:00", "owner": "worker-2:4712", "lost": "worker-1:4711"}],
            "steps": [
                {
                    "step": 1,
                    "seq": 2,
                    "model": "gpt-5",
                    "fallback": False,
                    "usage": {"input_tokens": 900, "output_tokens": 30},
                    "stop_reason": "stop",
                    "calls": 1,
                    "committed_at": "2026-05-02T09:30:02+00:00",
                }
            ],
            "calls": [_CALL],
            "deliveries": [],
            "cost_usd": "0.0012",
        }
    )

    turn_id: UUID
    session_id: UUID
    agent: str
    fingerprint: str | None
    channel: str
    status: str
    attempts: int
    attempt_error: str | None
    error_code: str | None
    held_by: str | None
    accepted_at: Instant
    started_at: Instant | None
    cancel_requested_at: Instant | None
    settled_at: Instant | None
    now: Instant
    takeovers: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    deliveries: list[dict[str, Any]]
    cost_usd: str | None
