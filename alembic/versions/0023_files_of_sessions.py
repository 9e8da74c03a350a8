"""A file has the session whose message had it last, with which it is deleted.

Revision: 0023, after 0022.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

readable_from = "0001"


def upgrade() -> None:
    """Apply the migration. Files of earlier messages stay until their user is erased."""
    op.add_column("files", sa.Column("session_id", sa.Uuid, comment="whose message had it last"), if_not_exists=True)
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index("files_session_id_idx", "files", postgresql_concurrently=True, if_exists=True)
        op.create_index("files_session_id_idx", "files", ["session_id"], postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("files", "session_id")
