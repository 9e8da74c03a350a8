"""Each turn has the span of its accept, if the accept was traced.

Revision: 0022, after 0021.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column(
        "turns", sa.Column("traceparent", sa.Text, comment="the span of its accept, as W3C Trace Context has it")
    )


def downgrade() -> None:
    """Revert the migration. The spans of later steps of unsettled turns begin new traces."""
    op.drop_column("turns", "traceparent")
