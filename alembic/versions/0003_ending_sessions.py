"""Ending sessions: when and why the end was requested, the summary, and the previous session.

`perdure_illegal_transition()` raises an error if the table of transitions does not allow a change of state.
`perdure.database` converts this error, by its SQLSTATE, to `IllegalTransition`.

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
    """Go up."""
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
    """Go down."""
    op.drop_column("sessions", "previous_session_id")
    op.drop_column("sessions", "summary_extractive")
    op.drop_column("sessions", "end_attempts")
    op.drop_column("sessions", "end_reason")
    op.drop_column("sessions", "end_requested_at")
    op.execute("DROP FUNCTION perdure_illegal_transition(text, text)")
