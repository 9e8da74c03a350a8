"""The request and response bodies of `/v1/messages` and `/v1/turns`."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Body
from pydantic import Field, JsonValue

from perdure.channels.http.schemas.answer import FILE_ID, SESSION_ID, TURN_ID, Answer, Instant, examples
from perdure.turns.calls.approvals import Decision
from perdure.turns.calls.outside import CallResult
from perdure.turns.feedback import Feedback
from perdure.turns.inbox.incoming import MessageFields, UserId

Status = Literal["accepted", "running", "waiting_approval", "parked", "done", "failed", "cancelled"]

Approver = Literal["user", "staff"]

Resumed = Literal["worker_lost", "error"]

_ACCEPTED = {"turn_id": TURN_ID, "session_id": SESSION_ID, "seq": 1}


class Incoming(MessageFields):
    """A message for an agent. `user_id`: with a user token, the token's user by default; otherwise required."""

    user_id: UserId | None = None


IncomingBody = Annotated[
    Incoming,
    Body(
        openapi_examples={
            "shortest": {"summary": "A message", "value": {"user_id": "ann", "text": "What is 12 * 7?"}},
            "files": {
                "summary": "A message with a file that was uploaded before",
                "value": {
                    "user_id": "ann",
                    "parts": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image", "file_id": FILE_ID},
                    ],
                },
            },
            "full": {
                "summary": "A message with a `message_id`, so that it may be sent again",
                "value": {
                    "user_id": "ann",
                    "text": "Remind me of the meeting.",
                    "channel": "web",
                    "message_id": "web-4711",
                    "priority": 7,
                    "on_busy": "enqueue",
                    "metadata": {"page": "/calendar"},
                },
            },
        }
    ),
]

DecisionBody = Annotated[
    Decision,
    Body(
        openapi_examples={
            "approve": {"summary": "Run the call", "value": {"call_id": "call_0", "decision": "approve"}},
            "change": {
                "summary": "Run the call with other arguments",
                "value": {"call_id": "call_0", "decision": "approve", "arguments": {"amount": 20}},
            },
            "deny": {"summary": "Do not run the call", "value": {"call_id": "call_0", "decision": "deny"}},
        }
    ),
]

CallResultBody = Annotated[
    CallResult,
    Body(
        openapi_examples={
            "result": {"summary": "The call's result", "value": {"call_id": "call_0", "result": {"code": "4006381"}}},
            "error": {"summary": "The call failed", "value": {"call_id": "call_0", "error": "The camera is off."}},
        }
    ),
]

FeedbackBody = Annotated[
    Feedback,
    Body(openapi_examples={"praise": {"summary": "Praise", "value": {"score": 1, "comment": "Just what I needed."}}}),
]


class Accepted(Answer):
    """The turn and the session of an accepted message."""

    model_config = examples({**_ACCEPTED, "status": "accepted", "duplicate": False})

    turn_id: UUID
    session_id: UUID
    seq: int
    status: Status
    duplicate: bool


class Reply(Answer):
    """The reply of a turn.

    `stop_reason` tells how the model ended it: `stop`, `length`, `content_filter`, `refusal`, or the provider's own
    word. `data` is the answer of an agent with an `output`, and `text` is then its JSON.
    """

    text: str
    format: Literal["text"]
    data: JsonValue = Field(default_factory=dict)
    stop_reason: str = Field(default_factory=str)


class Error(Answer):
    """Why a turn failed: a stable code and a message."""

    code: str
    message: str


class Delay(Answer):
    """Why a reply is delayed. `until`: the latest time at which the next attempt begins; null if it is running."""

    code: str
    message: str
    until: Instant | None


class OfAgent(Answer):
    """A call of a turn, or of the turn `turn_id` in which `agent` answers one of its calls.

    A call of the turn itself has no `turn_id`. `call_id` names either in requests about the turn.
    """

    turn_id: UUID | None = None
    agent: str | None = None
    call_id: str


class Approval(OfAgent):
    """A tool call that waits for approval."""

    tool: str
    arguments: dict[str, Any]
    expires_at: Instant
    approver: Approver


class PendingCall(OfAgent):
    """A tool call that a client runs. `metadata` is what a tool of pydantic-ai passed to `CallDeferred`."""

    tool: str
    arguments: dict[str, Any]
    expires_at: Instant
    metadata: dict[str, Any] | None


class Decided(OfAgent):
    """A decision about a tool call. `decided_by`: `user:` and a user's id, `service key`, `admin key` or `operator`."""

    tool: str
    decision: Literal["approve", "deny"]
    decided_by: str
    decided_at: Instant


class WaitingApproval(Answer):
    """A tool call that waits for approval, with its turn. `approver`: whose approval it needs."""

    model_config = examples(
        {
            "turn_id": TURN_ID,
            "session_id": SESSION_ID,
            "user_id": "ann",
            "agent": "assistant",
            "call_id": "call_0",
            "tool": "refund",
            "arguments": {"cents": 20_000},
            "approver": "staff",
            "waiting_since": "2026-03-02T09:30:00.131907+00:00",
            "expires_at": "2026-03-02T10:30:00.131907+00:00",
        }
    )

    turn_id: UUID
    session_id: UUID
    user_id: str
    agent: str
    call_id: str
    tool: str
    arguments: dict[str, Any]
    approver: Approver
    waiting_since: Instant
    expires_at: Instant


class Awaited(Answer):
    """What a parked turn waits for. Of several, the user, else the first that is due.

    `name` is the name of the tool that was called. `until` is the time when the call is due. A task or a client without
    a result by that time counts as lost, and an agent without an answer is cancelled. `progress` is the task's last
    progress report, as text. `pending_calls` has the calls that a client runs.

    The user's next message answers the `question`. `asked` counts how often it was asked, and `problem` is the sentence
    that says why the last answer did not fit. The value can also be brought as the result of the call `call_id`. These
    members are missing if the turn waits for another reason. `turn_id` and `agent` are there if not the turn itself
    asks, but an agent that answers one of its calls.
    """

    kind: Literal["task", "timer", "client", "agent", "user"]
    name: str
    until: Instant
    progress: str | None
    question: str | None = None
    problem: str | None = None
    asked: int | None = None
    call_id: str | None = None
    turn_id: UUID | None = None
    agent: str | None = None


class Child(Answer):
    """The turn in which another agent answers a call of this turn, in a session of its own."""

    call_id: str
    tool: str
    turn_id: UUID
    agent: str
    status: Status


class Turn(Answer):
    """A message and its outcome. The statuses `done`, `failed` and `cancelled` are final.

    `resumed` tells why a later attempt than the first runs the turn: the worker was lost (`worker_lost`), or an earlier
    attempt ended with an unexpected error (`error`).

    A message without `metadata` has none here, either. `tools_left_out` has the names of tools that did not fit the
    turn's prompts; if all fit, the member is missing. A turn that has asked other agents has `children`, and `usage`
    includes theirs; a turn in which an agent answers another has `parent_turn_id`.
    """

    model_config = examples(
        {
            **_ACCEPTED,
            "status": "done",
            "attempts": 1,
            "resumed": None,
            "steps": 2,
            "reply": {"text": "12 * 7 is 84.", "format": "text", "stop_reason": "stop"},
            "error": None,
            "delayed": None,
            "usage": {"input_tokens": 412, "output_tokens": 9, "cached_tokens": 0, "reasoning_tokens": None},
            "pending_approvals": [],
            "pending_calls": [],
            "decisions": [],
            "waiting_for": None,
            "accepted_at": "2026-03-02T09:30:00.104512+00:00",
            "started_at": "2026-03-02T09:30:00.131907+00:00",
            "settled_at": "2026-03-02T09:30:01.870233+00:00",
            "metadata": {"page": "/calendar"},
        }
    )

    turn_id: UUID
    session_id: UUID | None
    seq: int | None
    status: Status
    attempts: int
    resumed: Resumed | None
    steps: int
    reply: Reply | None
    error: Error | None
    delayed: Delay | None
    usage: dict[str, int | None] | None
    pending_approvals: list[Approval]
    pending_calls: list[PendingCall]
    decisions: list[Decided]
    waiting_for: Awaited | None
    accepted_at: Instant
    started_at: Instant | None
    settled_at: Instant | None
    tools_left_out: list[str] = Field(default_factory=list)
    parent_turn_id: UUID = Field(default_factory=lambda: UUID(int=0))
    children: list[Child] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)


class PromptPart(Answer):
    """A part of a prompt. `tokens` is an estimate.

    `ids` are those of the memories, cases, sessions or tools, or the `seq` of the message. `scores` are those of the
    search, in the order of `ids`. `text` is null if it is not stored. `note` tells what has changed since.
    """

    kind: Literal["instructions", "summary", "history", "memory", "case", "tools", "message"]
    tokens: int
    ids: list[str] = Field(default_factory=list)
    scores: list[float] = Field(default_factory=list)
    role: Literal["user", "assistant", "tool"] = "user"
    text: str | None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    note: str = ""


class PromptStep(Answer):
    """The prompt of one model call. The members are null if the reply has no record, as in a fork.

    `instructions_hash` is the SHA-256 of the instructions. `fingerprint` identifies what the agent declared, and
    `release` is that of the worker. Settings that may contain keys have no value here.
    """

    step: int
    model: str | None
    settings: dict[str, Any] | None
    instructions_hash: str | None
    agent: str = ""
    fingerprint: str = ""
    release: str = ""
    parts: list[PromptPart]


class Prompts(Answer):
    """The prompts of a turn's model calls, in order."""

    model_config = examples(
        {
            "steps": [
                {
                    "step": 1,
                    "model": "openai:gpt-5-mini",
                    "settings": {"max_tokens": 1000},
                    "instructions_hash": "6f0b6cbb2c1f5a0f3a4f7a9f6f0c6f6d4f5e5c8a0d9a1f3f6b6cbb2c1f5a0f3a",
                    "agent": "assistant",
                    "fingerprint": "0c4a8f3b9d21",
                    "release": "0.1.0",
                    "parts": [
                        {"kind": "instructions", "tokens": 4, "text": "You help."},
                        {
                            "kind": "memory",
                            "tokens": 41,
                            "ids": ["01999a6f-2f1c-7c43-8d12-9a3f5e6b7c80"],
                            "scores": [0.61],
                            "text": "- 2026-03-01: Lives in Lyon.",
                        },
                        {
                            "kind": "message",
                            "tokens": 9,
                            "ids": ["7"],
                            "role": "user",
                            "text": "Where do I live?",
                        },
                    ],
                }
            ]
        }
    )

    steps: list[PromptStep]
