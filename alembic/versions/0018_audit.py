"""What operators do is recorded.

Revision: 0018, after 0017.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.Uuid, primary_key=True),
        sa.Column("via", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False, comment="the digest of a key, or a user of the machine"),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("target", sa.Text, comment="what was changed: an id, or a name"),
        sa.Column("user_id", sa.Text, comment="a user's key, if a user's data was changed"),
        sa.Column("note", sa.Text, comment="how it was decided, or how many were changed"),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("outcome", sa.Text, comment="done, or an error's code; NULL: unfinished, or the process died"),
        sa.CheckConstraint("via IN ('api', 'command', 'console')", name=op.f("audit_via_check")),
        comment="Operators' actions: written before the action, with the outcome after it.",
    )
    op.create_index(
        "audit_user_id_idx", "audit", ["user_id", "audit_id"], postgresql_where=sa.text("user_id IS NOT NULL")
    )


def downgrade() -> None:
    """Revert the migration. The record is lost."""
    op.drop_table("audit")
