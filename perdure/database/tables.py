"""The tables as they are after all migrations. A test compares this file with a migrated database.

Every step of a turn updates a row of `sessions` and a row of `turns`. These rows are narrow, their pages have free
space (`fillfactor`), and the columns that a step updates have no index. PostgreSQL can therefore make HOT updates. Most
rows of the other tables (for example, of `messages`) are never updated after they are inserted.
"""

from __future__ import annotations

from typing import Any

from pgvector.sqlalchemy import HALFVEC, VECTOR
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Date,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB, TSVECTOR

from perdure.database.keyed import keyed

metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
        "pk": "%(table_name)s_pkey",
    }
)

_timestamp = DateTime(timezone=True)

SESSION_STATES = (
    "initializing",
    "active",
    "thinking",
    "tool_executing",
    "waiting_approval",
    "summarizing",
    "ending",
    "ended",
)
TURN_STATUSES = ("accepted", "running", "waiting_approval", "parked", "done", "failed", "cancelled")
EFFECT_STATUSES = ("asked", "approved", "intended", "done", "failed", "unknown", "denied")
DELIVERY_STATUSES = ("pending", "delivered", "failed")
MEMORY_KINDS = ("fact", "preference", "insight", "conversation")
CASE_STATUSES = ("active", "archived")
CASE_EVENTS = ("added", "archived", "absorbed", "restored", "shared", "unshared")
RUN_PHASES = (
    "planning",
    "notifying",
    "waiting_approval",
    "applying",
    "reporting",
    "done",
    "withheld",
    "rejected",
    "expired",
)


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


users = Table(
    "users",
    metadata,
    Column("user_id", Text, primary_key=True),
    Column("created_at", _timestamp, nullable=False),
)

identities = Table(
    "identities",
    metadata,
    Column("channel", Text, nullable=False),
    Column("external_id", Text, nullable=False),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False, index=True),
    Column("created_at", _timestamp, nullable=False),
    Column("tenant", Text, nullable=False, server_default=""),
    PrimaryKeyConstraint("tenant", "channel", "external_id"),
    comment="Maps a person's id on a channel to a user.",
)

link_codes = Table(
    "link_codes",
    metadata,
    Column("user_id", Text, ForeignKey("users.user_id", ondelete="CASCADE"), primary_key=True),
    Column("code_hash", LargeBinary, nullable=False, unique=True, comment="SHA-256 of the code"),
    Column("expires_at", _timestamp, nullable=False, index=True),
    comment="The newest code of each user that links another channel.",
)

link_attempts = Table(
    "link_attempts",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("external_id", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("since", _timestamp, nullable=False, index=True),
    PrimaryKeyConstraint("tenant", "channel", "external_id"),
    comment="How many codes an identity has sent since `since`; limits guessing.",
)

conversations = Table(
    "conversations",
    metadata,
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    Column("conversation", Text, nullable=False, comment="the caller's key"),
    Column("title", Text, nullable=False),
    Column(
        "titled",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="a caller set the title; summaries do not replace it",
    ),
    Column("archived_at", _timestamp),
    Column("remember", Boolean, nullable=False, server_default=text("true"), comment="false: nothing is remembered"),
    Column("created_at", _timestamp, nullable=False),
    PrimaryKeyConstraint("user_id", "conversation"),
    comment="Conversations whose key a caller gave.",
)

chat_places = Table(
    "chat_places",
    metadata,
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    Column("channel", Text, nullable=False),
    Column("chat", Text, nullable=False),
    Column("thread", Text, nullable=False, comment="'': the chat has no threads"),
    Column("conversation", Text, comment="opened by a command; NULL: the chat's own conversation"),
    Column("last_message_id", Text, comment="the newest message that was accepted"),
    Column("seen_at", _timestamp, nullable=False),
    PrimaryKeyConstraint("user_id", "channel", "chat", "thread"),
    Index("chat_places_seen_idx", "channel", "seen_at"),
    comment="Chats in which people wrote to a channel's bot.",
)

answered_requests = Table(
    "answered_requests",
    metadata,
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    Column("fingerprint", Text, nullable=False, comment="a digest of the conversation, the agent and the messages"),
    Column("turn_id", Uuid, nullable=False),
    Column("answered_at", _timestamp, nullable=False),
    PrimaryKeyConstraint("user_id", "fingerprint"),
    Index("answered_requests_answered_at_idx", "answered_at"),
    comment="The last turn whose answer was sent completely, for requests without an idempotency key.",
)

metered_requests = Table(
    "metered_requests",
    metadata,
    Column("request_id", Uuid, primary_key=True),
    Column("user_id", Text, nullable=False, comment="a user's key; the user may have no row, so no foreign key"),
    Column("kind", Text, nullable=False, comment="'side_request' or 'fork'"),
    Column("requested_at", _timestamp, nullable=False),
    Column("model", Text, comment="the model that answered a side request"),
    Column("usage", JSONB, comment="tokens of that answer"),
    Index("metered_requests_user_idx", "user_id", "requested_at"),
    Index("metered_requests_requested_at_idx", "requested_at"),
    comment="Requests that begin no turn and count as messages: side requests of chat front ends, and forks.",
)

reminders = Table(
    "reminders",
    metadata,
    Column("schedule_id", Uuid, primary_key=True),
    Column("user_id", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("cron", Text, comment="NULL: it fires once"),
    Column("once", _timestamp, comment="the moment of a schedule that fires once"),
    Column("timezone", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("conversation", Text),
    Column("agent", Text),
    Column("reply_to", JSONB),
    Column("remember", Boolean, nullable=False, server_default=text("true"), comment="false: nothing is remembered"),
    Column("paused", Boolean, nullable=False, server_default=text("false")),
    Column("next_due", _timestamp, comment="NULL: paused, or its only message was refused"),
    Column("taken_until", _timestamp, comment="a worker fires it until then"),
    Column("last_slot", _timestamp),
    Column("last_turn_id", Uuid),
    Column("error", Text, comment="why its last message was refused"),
    Column("created_at", _timestamp, nullable=False),
    Index("reminders_user_id_idx", "user_id", "next_due"),
    Index("reminders_next_due_idx", "next_due"),
    comment="Users' schedules. One that fires once is deleted when its message is accepted.",
)

unrouted = Table(
    "unrouted",
    metadata,
    Column("turn_id", Uuid, primary_key=True),
    Column("position", BigInteger, Identity(always=True), nullable=False, comment="order of insertion"),
    Column("user_id", Text, nullable=False),
    Column("message", JSONB, nullable=False, comment="the fields of POST /v1/messages"),
    Column("accepted_at", _timestamp, nullable=False, server_default=text("now()")),
    Column("due_at", _timestamp, nullable=False, server_default=text("now()")),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("routed_to", Uuid, comment="the turn that the message was merged into or repeated"),
    Column("error_code", Text, comment="why the message was refused"),
    Column("error_message", Text),
    Column("settled_at", _timestamp, comment="when routed_to or error_code was set"),
    Index("unrouted_due_at_idx", "due_at", "position", postgresql_where=text("settled_at IS NULL")),
    Index("unrouted_user_id_idx", "user_id", "position"),
    Index(
        "unrouted_user_idx",
        text("(md5(user_id) || user_id)"),
        "position",
        postgresql_where=text("settled_at IS NULL"),
    ),
    Index("unrouted_settled_at_idx", "settled_at", postgresql_where=text("settled_at IS NOT NULL")),
    comment="Messages of applications, inserted in their transactions. A routed one becomes a turn and is deleted.",
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Uuid, primary_key=True),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    Column(
        "scope",
        Text,
        nullable=False,
        comment="'': all channels; else a channel, or '/' and a conversation's key, or '>' and a call's id",
    ),
    Column("routable", Boolean, nullable=False, comment="accepts messages without a session_id"),
    Column("agent", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", _timestamp, nullable=False),
    Column("last_activity_at", _timestamp, nullable=False),
    Column("ended_at", _timestamp),
    Column("channels", ARRAY(Text), nullable=False),
    Column("summary", Text),
    Column("key_topics", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("turn_count", Integer, nullable=False, server_default="0", comment="settled turns"),
    Column("message_count", BigInteger, nullable=False, server_default="0", comment="seq of the last message"),
    Column("last_turn_seq", BigInteger, nullable=False, server_default="0", comment="seq of the last turn accepted"),
    Column("unsettled", Integer, nullable=False, server_default="0", comment="turns that are accepted and not settled"),
    Column("tick", BigInteger, nullable=False, server_default="0", comment="committed steps"),
    Column("token", BigInteger, nullable=False, server_default="0", comment="fencing token; grows with each claim"),
    Column("nonce", Uuid, comment="a random id, new with each claim; the fence's second half"),
    Column("lease_owner", Text),
    Column("lease_until", _timestamp),
    Column("strikes", Integer, nullable=False, server_default="0", comment="claims since the last commit of a step"),
    Column("claims", Integer, nullable=False, server_default="0", comment="claims of the present turn"),
    Column("spent_s", Double, nullable=False, server_default="0", comment="seconds under lease in the present turn"),
    Column("woken_at", _timestamp),
    Column("wakes", Integer, nullable=False, server_default="0", comment="the sweeper's wake-ups since the last claim"),
    Column(
        "not_before",
        _timestamp,
        comment="its turn waits until then, e.g. for a person; NULL: it does not wait",
    ),
    Column("end_requested_at", _timestamp),
    Column("end_reason", Text),
    Column("end_attempts", Integer, nullable=False, server_default="0", comment="claims made to end it"),
    Column("summary_extractive", Boolean, comment="the summary is made of extracts, because no model wrote one"),
    Column(
        "previous_session_id", Uuid, ForeignKey("sessions.session_id"), comment="the session before it in the scope"
    ),
    Column("forked_from", Uuid, comment="the session it was copied from"),
    Column(
        "remember",
        Boolean,
        nullable=False,
        server_default=text("true"),
        comment="false: nothing of new turns is remembered",
    ),
    Column(
        "variables_tick",
        BigInteger,
        comment="the tick that last changed the working variables; NULL: it has none",
    ),
    Column("saved_token", BigInteger, comment="token of the valid snapshot in an external store"),
    Column("saved_tick", BigInteger, comment="tick of that snapshot"),
    Column("imported_as", Text, comment="its name in the imported file"),
    Column("consolidated_at", _timestamp, comment="when its memories were extracted"),
    Column("consolidation_attempts", Integer, nullable=False, server_default="0", comment="failed runs"),
    Column("consolidation_due_at", _timestamp, comment="when the next run may start"),
    Column("consolidation_given_up_at", _timestamp, comment="when the last run failed; an operator can start another"),
    Column("consolidation_error", Text, comment="why the last run failed"),
    Column("consolidation", JSONB, comment="the result: {skipped} or {stored, duplicates_merged, superseded}"),
    Column(
        "priority",
        SmallInteger,
        nullable=False,
        server_default="5",
        comment="the highest priority of its turns since it last had no unsettled turn",
    ),
    Column(
        "paced",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="while not_before is set: its turn waits for a model; few such sessions are woken at a time",
    ),
    Column(
        "queued_at",
        _timestamp,
        comment="since when it waits for its user's other turns; NULL: it does not wait",
    ),
    Column(
        "deaths",
        Integer,
        nullable=False,
        server_default="0",
        comment="processes that died during its turn since the last progress",
    ),
    Column("blamed_token", BigInteger, comment="token of the claim whose process died; the death is charged to a turn"),
    Column("unequipped_since", _timestamp, comment="when a worker first lacked the agent or a tool of its turn"),
    Column("parked_for", Text, comment="while paced is set: the model for which its turn waits"),
    Column(
        "depth",
        SmallInteger,
        nullable=False,
        server_default="0",
        comment="0: a conversation of the user; else an agent's call opened it: the number of agents above it",
    ),
    _one_of("state", SESSION_STATES),
    CheckConstraint("unsettled >= 0", name="unsettled"),
    Index("sessions_live_key", "user_id", "scope", unique=True, postgresql_where=text("routable")),
    Index("sessions_of_user_idx", "user_id", "created_at", "session_id"),
    Index("sessions_of_scope_idx", "user_id", "scope", "created_at", "session_id"),
    Index(
        "sessions_of_tenant_idx",
        text("split_part(user_id, chr(31), 1)"),
        "created_at",
        "session_id",
        postgresql_where=text("strpos(user_id, chr(31)) > 0"),
    ),
    Index("sessions_idle_idx", "last_activity_at", postgresql_where=text("end_requested_at IS NULL")),
    Index(
        "sessions_ending_idx",
        "end_requested_at",
        postgresql_where=text("end_requested_at IS NOT NULL AND ended_at IS NULL"),
    ),
    Index("sessions_admitted_idx", "user_id", postgresql_where=text("unsettled > 0 AND not_before IS NULL")),
    Index(
        "sessions_queued_idx",
        "user_id",
        text("priority DESC"),
        "queued_at",
        postgresql_where=text("unsettled > 0 AND queued_at IS NOT NULL"),
    ),
    Index(
        "sessions_queued_place_idx",
        text("(md5(user_id) || user_id)"),
        postgresql_where=text(keyed("unsettled > 0 AND queued_at IS NOT NULL")),
    ),
    Index(
        "sessions_parked_idx",
        text("coalesce(parked_for, '')"),
        text("least(wakes, 6)"),
        "not_before",
        postgresql_where=text("unsettled > 0 AND not_before IS NOT NULL AND paced"),
    ),
    Index(
        "sessions_due_idx",
        "priority",
        text("least(wakes, 6)"),
        text("coalesce(woken_at, '-infinity'::timestamptz)"),
        # Only statements with a condition on `priority` use it: it is nearly empty while little is due, and others
        # would read all of it instead of looking up a key.
        postgresql_where=text("unsettled > 0 AND not_before IS NULL AND priority IS NOT NULL"),
    ),
    Index(
        "sessions_postponed_idx",
        "paced",
        text("least(wakes, 6)"),
        "not_before",
        postgresql_where=text("unsettled > 0 AND not_before IS NOT NULL"),
    ),
    Index(
        "sessions_postponed_woken_at_idx",
        "woken_at",
        postgresql_where=text("unsettled > 0 AND not_before IS NOT NULL"),
    ),
    Index(
        "sessions_ending_wake_idx",
        text("least(wakes, 6)"),
        text("coalesce(woken_at, '-infinity'::timestamptz)"),
        postgresql_where=text("end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0"),
    ),
    Index(
        "sessions_previous_session_id_idx",
        "previous_session_id",
        postgresql_where=text("previous_session_id IS NOT NULL"),
    ),
    Index("sessions_open_forks_idx", "user_id", postgresql_where=text("forked_from IS NOT NULL AND ended_at IS NULL")),
    Index("sessions_forked_from_idx", "forked_from", postgresql_where=text("forked_from IS NOT NULL")),
    Index("sessions_created_at_idx", "created_at", "session_id"),
    Index(
        "sessions_waiting_idx",
        "ended_at",
        postgresql_where=text("ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL"),
    ),
    Index(
        "sessions_consolidation_due_idx",
        text("coalesce(consolidation_due_at, ended_at)"),
        postgresql_where=text("ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL"),
    ),
    # For a claim, which looks for the user's earlier sessions.
    Index(
        "sessions_waiting_of_user_idx",
        "user_id",
        "ended_at",
        "session_id",
        postgresql_where=text(
            keyed("ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL")
        ),
    ),
    Index(
        "sessions_given_up_idx",
        "consolidation_given_up_at",
        "session_id",
        postgresql_where=text("consolidation_given_up_at IS NOT NULL"),
    ),
    Index(
        "sessions_given_up_of_user_idx",
        "user_id",
        "consolidation_given_up_at",
        "session_id",
        postgresql_where=text("consolidation_given_up_at IS NOT NULL"),
    ),
    Index(
        "sessions_imported_as_key",
        "user_id",
        "imported_as",
        unique=True,
        postgresql_where=text("imported_as IS NOT NULL"),
    ),
    postgresql_with={"fillfactor": "70"},
)

turns = Table(
    "turns",
    metadata,
    Column("turn_id", Uuid, primary_key=True),
    Column("session_id", Uuid, ForeignKey("sessions.session_id"), nullable=False),
    Column("seq", BigInteger, nullable=False, comment="order of acceptance within the session"),
    Column("user_id", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("reply_to", JSONB),
    Column("metadata", JSONB),
    Column("status", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("steps", Integer, nullable=False, server_default="0"),
    Column("first_seq", BigInteger, comment="seq of its first message; set when it begins"),
    Column("reply_seq", BigInteger, comment="seq of the message that is its reply"),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("usage", JSONB),
    Column("cancel_requested_at", _timestamp),
    Column("accepted_at", _timestamp, nullable=False),
    Column("started_at", _timestamp),
    Column("settled_at", _timestamp),
    Column("settled_tick", BigInteger, comment="the session's tick when the turn was settled"),
    Column("unsaved", JSON, comment="how the turn ends; it is settled when the session's snapshot is saved"),
    Column("unsaved_error", Text, comment="why the snapshot is not saved yet"),
    Column("attempt_error", Text, comment="why the last attempt failed"),
    Column("feedback", JSONB, comment="a person's feedback: a score, -1 or 1, and a comment"),
    Column("instructions", Text, comment="what a function of the agent made for the turn"),
    Column("tools_left_out", JSONB, comment="names of tools that do not fit its prompts"),
    Column("data", JSONB, comment="the output of the turn, beside the text of its reply"),
    Column(
        "steers",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="until it begins: its message may join the turn that runs",
    ),
    Column("fingerprint", Text, comment="of its agent, in the worker that last began it"),
    Column("additions", JSONB, comment="what its client adds to the agent: tools, settings, instructions, an output"),
    Column("takeovers", JSONB, comment="claims of expired leases: [{at, owner, lost}]"),
    Column("traceparent", Text, comment="the span of its accept, as W3C Trace Context has it"),
    _one_of("status", TURN_STATUSES),
    CheckConstraint(
        "(settled_at IS NULL) = (status IN ('accepted', 'running', 'waiting_approval', 'parked'))", name="settled"
    ),
    UniqueConstraint("session_id", "seq"),
    Index("turns_unsettled_idx", "session_id", "seq", postgresql_where=text("settled_at IS NULL")),
    Index("turns_user_id_idx", "user_id", "turn_id"),
    Index("turns_error_idx", "turn_id", postgresql_where=text("error_code IS NOT NULL")),
    postgresql_with={"fillfactor": "70"},
)

_PARTS = "its files, in the order of the text: [{type, file_id, media_type, name, size, at, tokens, ...}]"

inbox = Table(
    "inbox",
    metadata,
    Column("user_id", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("message_id", Text, nullable=False),
    Column("turn_id", Uuid, ForeignKey("turns.turn_id"), nullable=False, index=True),
    Column("position", Integer, nullable=False, comment="order within the turn; over 1: it was merged into it"),
    Column("text", Text, nullable=False),
    Column("accepted_at", _timestamp, nullable=False),
    Column("parts", JSONB, comment=_PARTS),
    PrimaryKeyConstraint("user_id", "channel", "message_id"),
    Index("inbox_user_id_idx", "user_id", "accepted_at"),
    comment="Every message accepted, once; it enters the transcript with its turn's first commit.",
)

messages = Table(
    "messages",
    metadata,
    Column("session_id", Uuid, ForeignKey("sessions.session_id"), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("turn_id", Uuid, nullable=False),
    Column("role", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("tool_calls", JSONB, comment="[{id, name, arguments}]; arguments is the model's text"),
    Column("tool_call_id", Text),
    Column("message_id", Text, comment="the sender's id, if one was given"),
    Column("channel", Text, nullable=False),
    Column("token_count", Integer, nullable=False),
    Column("model", Text),
    Column("fallback", Boolean),
    Column("usage", JSONB, comment="{input_tokens, output_tokens} of the model call that produced it"),
    Column("created_at", _timestamp, nullable=False),
    Column("author", Text, comment="who wrote the message, in a group"),
    Column("stop_reason", Text, comment="how the model's reply ended, such as stop or length"),
    Column("opaque", JSONB, comment="what the provider needs back, with its endpoint and model family"),
    Column("parts", JSONB, comment=_PARTS),
    Column("prompt", JSONB, comment="of a reply: what its prompt had, by reference"),
    PrimaryKeyConstraint("session_id", "seq"),
    _one_of("role", ("user", "assistant", "tool")),
    comment="The transcript. Rows are appended and never updated.",
)

running_summaries = Table(
    "running_summaries",
    metadata,
    Column("session_id", Uuid, ForeignKey("sessions.session_id", ondelete="CASCADE"), primary_key=True),
    Column("from_seq", BigInteger, nullable=False, comment="the first message that the summary covers"),
    Column("to_seq", BigInteger, nullable=False, comment="the last message that has left the prompts; 0: none has"),
    Column("summary", Text, nullable=False, comment="of the messages from from_seq to to_seq"),
    Column("extractive", Boolean, nullable=False, comment="a part of it is an extract, which no model wrote"),
    Column("next_seq", BigInteger, comment="the last message of those that leave the prompts next"),
    Column("next_summary", Text, comment="of the messages from from_seq to next_seq, made in the background"),
    Column("attempts", SmallInteger, nullable=False, server_default="0", comment="to make next_summary"),
    Column("due_at", _timestamp, comment="when a worker makes next_summary; NULL: it is made, or abandoned"),
    Index("running_summaries_due_at_idx", "due_at", postgresql_where=text("due_at IS NOT NULL")),
    comment="Layer 1: of each long session, the summary of what its prompts no longer show.",
)

model_windows = Table(
    "model_windows",
    metadata,
    Column("model", Text, primary_key=True),
    Column("tokens", Integer, nullable=False, comment="an estimate: a prompt of this size was too long"),
    Column("learned_at", _timestamp, nullable=False),
    comment="The windows of models, as far as a refused prompt has shown them.",
)

file_contents = Table(
    "file_contents",
    metadata,
    Column("content_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False, comment="'': none"),
    Column("sha256", LargeBinary, nullable=False),
    Column("size", BigInteger, nullable=False, comment="bytes"),
    Column("width", Integer, comment="pixels, of an image"),
    Column("height", Integer, comment="pixels, of an image"),
    Column("pages", Integer, comment="of a PDF, as far as they can be counted"),
    Column("place", Text, comment="the URL of its object; NULL: its bytes are in file_chunks"),
    Column("delete_at", _timestamp, comment="no file has it: when its object, then its row, is deleted"),
    Index(
        "file_contents_tenant_sha256_key", "tenant", "sha256", unique=True, postgresql_where=text("delete_at IS NULL")
    ),
    Index("file_contents_delete_at_idx", "delete_at", postgresql_where=text("delete_at IS NOT NULL")),
    comment="The contents of files, each once for each tenant.",
)

file_chunks = Table(
    "file_chunks",
    metadata,
    Column("content_id", Uuid, ForeignKey("file_contents.content_id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False, comment="from 0"),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("content_id", "number"),
    comment="The bytes of the contents that have no object.",
)

files = Table(
    "files",
    metadata,
    Column("file_id", Uuid, primary_key=True),
    Column("tenant", Text, nullable=False, comment="'': none"),
    Column("user_id", Text, index=True, comment="NULL: uploaded for no user; a message gets a copy for its user"),
    Column("content_id", Uuid, ForeignKey("file_contents.content_id"), nullable=False, index=True),
    Column("media_type", Text, nullable=False, comment="as its content shows"),
    Column("name", Text),
    Column("created_at", _timestamp, nullable=False),
    Column("used_at", _timestamp, comment="when a message first had it; NULL: it is deleted after a day"),
    Column("session_id", Uuid, index=True, comment="whose message had it last"),
    Index("files_unused_idx", "created_at", postgresql_where=text("used_at IS NULL")),
    comment="Files of users.",
)

tool_effects = Table(
    "tool_effects",
    metadata,
    Column("effect_id", Uuid, primary_key=True, comment="the tool's idempotency key"),
    Column("turn_id", Uuid, ForeignKey("turns.turn_id"), nullable=False),
    Column("message_seq", BigInteger, nullable=False, comment="seq of the assistant message that makes the call"),
    Column("position", Integer, nullable=False, comment="index of the call in that message, from 0"),
    Column("tool", Text, nullable=False),
    Column("arguments", Text, nullable=False),
    Column("effect", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("result", Text),
    Column("intended_at", _timestamp, nullable=False),
    Column("decide_at", _timestamp, nullable=False, comment="deadline: intent + timeout"),
    Column("finished_at", _timestamp),
    Column("variables", JSON, comment="[[number, name, value]] for the step to commit; without a value: removed"),
    Column("waits_for", Text, comment="what the call waits for without a worker"),
    Column("sent_at", _timestamp, comment="since when its task may be with the broker"),
    Column("probe_at", _timestamp, comment="when the sweeper asks for its task's result, or revokes the task"),
    Column("progress", Text, comment="the task's last progress report, as JSON"),
    Column("parts", JSON, comment="[[status, result]]: the calls of a list of arguments"),
    Column("approver", Text, comment="who approves it: user or staff; NULL: it needs no approval"),
    Column("decided_by", Text, comment="who approved or denied it, such as user:KEY"),
    Column("decided_at", _timestamp),
    Column("payload", JSONB, comment="the result as the agent's library needs it, until the step commits it"),
    _one_of("effect", ("pure", "idempotent", "unsafe")),
    _one_of("status", EFFECT_STATUSES),
    _one_of("waits_for", ("task", "timer", "client", "agent", "user")),
    UniqueConstraint("turn_id", "message_seq", "position"),
    Index("tool_effects_probe_idx", "probe_at", postgresql_where=text("probe_at IS NOT NULL")),
    Index("tool_effects_asked_idx", "effect_id", postgresql_where=text("status = 'asked'")),
    Index("tool_effects_decided_by_idx", "decided_by", postgresql_where=text("decided_by IS NOT NULL")),
    comment="Tool calls: the intent is written before the call, the result after it.",
)

_RECEIVER = (
    "coalesce(target ->> 'url', target ->> 'task', "
    "(coalesce(target ->> 'channel', '') || ' ') || coalesce(target #>> '{place,chat}', ''))"
)

_SERVICE = (
    "coalesce(lower(substring(target ->> 'url', '^[^:/?#]+://(?:[^/?#@]*@)?([^/?#]*)')), "
    "'task ' || coalesce(target ->> 'queue', target ->> 'task'), 'channel ' || (target ->> 'channel'), '')"
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("delivery_id", Uuid, primary_key=True),
    Column("turn_id", Uuid, nullable=False, comment="in turns, or in unrouted if the message was refused"),
    Column("user_id", Text, nullable=False, comment="the turn's user"),
    Column("scope", Text, comment="the scope of the turn's session; NULL: it has no session"),
    Column("asking_seq", BigInteger, comment="seq of the message whose calls need approval; NULL: the reply"),
    Column("target", JSONB, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due_at", _timestamp, nullable=False, comment="the next attempt; an attempt moves it ahead"),
    Column("last_error", Text),
    Column("created_at", _timestamp, nullable=False),
    Column("delivered_at", _timestamp),
    Column("wake_at", _timestamp, comment="when it may be published again; NULL: when it is due"),
    Column(
        "wakes", Integer, nullable=False, server_default="0", comment="the sweeper's wake-ups since the last attempt"
    ),
    _one_of("status", DELIVERY_STATUSES),
    Index("deliveries_turn_key", "turn_id", "asking_seq", unique=True, postgresql_nulls_not_distinct=True),
    Index("deliveries_wake_idx", text("greatest(due_at, wake_at)"), postgresql_where=text("status = 'pending'")),
    Index(
        "deliveries_pending_idx",
        "user_id",
        "scope",
        text(f"md5({_RECEIVER})"),
        "delivery_id",
        postgresql_where=text("status = 'pending'"),
    ),
    Index(
        "deliveries_service_idx",
        text(f"md5({_SERVICE})"),
        text("greatest(due_at, wake_at)"),
        postgresql_where=text("status = 'pending'"),
    ),
    Index(
        "deliveries_user_idx",
        text(f"md5({_SERVICE})"),
        text("md5(user_id)"),
        text("greatest(due_at, wake_at)"),
        postgresql_where=text("status = 'pending'"),
    ),
    Index("deliveries_refused_idx", "user_id", postgresql_where=text("scope IS NULL")),
    Index("deliveries_over_idx", "created_at", postgresql_where=text("status <> 'pending'")),
    Index("deliveries_failed_idx", "created_at", postgresql_where=text("status = 'failed'")),
    Index("deliveries_abandoned_idx", "due_at", postgresql_where=text("status = 'failed'")),
    comment="The outbox: replies to deliver.",
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("session_id", Uuid, ForeignKey("sessions.session_id"), nullable=False),
    Column("set_aside", Boolean, nullable=False, comment="could not be used; kept for the operator and never read"),
    Column("variables", JSON, nullable=False, comment="JSON text, not jsonb, so that values are read back exactly"),
    Column("events", JSON, nullable=False, comment="[{source, type, payload}]"),
    Column("tick", BigInteger, nullable=False, comment="the session's tick at which these values were set"),
    Column("token", BigInteger, nullable=False, comment="the writer's fencing token"),
    Column("saved_at", _timestamp, nullable=False),
    PrimaryKeyConstraint("session_id", "set_aside", "tick"),
    Index("snapshots_set_aside_idx", "saved_at", postgresql_where=text("set_aside")),
    comment="Working variables and pending events: a row with each step that changed them.",
)

schedule_slots = Table(
    "schedule_slots",
    metadata,
    Column("entry", Text, nullable=False),
    Column("slot", _timestamp, nullable=False),
    Column("taken_at", _timestamp, nullable=False),
    Column("done_at", _timestamp),
    Column("attempts", Integer, nullable=False, server_default="1"),
    Column("retry_at", _timestamp, comment="when the next attempt may start"),
    Column("error", Text, comment="why the last attempt failed"),
    PrimaryKeyConstraint("entry", "slot"),
    comment="Slots of the schedule: taken by the task that does the work, done when the work is done.",
)

schedule_entries = Table(
    "schedule_entries",
    metadata,
    Column("entry", Text, primary_key=True),
    Column("since", _timestamp, nullable=False, comment="when the entry was first seen; earlier slots are skipped"),
    Column("token", BigInteger, nullable=False, server_default="0", comment="grows with each slot taken"),
    Column("lease_until", _timestamp, comment="lease on the slot in progress; NULL: no slot is in progress"),
    Column("woken_at", _timestamp),
    Column(
        "wakes", Integer, nullable=False, server_default="0", comment="the sweeper's wake-ups since a slot was taken"
    ),
    comment="The schedule's entries, each with the lease on its current slot.",
    postgresql_with={"fillfactor": "70"},
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("name", Text, primary_key=True),
    Column("due_at", _timestamp, nullable=False),
    Column("after", Text, comment="where the last round stopped; NULL: it visited all"),
    Column("paces", JSONB, comment="by model: the turns that it takes at once, and those that it has"),
    comment="When each kind of sweep is due: the worker that moves the time ahead does it.",
)

processes = Table(
    "processes",
    metadata,
    Column("process_id", Uuid, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False, comment="as in the leases of sessions"),
    Column("release", Text, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("started_at", _timestamp, nullable=False),
    Column("seen_at", _timestamp, nullable=False),
    Column("stopped_at", _timestamp),
    Column("skew_s", Double, nullable=False, comment="how far its clock is ahead of the database's"),
    Column("quiet", Boolean, comment="the intake is closed, and no turn runs here; NULL: a release before this column"),
    _one_of("kind", ("worker", "beat")),
    comment="Workers and beats, each with its last report.",
    postgresql_with={"fillfactor": "70"},
)

intake = Table(
    "intake",
    metadata,
    Column("name", Text, primary_key=True),
    Column("closed_at", _timestamp, comment="since when workers start no turns; NULL: they do"),
    comment="Whether workers start turns: one row, which `perdure drain` closes and opens.",
)

pauses = Table(
    "pauses",
    metadata,
    Column("pause_id", Uuid, primary_key=True),
    Column("tenant", Text, comment="NULL: any, or that of the user's key"),
    Column("user_id", Text, comment="a user's key; NULL: any"),
    Column("agent", Text, comment="NULL: any"),
    Column("paused_at", _timestamp, nullable=False),
    Index("pauses_key", "tenant", "user_id", "agent", unique=True, postgresql_nulls_not_distinct=True),
    comment="Whose turns do not begin: each row applies to the turns that match all its parts.",
)

turn_spendings = Table(
    "turn_spendings",
    metadata,
    Column("turn_id", Uuid, ForeignKey("turns.turn_id", ondelete="CASCADE"), primary_key=True),
    Column("root_id", Uuid, nullable=False, index=True, comment="the turn for which it works, or itself"),
    Column("day", Date, nullable=False, comment="that of the last model call"),
    Column("earlier", Numeric, nullable=False, comment="US dollars before this day"),
    Column("today", Numeric, nullable=False, comment="US dollars on this day, with what is reserved for a call"),
    Column("total", Numeric, nullable=False, comment="US dollars, with what is reserved for a call"),
    comment="What turns cost, while a budget is set.",
)

day_spendings = Table(
    "day_spendings",
    metadata,
    Column("kind", Text, _one_of("kind", ("user", "tenant")), nullable=False),
    Column("key", Text, nullable=False, comment="the user's key, or the tenant; empty: no tenant"),
    Column("day", Date, nullable=False, index=True),
    Column("amount", Numeric, nullable=False, comment="US dollars, with what is reserved for calls"),
    PrimaryKeyConstraint("kind", "key", "day"),
    comment="What the turns of a user or a tenant cost in a day, while a budget is set.",
)

audit = Table(
    "audit",
    metadata,
    Column("audit_id", Uuid, primary_key=True),
    Column("via", Text, _one_of("via", ("api", "command", "console")), nullable=False),
    Column("actor", Text, nullable=False, comment="the digest of a key, or a user of the machine"),
    Column("action", Text, nullable=False),
    Column("target", Text, comment="what was changed: an id, or a name"),
    Column("user_id", Text, comment="a user's key, if a user's data was changed"),
    Column("note", Text, comment="how it was decided, or how many were changed"),
    Column("began_at", _timestamp, nullable=False),
    Column("outcome", Text, comment="done, or an error's code; NULL: unfinished, or the process died"),
    Index("audit_user_id_idx", "user_id", "audit_id", postgresql_where=text("user_id IS NOT NULL")),
    comment="Operators' actions: written before the action, with the outcome after it.",
)

schema_compatibility = Table(
    "schema_compatibility",
    metadata,
    Column("single", Boolean, primary_key=True),
    Column("readable_from", Text, nullable=False, comment="newest revision of the oldest release that can use it"),
    CheckConstraint("single", name="single"),
    comment="Which releases can use the schema: one row, which every migration writes.",
)

erasures = Table(
    "erasures",
    metadata,
    Column("erasure_id", Uuid, primary_key=True),
    Column("user_id", Text, nullable=False, comment="whose Redis keys are deleted again"),
    Column("session_ids", ARRAY(Uuid), nullable=False, comment="the user's sessions"),
    Column("erased_at", _timestamp, nullable=False),
    Column("due_at", _timestamp, nullable=False, comment="when every worker that was paused has lost its lease"),
    Column(
        "task_ids",
        ARRAY(Uuid),
        nullable=False,
        server_default=text("'{}'"),
        comment="tasks of Celery tools that may be queued",
    ),
    Column("revoked_at", _timestamp, comment="when they were first revoked; they are again at due_at"),
    comment="Users who were erased less than a lease ago: what paused workers still write is deleted at `due_at`.",
)

stale_statistics = Table(
    "stale_statistics",
    metadata,
    Column("table_name", Text, primary_key=True),
    Column("erased_at", _timestamp, nullable=False, comment="when rows were last erased"),
    Column("due_at", _timestamp, nullable=False, comment="when a worker may analyze the table"),
    comment="Tables whose planner statistics may have samples of erased rows.",
)

# --- memory ------------------------------------------------------------------------------

message_words = Table(
    "message_words",
    metadata,
    Column("session_id", Uuid, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("user_id", Text, nullable=False),
    Column("occurred_at", _timestamp, nullable=False),
    Column("words", TSVECTOR, nullable=False),
    PrimaryKeyConstraint("session_id", "seq"),
    Index("message_words_user_id_idx", "user_id", "occurred_at"),
    Index("message_words_words_idx", "words", postgresql_using="gin", postgresql_with={"gin_pending_list_limit": 64}),
    comment="The full-text index of messages: written by a trigger on messages, in the same commit.",
)

embedders = Table(
    "embedders",
    metadata,
    Column("embedder_id", SmallInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("dimensions", SmallInteger, nullable=False),
    Column("created_at", _timestamp, nullable=False),
    Column("indexed_at", _timestamp, comment="since when its vectors are searched by an index"),
    Column("walked_at", _timestamp, comment="when the last search for texts without its vector ended"),
    Column("walked_kind", Text, comment="how far the present search has come"),
    Column("walked_id", Uuid),
    Column("walked_seq", BigInteger),
    Column(
        "half_indexed_at",
        _timestamp,
        comment="since when its vectors of messages, in both columns, are searched by an index",
    ),
    UniqueConstraint("name", "dimensions", name="embedders_name_dimensions_key"),
    comment="Embedders that made vectors. Vectors of different embedders are never compared.",
)

message_vectors = Table(
    "message_vectors",
    metadata,
    Column("session_id", Uuid, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("embedder_id", SmallInteger, ForeignKey("embedders.embedder_id"), nullable=False),
    Column("user_id", Text, nullable=False),
    Column("vector", VECTOR, comment="a vector that is not in `half` yet; of length 1"),
    Column("half", HALFVEC, comment="of length 1; NULL, as is vector: the embedder refuses the text"),
    ForeignKeyConstraint(
        ["session_id", "seq"],
        ["message_words.session_id", "message_words.seq"],
        name="message_vectors_session_id_seq_fkey",
        ondelete="CASCADE",
    ),
    PrimaryKeyConstraint("session_id", "seq", "embedder_id"),
    Index("message_vectors_user_id_idx", "user_id", "embedder_id"),
    comment="Vectors of messages; one row for each embedder.",
)

unembedded = Table(
    "unembedded",
    metadata,
    Column("kind", Text, nullable=False),
    Column("id", Uuid, nullable=False, comment="the message's session_id, or the memory_id"),
    Column("seq", BigInteger, nullable=False, comment="the message's seq; 0 for a memory"),
    Column("user_id", Text, nullable=False, index=True),
    Column("due_at", _timestamp, nullable=False, index=True, comment="the next attempt; an attempt moves it ahead"),
    Column("attempts", Integer, nullable=False, server_default="0"),
    _one_of("kind", ("message", "memory")),
    PrimaryKeyConstraint("kind", "id", "seq"),
    comment="Messages and memories whose vector is still to be made.",
)

memories = Table(
    "memories",
    metadata,
    Column("memory_id", Uuid, primary_key=True),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("importance", Double, nullable=False, comment="the value before decay; raised when the memory is repeated"),
    Column("value", Double, nullable=False, comment="the importance after decay until decayed_at"),
    Column("decayed_at", _timestamp),
    Column("access_count", Integer, nullable=False, server_default="0"),
    Column("last_accessed_at", _timestamp),
    Column("channels", ARRAY(Text), nullable=False),
    Column("origin", Text, nullable=False, comment="who wrote it"),
    Column("session_id", Uuid, comment="the session that it was first extracted from"),
    Column("created_at", _timestamp, nullable=False),
    Column("valid_from", _timestamp, nullable=False, comment="when the user said it, or since when it holds"),
    Column("valid_to", _timestamp, comment="when the user said the contrary"),
    Column("superseded_by", Uuid, ForeignKey("memories.memory_id", ondelete="SET NULL")),
    Column("archived_at", _timestamp),
    Column("subject", Text, comment="whom it is about: user, a relative, a name"),
    Column("attribute", Text, comment="what of the subject, such as home or allergy"),
    Column(
        "words",
        TSVECTOR,
        Computed("perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)])", persisted=True),
        nullable=False,
    ),
    _one_of("kind", MEMORY_KINDS),
    _one_of("origin", ("consolidation", "tool", "user")),
    CheckConstraint("importance >= 0 AND importance <= 1", name="importance"),
    Index("memories_user_id_idx", "user_id", "valid_from"),
    Index("memories_words_idx", "words", postgresql_using="gin", postgresql_with={"gin_pending_list_limit": 64}),
    Index("memories_superseded_by_idx", "superseded_by", postgresql_where=text("superseded_by IS NOT NULL")),
    comment="Layer 3: facts about a user. Superseded ones are kept, as history.",
    postgresql_with={"fillfactor": "80"},
)

memory_vectors = Table(
    "memory_vectors",
    metadata,
    Column("memory_id", Uuid, ForeignKey("memories.memory_id", ondelete="CASCADE"), nullable=False),
    Column("embedder_id", SmallInteger, ForeignKey("embedders.embedder_id"), nullable=False),
    Column("user_id", Text, nullable=False),
    Column("vector", VECTOR, comment="of length 1; NULL: the embedder refuses the text"),
    PrimaryKeyConstraint("memory_id", "embedder_id"),
    Index("memory_vectors_user_id_idx", "user_id", "embedder_id"),
    comment="Vectors of memories; one row for each embedder.",
)

memory_sources = Table(
    "memory_sources",
    metadata,
    Column("memory_id", Uuid, ForeignKey("memories.memory_id", ondelete="CASCADE"), nullable=False),
    Column("session_id", Uuid, nullable=False),
    Column("seq", BigInteger, nullable=False),
    ForeignKeyConstraint(
        ["session_id", "seq"],
        ["messages.session_id", "messages.seq"],
        name="memory_sources_session_id_seq_fkey",
        ondelete="CASCADE",
    ),
    PrimaryKeyConstraint("memory_id", "session_id", "seq"),
    Index("memory_sources_session_id_seq_idx", "session_id", "seq"),
    comment="The messages that a memory came from.",
)

forgotten_messages = Table(
    "forgotten_messages",
    metadata,
    Column("session_id", Uuid, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("forgotten_at", _timestamp, nullable=False),
    ForeignKeyConstraint(
        ["session_id", "seq"],
        ["messages.session_id", "messages.seq"],
        name="forgotten_messages_session_id_seq_fkey",
        ondelete="CASCADE",
    ),
    PrimaryKeyConstraint("session_id", "seq"),
    comment="The messages of forgotten memories, from which no memory is extracted again.",
)

entities = Table(
    "entities",
    metadata,
    Column("entity_id", Uuid, primary_key=True),
    Column("user_id", Text, ForeignKey("users.user_id"), nullable=False),
    Column("name", Text, nullable=False, comment="the first spelling"),
    Column("key", Text, nullable=False, comment="the normalised name, the same for all spellings"),
    Column("kind", Text, comment="person, place, thing ... as extracted"),
    Column("created_at", _timestamp, nullable=False),
    UniqueConstraint("user_id", "key", name="entities_user_id_key_key"),
    comment="Layer 4: people and things that a user's memories mention.",
)

entity_mentions = Table(
    "entity_mentions",
    metadata,
    Column("entity_id", Uuid, ForeignKey("entities.entity_id", ondelete="CASCADE"), nullable=False),
    Column("memory_id", Uuid, ForeignKey("memories.memory_id", ondelete="CASCADE"), nullable=False, index=True),
    PrimaryKeyConstraint("entity_id", "memory_id"),
    comment="Which memories mention an entity.",
)

relations = Table(
    "relations",
    metadata,
    Column("source_id", Uuid, ForeignKey("entities.entity_id", ondelete="CASCADE"), nullable=False),
    Column("predicate", Text, nullable=False),
    Column("target_id", Uuid, ForeignKey("entities.entity_id", ondelete="CASCADE"), nullable=False, index=True),
    Column(
        "memory_id",
        Uuid,
        ForeignKey("memories.memory_id", ondelete="CASCADE"),
        nullable=False,
        index=True,
        comment="the memory that states it",
    ),
    Column("user_id", Text, nullable=False, index=True),
    Column("created_at", _timestamp, nullable=False),
    PrimaryKeyConstraint("source_id", "predicate", "target_id", "memory_id"),
    comment="Relations between entities; one row for each memory that states the relation.",
)

memory_accesses = Table(
    "memory_accesses",
    metadata,
    Column("memory_id", Uuid, ForeignKey("memories.memory_id", ondelete="CASCADE"), nullable=False),
    Column("accessed_at", _timestamp, nullable=False, index=True),
    Column("access_id", Uuid, nullable=False, comment="id of the recall"),
    Column("user_id", Text, nullable=False),
    PrimaryKeyConstraint("memory_id", "accessed_at", "access_id"),
    Index("memory_accesses_user_id_idx", "user_id", "accessed_at"),
    comment="Layer 5: which memories were recalled, and when; kept for some days.",
)

hot_memories = Table(
    "hot_memories",
    metadata,
    Column("user_id", Text, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("memory_id", Uuid, ForeignKey("memories.memory_id", ondelete="CASCADE"), nullable=False, unique=True),
    Column("score", Double, nullable=False),
    Column("refreshed_at", _timestamp, nullable=False),
    PrimaryKeyConstraint("user_id", "rank"),
    comment="Layer 5: the memories that were recalled most, weighted by time.",
)

# --- casebank ----------------------------------------------------------------------------

_case_id = Text(collation="C")  # by code point, as Python sorts


def _case_columns() -> list[Column[Any]]:
    """The columns that `cases` and `case_archive` share, so that a case can be restored from the archive unchanged."""
    return [
        Column("query", Text, nullable=False),
        Column("response_text", Text, nullable=False),
        Column("category_path", Text),
        Column("query_vector", VECTOR),
        Column("embedder", Text),
        Column("usage_count", BigInteger, nullable=False, server_default="0"),
        Column("success_rate", Double, comment="percent; NULL while unknown"),
        Column("last_accessed_at", _timestamp),
        Column("created_at", _timestamp, nullable=False),
        Column("user_id", Text, comment="the author, whose words it holds; NULL: no user's words"),
        Column("turn_id", Uuid, comment="the turn that it was learned from"),
        Column("review", JSONB, comment="problems that reflection found"),
    ]


cases = Table(
    "cases",
    metadata,
    Column("case_id", _case_id, primary_key=True),
    *_case_columns(),
    Column("status", Text, nullable=False, server_default="active"),
    Column("bank", Text, nullable=False, server_default="common", comment="agents with this bank find the case"),
    Column("shared_at", _timestamp, comment="since when an administrator lets it enter all users' prompts"),
    _one_of("status", CASE_STATUSES),
    CheckConstraint("usage_count >= 0", name="usage_count"),
    CheckConstraint("success_rate BETWEEN 0 AND 100", name="success_rate"),
    CheckConstraint("query_vector IS NULL OR embedder IS NOT NULL", name="embedder"),
    CheckConstraint("turn_id IS NULL OR user_id IS NOT NULL", name="author"),
    UniqueConstraint("turn_id"),
    Index("cases_user_id_idx", "user_id", postgresql_where=text("user_id IS NOT NULL")),
    Index(
        "cases_of_tenant_idx",
        text("split_part(user_id, chr(31), 1)"),
        postgresql_where=text("strpos(user_id, chr(31)) > 0"),
    ),
    Index(
        "cases_bank_idx", "bank", "embedder", postgresql_where=text("status = 'active' AND query_vector IS NOT NULL")
    ),
    Index(
        "cases_everybodys_idx",
        "bank",
        "embedder",
        postgresql_where=text("status = 'active' AND query_vector IS NOT NULL AND user_id IS NULL"),
    ),
    Index(
        "cases_approved_idx",
        "bank",
        "embedder",
        postgresql_where=text(
            "status = 'active' AND query_vector IS NOT NULL AND shared_at IS NOT NULL AND user_id IS NOT NULL"
        ),
    ),
    Index("cases_flagged_idx", "case_id", postgresql_where=text("review IS NOT NULL")),
    postgresql_with={"fillfactor": "80"},
    comment="Questions answered before, with success rates. Only vectors of one embedder and size are compared.",
)

case_executions = Table(
    "case_executions",
    metadata,
    Column("case_id", _case_id, nullable=False, comment="no foreign key: its check would lock the case's row"),
    Column("turn_id", Uuid, nullable=False, index=True),
    Column("succeeded", Boolean, nullable=False, comment="whether the turn succeeded"),
    Column("feedback", SmallInteger, comment="-1 or 1; it overrides `succeeded`"),
    Column("error", Text),
    Column("executed_at", _timestamp, nullable=False),
    Column(
        "counted",
        Boolean,
        nullable=False,
        server_default=text("false"),
        comment="whether the case's usage_count and last_accessed_at include it",
    ),
    PrimaryKeyConstraint("case_id", "turn_id"),
    CheckConstraint("feedback IN (-1, 1)", name="feedback"),
    Index("case_executions_newest_idx", "case_id", "executed_at", "turn_id"),
    Index("case_executions_uncounted_idx", "case_id", postgresql_where=text("NOT counted")),
    comment="Turns that had a case in their prompt, with their outcome.",
)

case_archive = Table(
    "case_archive",
    metadata,
    Column("archive_id", BigInteger, Identity(always=True), primary_key=True),
    Column("case_id", _case_id, ForeignKey("cases.case_id", ondelete="CASCADE"), nullable=False, index=True),
    *_case_columns(),
    Column("archived_at", _timestamp, nullable=False, index=True),
    Column("archived_reason", Text, nullable=False),
    Column("keeper_id", Text, comment="the case that its counts were merged into"),
    Column("run_id", Uuid),
    Column("restored_at", _timestamp, comment="when it was restored; the row is kept"),
    comment="Copies of cases, made when they were archived.",
)

case_history = Table(
    "case_history",
    metadata,
    Column("history_id", BigInteger, Identity(always=True), primary_key=True),
    Column("case_id", _case_id, ForeignKey("cases.case_id", ondelete="CASCADE"), nullable=False, index=True),
    Column("event", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("details", JSONB),
    Column("run_id", Uuid),
    Column("at", _timestamp, nullable=False),
    _one_of("event", CASE_EVENTS),
    comment="Changes of a case's status or readers, and merges of its counts. Rows are never updated.",
)

case_runs = Table(
    "case_runs",
    metadata,
    Column("run_id", Uuid, primary_key=True),
    Column("dry_run", Boolean, nullable=False, server_default=text("false"), comment="the run ends with the plan"),
    Column("phase", Text, nullable=False),
    Column("done", BigInteger, nullable=False, server_default="0", comment="cases done in this phase"),
    Column("total", BigInteger, nullable=False, server_default="0", comment="cases of this phase"),
    Column("started_at", _timestamp, nullable=False),
    Column("planned_at", _timestamp, comment="the moment that ages in the plan are counted from"),
    Column("notified_at", _timestamp),
    Column("expires_at", _timestamp, comment="when a plan that waits for approval expires"),
    Column("decided_by", Text, comment="who approved or rejected the plan"),
    Column("finished_at", _timestamp),
    Column("error", Text, comment="the last error"),
    Column("token", BigInteger, nullable=False, server_default="1", comment="fencing token; grows with each claim"),
    Column("lease_until", _timestamp),
    _one_of("phase", RUN_PHASES),
    CheckConstraint(
        "(finished_at IS NULL) = (phase IN ('planning', 'notifying', 'waiting_approval', 'applying', 'reporting'))",
        name="finished",
    ),
    CheckConstraint("NOT dry_run OR phase IN ('planning', 'done')", name="dry_run"),
    Index(
        "case_runs_one_at_a_time_key",
        text("(true)"),
        unique=True,
        postgresql_where=text("finished_at IS NULL AND NOT dry_run"),
    ),
    Index(
        "case_runs_one_dry_run_key",
        text("(true)"),
        unique=True,
        postgresql_where=text("finished_at IS NULL AND dry_run"),
    ),
    Index("case_runs_started_at_idx", "started_at"),
    comment="Runs of the weekly policy; at most one is in progress.",
)

case_run_items = Table(
    "case_run_items",
    metadata,
    Column("run_id", Uuid, ForeignKey("case_runs.run_id", ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False, comment="order in which the plan is applied"),
    Column("action", Text, nullable=False),
    Column("case_id", _case_id, nullable=False),
    Column("rule", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("keeper_id", _case_id, comment="of a duplicate: the case that its counts are merged into"),
    Column("similarity", Double, comment="of a duplicate: its similarity to the keeper"),
    Column("keeper_weight", BigInteger, comment="number of uses behind the keeper's rate when the plan was made"),
    Column(
        "usage_count",
        BigInteger,
        nullable=False,
        comment="the case's, with the plan's merges",
    ),
    Column("success_rate", Double, comment="as usage_count"),
    Column("last_accessed_at", _timestamp, comment="as usage_count"),
    Column("outcome", Text),
    Column("outcome_rule", Text, comment="the rule that spared the case when the plan was applied"),
    Column("outcome_reason", Text),
    PrimaryKeyConstraint("run_id", "position"),
    _one_of("action", ("remove", "merge", "archive", "spare")),
    _one_of("outcome", ("done", "spared")),
    Index("case_run_items_keeper_idx", "run_id", "keeper_id", postgresql_where=text("action = 'merge'")),
    comment="A run's plan: one row for each case, with its outcome.",
)
