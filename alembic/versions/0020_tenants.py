"""Indexes that find a tenant's sessions and cases by the tenant in `user_id`.

The indexes contain only the rows of users who belong to a tenant. In an installation without tenants, the indexes are
empty. They are built concurrently. Each statement commits separately. If the migration is interrupted, the next run
repeats all statements.

Revision: 0020, after 0019.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

readable_from = "0016"

_TENANT = "split_part(user_id, chr(31), 1)"
_HAS_TENANT = "strpos(user_id, chr(31)) > 0"
_INDEXES = {
    "sessions_of_tenant_idx": ("sessions", [sa.text(_TENANT), "created_at", "session_id"]),
    "cases_of_tenant_idx": ("cases", [sa.text(_TENANT)]),
}


def upgrade() -> None:
    """Apply the migration."""
    _drop_indexes()  # an interrupted build leaves an invalid index
    with op.get_context().autocommit_block():
        for name, (table, keys) in _INDEXES.items():
            op.create_index(name, table, keys, postgresql_where=sa.text(_HAS_TENANT), postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration."""
    _drop_indexes()


def _drop_indexes() -> None:
    with op.get_context().autocommit_block():
        for name, (table, _) in _INDEXES.items():
            op.drop_index(name, table_name=table, if_exists=True, postgresql_concurrently=True)
