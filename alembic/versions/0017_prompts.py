"""Each reply of a model has a record of its prompt.

Revision: 0017, after 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration."""
    op.add_column("messages", sa.Column("prompt", JSONB, comment="of a reply: what its prompt had, by reference"))


def downgrade() -> None:
    """Revert the migration. The records of prompts are lost."""
    op.drop_column("messages", "prompt")
