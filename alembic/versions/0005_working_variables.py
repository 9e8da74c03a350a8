"""Columns for working variables, and for snapshots in an external store.

A session counts its committed steps in `tick`. `variables_tick` is the tick that last changed the session's working
variables. A tool call stores its changes of variables until its step commits.

If snapshots are kept in an external store, a turn is settled after the store has saved the session's snapshot. Until
then, `held` stores how the turn ends. `saved_token` and `saved_tick` identify the snapshot in the store. `settled_tick`
is the session's tick when the turn was settled.

Revision: 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    json = postgresql.JSON(astext_type=sa.Text())
    op.add_column(
        "sessions",
        sa.Column(
            "variables_tick",
            sa.BigInteger(),
            nullable=True,
            comment="the tick that last changed the working variables; NULL: there are none",
        ),
    )
    op.add_column(
        "sessions",
        sa.Column(
            "saved_token", sa.BigInteger(), nullable=True, comment="of the snapshot that counts in a store elsewhere"
        ),
    )
    op.add_column("sessions", sa.Column("saved_tick", sa.BigInteger(), nullable=True, comment="of that snapshot"))
    op.add_column(
        "turns",
        sa.Column("settled_tick", sa.BigInteger(), nullable=True, comment="the session's when it was settled"),
    )
    op.add_column(
        "turns", sa.Column("held", json, nullable=True, comment="how it ends, once the session's snapshot is saved")
    )
    op.add_column("turns", sa.Column("held_error", sa.Text(), nullable=True, comment="why it is not saved yet"))
    op.add_column(
        "tool_effects",
        sa.Column(
            "variables",
            json,
            nullable=True,
            comment="[[number, name, value]], changes that wait for the step; no value: removed",
        ),
    )


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("tool_effects", "variables")
    op.drop_column("turns", "held_error")
    op.drop_column("turns", "held")
    op.drop_column("turns", "settled_tick")
    op.drop_column("sessions", "saved_tick")
    op.drop_column("sessions", "saved_token")
    op.drop_column("sessions", "variables_tick")
