"""The first tables: users, identities, sessions, turns, inbox, messages, tool effects, deliveries, schedule slots.

SQL statements read the time from `perdure_now()`. This function adds the offset `perdure.clock_offset` to the server's
clock. Tests may set the offset on their connections.

Revision: 0001, after nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from perdure.database.schema import create_extension

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    create_extension(op.get_bind())
    op.execute(
        """
        CREATE FUNCTION perdure_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS
        $$ SELECT now() + coalesce(nullif(current_setting('perdure.clock_offset', true), ''), '0')::interval $$
        """
    )
    op.create_table(
        "schedule_slots",
        sa.Column("entry", sa.Text(), nullable=False),
        sa.Column("slot", sa.DateTime(timezone=True), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("done_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("entry", "slot", name=op.f("schedule_slots_pkey")),
        comment="Beat's slots: taken by the task that does the work, done when it is done.",
    )
    op.create_table(
        "sweeps",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("sweeps_pkey")),
        comment="Whose turn it is to sweep: one compare-and-set on a row.",
    )
    op.create_table(
        "users",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("user_id", name=op.f("users_pkey")),
    )
    op.create_table(
        "identities",
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("identities_user_id_fkey")),
        sa.PrimaryKeyConstraint("channel", "external_id", name=op.f("identities_pkey")),
        comment="Who a channel's user is here.",
    )
    op.create_index(op.f("identities_user_id_idx"), "identities", ["user_id"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column(
            "scope", sa.Text(), nullable=False, comment="'' spans the user's channels; else the one channel it spans"
        ),
        sa.Column("routable", sa.Boolean(), nullable=False, comment="messages without a session_id may come here"),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_activity_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("channels", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("summary", sa.Text(), nullable=True),
        sa.Column("key_topics", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("turn_count", sa.Integer(), server_default="0", nullable=False, comment="turns settled"),
        sa.Column(
            "message_count", sa.BigInteger(), server_default="0", nullable=False, comment="seq of the last message"
        ),
        sa.Column(
            "last_turn_seq",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="seq of the last turn accepted",
        ),
        sa.Column(
            "unsettled", sa.Integer(), server_default="0", nullable=False, comment="turns accepted and not settled"
        ),
        sa.Column("tick", sa.BigInteger(), server_default="0", nullable=False, comment="steps committed"),
        sa.Column(
            "token", sa.BigInteger(), server_default="0", nullable=False, comment="fencing token; grows with each claim"
        ),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "strikes",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="claims since the last commit of a step",
        ),
        sa.Column("claims", sa.Integer(), server_default="0", nullable=False, comment="claims of the present turn"),
        sa.Column(
            "spent_s",
            sa.Double(),
            server_default="0",
            nullable=False,
            comment="seconds under lease in the present turn",
        ),
        sa.Column("woken_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "wakes",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="the sweeper's wake-ups since the last claim",
        ),
        sa.CheckConstraint(
            "state IN ('initializing', 'active', 'thinking', 'tool_executing', 'waiting_approval', "
            "'summarizing', 'ending', 'ended')",
            name=op.f("sessions_state_check"),
        ),
        sa.CheckConstraint("unsettled >= 0", name=op.f("sessions_unsettled_check")),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("sessions_user_id_fkey")),
        sa.PrimaryKeyConstraint("session_id", name=op.f("sessions_pkey")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index(
        "sessions_live_key", "sessions", ["user_id", "scope"], unique=True, postgresql_where=sa.text("routable")
    )
    op.create_index("sessions_user_id_idx", "sessions", ["user_id", "created_at"], unique=False)
    op.create_table(
        "messages",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column(
            "tool_calls",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="[{id, name, arguments}], arguments as the text that the model gave",
        ),
        sa.Column("tool_call_id", sa.Text(), nullable=True),
        sa.Column("message_id", sa.Text(), nullable=True, comment="the sender's own, where it gave one"),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("token_count", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("fallback", sa.Boolean(), nullable=True),
        sa.Column(
            "usage",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="{input_tokens, output_tokens} of the call that said it",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("role IN ('user', 'assistant', 'tool')", name=op.f("messages_role_check")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("messages_session_id_fkey")),
        sa.PrimaryKeyConstraint("session_id", "seq", name=op.f("messages_pkey")),
        comment="The transcript. Appended, never rewritten.",
    )
    op.create_table(
        "turns",
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False, comment="order of acceptance within the session"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("reply_to", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("steps", sa.Integer(), server_default="0", nullable=False),
        sa.Column("first_seq", sa.BigInteger(), nullable=True, comment="seq of its first message; set when it begins"),
        sa.Column("reply_seq", sa.BigInteger(), nullable=True, comment="seq of the message that is its reply"),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("usage", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(settled_at IS NULL) = (status IN ('accepted', 'running', 'waiting_approval', 'parked'))",
            name=op.f("turns_settled_check"),
        ),
        sa.CheckConstraint(
            "status IN ('accepted', 'running', 'waiting_approval', 'parked', 'done', 'failed', 'cancelled')",
            name=op.f("turns_status_check"),
        ),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("turns_session_id_fkey")),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("turns_pkey")),
        sa.UniqueConstraint("session_id", "seq", name=op.f("turns_session_id_seq_key")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index(
        "turns_unsettled_idx",
        "turns",
        ["session_id", "seq"],
        unique=False,
        postgresql_where=sa.text("settled_at IS NULL"),
    )
    op.create_table(
        "deliveries",
        sa.Column("delivery_id", sa.Uuid(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("target", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "due_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="next attempt; moved ahead by whoever attempts",
        ),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("status IN ('pending', 'delivered', 'failed')", name=op.f("deliveries_status_check")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name=op.f("deliveries_turn_id_fkey")),
        sa.PrimaryKeyConstraint("delivery_id", name=op.f("deliveries_pkey")),
        sa.UniqueConstraint("turn_id", name=op.f("deliveries_turn_id_key")),
        comment="The outbox: replies owed to whoever asked for them.",
    )
    op.create_index(
        "deliveries_due_idx", "deliveries", ["due_at"], unique=False, postgresql_where=sa.text("status = 'pending'")
    )
    op.create_table(
        "inbox",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column(
            "position", sa.Integer(), nullable=False, comment="order within the turn; over 1 when merged into it"
        ),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name=op.f("inbox_turn_id_fkey")),
        sa.PrimaryKeyConstraint("user_id", "channel", "message_id", name=op.f("inbox_pkey")),
        comment="Every message accepted, once; it enters the transcript with its turn's first commit.",
    )
    op.create_index(op.f("inbox_turn_id_idx"), "inbox", ["turn_id"], unique=False)
    op.create_table(
        "tool_effects",
        sa.Column("effect_id", sa.Uuid(), nullable=False, comment="the tool's idempotency key"),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("message_seq", sa.BigInteger(), nullable=False, comment="the assistant message that asked"),
        sa.Column("position", sa.Integer(), nullable=False, comment="which of its calls, from 0"),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("intended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "decide_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="in doubt no earlier than this: intent + timeout",
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("effect IN ('pure', 'idempotent', 'unsafe')", name=op.f("tool_effects_effect_check")),
        sa.CheckConstraint(
            "status IN ('intended', 'done', 'failed', 'unknown')", name=op.f("tool_effects_status_check")
        ),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.turn_id"], name=op.f("tool_effects_turn_id_fkey")),
        sa.PrimaryKeyConstraint("effect_id", name=op.f("tool_effects_pkey")),
        sa.UniqueConstraint(
            "turn_id", "message_seq", "position", name=op.f("tool_effects_turn_id_message_seq_position_key")
        ),
        comment="Tool calls: intent before, result after.",
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_table("tool_effects")
    op.drop_index(op.f("inbox_turn_id_idx"), table_name="inbox")
    op.drop_table("inbox")
    op.drop_index("deliveries_due_idx", table_name="deliveries", postgresql_where=sa.text("status = 'pending'"))
    op.drop_table("deliveries")
    op.drop_index("turns_unsettled_idx", table_name="turns", postgresql_where=sa.text("settled_at IS NULL"))
    op.drop_table("turns")
    op.drop_table("messages")
    op.drop_index("sessions_user_id_idx", table_name="sessions")
    op.drop_index("sessions_live_key", table_name="sessions", postgresql_where=sa.text("routable"))
    op.drop_table("sessions")
    op.drop_index(op.f("identities_user_id_idx"), table_name="identities")
    op.drop_table("identities")
    op.drop_table("users")
    op.drop_table("sweeps")
    op.drop_table("schedule_slots")
    op.execute("DROP FUNCTION perdure_now()")
