"""${message}

Revision: ${up_revision}, after ${down_revision or "nothing"}.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

# The newest revision of the oldest release that can use the schema after this migration. If the previous release can
# use this schema, too, set it to the previous migration's value: otherwise the previous release reports not ready.
readable_from = ${repr(up_revision)}


def upgrade() -> None:
    """Apply the migration."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Revert the migration."""
    ${downgrades if downgrades else "pass"}
