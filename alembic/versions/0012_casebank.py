"""The tables of the CaseBank, and a column for users' feedback on turns.

A case is a stored question with its answer. The tables hold cases, the turns that used them, archived cases, the
history of cases, and the runs that prune cases.

Revision: 0012, after 0011.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from perdure.database.schema import vector_type

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "turns",
        sa.Column(
            "feedback",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="what a person said of it: a score, -1 or 1, and a comment",
        ),
    )
    op.create_table(
        "case_runs",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("done", sa.BigInteger(), server_default="0", nullable=False, comment="of this phase"),
        sa.Column("total", sa.BigInteger(), server_default="0", nullable=False, comment="of this phase"),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "planned_at", sa.DateTime(timezone=True), nullable=True, comment="the moment that the plan is reckoned from"
        ),
        sa.Column("notified_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True, comment="of a plan that waits for approval"),
        sa.Column("decided_by", sa.Text(), nullable=True, comment="who approved or rejected the plan"),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True, comment="what went wrong last"),
        sa.Column(
            "token", sa.BigInteger(), server_default="1", nullable=False, comment="fencing token; grows with each claim"
        ),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NULL) = (phase IN ('planning', 'notifying', 'waiting_approval', 'applying', 'reporting'))",
            name=op.f("case_runs_finished_check"),
        ),
        sa.CheckConstraint(
            "phase IN ('planning', 'notifying', 'waiting_approval', 'applying', 'reporting', 'done', 'withheld', "
            "'rejected', 'expired')",
            name=op.f("case_runs_phase_check"),
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("case_runs_pkey")),
        comment="Runs of the weekly policy. One at a time is under way.",
    )
    op.create_index(
        "case_runs_one_at_a_time_key",
        "case_runs",
        [sa.literal_column("(true)")],
        unique=True,
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index("case_runs_started_at_idx", "case_runs", ["started_at"], unique=False)
    op.create_table(
        "cases",
        sa.Column("case_id", sa.Text(collation="C"), nullable=False),
        sa.Column("query", sa.Text(), nullable=False),
        sa.Column("response_text", sa.Text(), nullable=False),
        sa.Column("category_path", sa.Text(), nullable=True),
        sa.Column("query_vector", vector_type(op.get_bind()), nullable=True),
        sa.Column("embedder", sa.Text(), nullable=True),
        sa.Column("usage_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("success_rate", sa.Double(), nullable=True, comment="percent; NULL while unknown"),
        sa.Column("last_accessed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "user_id", sa.Text(), nullable=True, comment="whose words it was learnt from; NULL where it was imported"
        ),
        sa.Column("turn_id", sa.Uuid(), nullable=True, comment="the turn that it was learnt from"),
        sa.Column(
            "review",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="what reflection found wrong with it",
        ),
        sa.Column("status", sa.Text(), server_default="active", nullable=False),
        sa.CheckConstraint("status IN ('active', 'archived')", name=op.f("cases_status_check")),
        sa.CheckConstraint("query_vector IS NULL OR embedder IS NOT NULL", name=op.f("cases_embedder_check")),
        sa.CheckConstraint("success_rate BETWEEN 0 AND 100", name=op.f("cases_success_rate_check")),
        sa.CheckConstraint("usage_count >= 0", name=op.f("cases_usage_count_check")),
        sa.PrimaryKeyConstraint("case_id", name=op.f("cases_pkey")),
        sa.UniqueConstraint("turn_id", name=op.f("cases_turn_id_key")),
        comment="Questions answered before, and how well. Vectors are compared within one embedder and size only.",
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index(
        "cases_searchable_idx",
        "cases",
        ["embedder"],
        unique=False,
        postgresql_where=sa.text("status = 'active' AND query_vector IS NOT NULL"),
    )
    op.create_index(
        "cases_flagged_idx", "cases", ["case_id"], unique=False, postgresql_where=sa.text("review IS NOT NULL")
    )
    op.create_index(
        "cases_user_id_idx", "cases", ["user_id"], unique=False, postgresql_where=sa.text("user_id IS NOT NULL")
    )
    op.create_table(
        "case_archive",
        sa.Column("archive_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("case_id", sa.Text(collation="C"), nullable=False),
        sa.Column("query", sa.Text(), nullable=False),
        sa.Column("response_text", sa.Text(), nullable=False),
        sa.Column("category_path", sa.Text(), nullable=True),
        sa.Column("query_vector", vector_type(op.get_bind()), nullable=True),
        sa.Column("embedder", sa.Text(), nullable=True),
        sa.Column("usage_count", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("success_rate", sa.Double(), nullable=True, comment="percent; NULL while unknown"),
        sa.Column("last_accessed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "user_id", sa.Text(), nullable=True, comment="whose words it was learnt from; NULL where it was imported"
        ),
        sa.Column("turn_id", sa.Uuid(), nullable=True, comment="the turn that it was learnt from"),
        sa.Column(
            "review",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="what reflection found wrong with it",
        ),
        sa.Column("archived_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("archived_reason", sa.Text(), nullable=False),
        sa.Column("keeper_id", sa.Text(), nullable=True, comment="the case that took over its counts"),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column(
            "restored_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="set once it is active again; the row stays",
        ),
        sa.ForeignKeyConstraint(
            ["case_id"], ["cases.case_id"], name=op.f("case_archive_case_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("archive_id", name=op.f("case_archive_pkey")),
        comment="Cases as they were when they were archived.",
    )
    op.create_index(op.f("case_archive_archived_at_idx"), "case_archive", ["archived_at"], unique=False)
    op.create_index(op.f("case_archive_case_id_idx"), "case_archive", ["case_id"], unique=False)
    op.create_table(
        "case_executions",
        sa.Column("case_id", sa.Text(collation="C"), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=False, comment="whether the turn did"),
        sa.Column("feedback", sa.SmallInteger(), nullable=True, comment="-1 or 1; where given, it decides"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("executed_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("feedback IN (-1, 1)", name=op.f("case_executions_feedback_check")),
        sa.ForeignKeyConstraint(
            ["case_id"], ["cases.case_id"], name=op.f("case_executions_case_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("case_id", "turn_id", name=op.f("case_executions_pkey")),
        comment="Turns that had a case in their prompt, and what came of it.",
    )
    op.create_index(
        "case_executions_newest_idx", "case_executions", ["case_id", "executed_at", "turn_id"], unique=False
    )
    op.create_index(op.f("case_executions_turn_id_idx"), "case_executions", ["turn_id"], unique=False)
    op.create_table(
        "case_history",
        sa.Column("history_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("case_id", sa.Text(collation="C"), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("details", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "event IN ('added', 'archived', 'absorbed', 'restored')", name=op.f("case_history_event_check")
        ),
        sa.ForeignKeyConstraint(
            ["case_id"], ["cases.case_id"], name=op.f("case_history_case_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("history_id", name=op.f("case_history_pkey")),
        comment="Every change of a case's status, and of its counts by a merge. Appended, never rewritten.",
    )
    op.create_index(op.f("case_history_case_id_idx"), "case_history", ["case_id"], unique=False)
    op.create_table(
        "case_run_items",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False, comment="order in which the plan is applied"),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("case_id", sa.Text(collation="C"), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column(
            "keeper_id",
            sa.Text(collation="C"),
            nullable=True,
            comment="of a duplicate: the case that takes over its counts, or would",
        ),
        sa.Column("similarity", sa.Double(), nullable=True, comment="of a duplicate to its keeper"),
        sa.Column(
            "keeper_weight",
            sa.BigInteger(),
            nullable=True,
            comment="uses behind the keeper's rate when the plan was made",
        ),
        sa.Column(
            "usage_count",
            sa.BigInteger(),
            nullable=False,
            comment="the case's, when the plan was made or by its merges",
        ),
        sa.Column("success_rate", sa.Double(), nullable=True, comment="likewise"),
        sa.Column("last_accessed_at", sa.DateTime(timezone=True), nullable=True, comment="likewise"),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("outcome_rule", sa.Text(), nullable=True, comment="why it was spared after all"),
        sa.Column("outcome_reason", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "action IN ('remove', 'merge', 'archive', 'spare')", name=op.f("case_run_items_action_check")
        ),
        sa.CheckConstraint("outcome IN ('done', 'spared')", name=op.f("case_run_items_outcome_check")),
        sa.ForeignKeyConstraint(
            ["run_id"], ["case_runs.run_id"], name=op.f("case_run_items_run_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "position", name=op.f("case_run_items_pkey")),
        comment="A run's plan, one row a case, and what came of it.",
    )
    op.create_index(
        "case_run_items_keeper_idx",
        "case_run_items",
        ["run_id", "keeper_id"],
        unique=False,
        postgresql_where=sa.text("action = 'merge'"),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("turns", "feedback")
    op.drop_table("case_run_items")
    op.drop_table("case_history")
    op.drop_table("case_executions")
    op.drop_table("case_archive")
    op.drop_table("cases")
    op.drop_table("case_runs")
