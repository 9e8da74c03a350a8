"""A view of the work that is due, for what scales workers.

Revision: 0020, after 0019.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

readable_from = "0001"

_VIEW = """
    CREATE VIEW due_work AS
    SELECT 'turns' AS queue, count(*) FILTER (WHERE NOT held) AS due, count(*) FILTER (WHERE held) AS running
    FROM (SELECT lease_until IS NOT NULL AND lease_until > perdure_now() AS held FROM sessions
          WHERE unsettled > 0 AND not_before IS NULL LIMIT 10000) AS runnable
    UNION ALL
    SELECT 'deliveries', count(*), 0
    FROM (SELECT FROM deliveries WHERE status = 'pending' AND greatest(due_at, wake_at) <= perdure_now()
          LIMIT 10000) AS pending
    UNION ALL
    SELECT 'sessions', count(*), 0
    FROM (SELECT FROM sessions WHERE end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0
          LIMIT 10000) AS ending;
    COMMENT ON VIEW due_work IS
    'By queue: what workers may begin now, and what they run. Numbers stop at 10000. Read by what scales workers.'
"""


def upgrade() -> None:
    """Apply the migration."""
    op.execute(_VIEW)


def downgrade() -> None:
    """Revert the migration."""
    op.execute("DROP VIEW due_work")
