"""Columns for ending sessions: when and why the end was requested, the attempts, and the previous session.

The function `perdure_illegal_transition()` raises an error. A statement calls the function if the state machine of
sessions does not allow the statement's change of state. `perdure.database` recognises the error by its SQLSTATE and
raises `IllegalTransition`.

Revision: 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.execute(
        """
        CREATE FUNCTION perdure_illegal_transition(state text, triggers text) RETURNS text LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'PD001', MESSAGE = state, DETAIL = triggers; END $$
        """
    )
    op.add_column("sessions", sa.Column("end_requested_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("sessions", sa.Column("end_reason", sa.Text(), nullable=True))
    op.add_column(
        "sessions",
        sa.Column(
            "end_attempts", sa.Integer(), server_default="0", nullable=False, comment="claims in order to end it"
        ),
    )
    op.add_column(
        "sessions",
        sa.Column("summary_extractive", sa.Boolean(), nullable=True, comment="no model wrote the summary"),
    )
    op.add_column(
        "sessions",
        sa.Column("previous_session_id", sa.Uuid(), nullable=True, comment="the one before it in its scope"),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("sessions", "previous_session_id")
    op.drop_column("sessions", "summary_extractive")
    op.drop_column("sessions", "end_attempts")
    op.drop_column("sessions", "end_reason")
    op.drop_column("sessions", "end_requested_at")
    op.execute("DROP FUNCTION perdure_illegal_transition(text, text)")
