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


def upgrade() -> None:
    """Go up."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Go down."""
    ${downgrades if downgrades else "pass"}
