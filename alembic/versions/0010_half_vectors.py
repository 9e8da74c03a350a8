"""The vectors of messages are stored in half precision.

New vectors are written to `half` only. Workers move older ones from `vector` to `half`, page by page. Every search
reads both columns. A worker of the release before finds messages whose vector is in `half` by their words only.

Revision: 0010, after 0009.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from perdure.database.schema import Names, extension_schema

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

readable_from = "0001"

_REFUSED = "of length 1; NULL: the embedder refuses the text"
_FORMER = "a vector that is not in `half` yet; of length 1"
_HALF = "of length 1; NULL, as is vector: the embedder refuses the text"


def upgrade() -> None:
    """Apply the migration."""
    rendered = Names("", extension_schema(op.get_bind())).render("ALTER TABLE message_vectors ADD half @vector.halfvec")
    op.execute(rendered)
    op.execute(f"COMMENT ON COLUMN message_vectors.half IS '{_HALF}'")
    op.alter_column("message_vectors", "vector", comment=_FORMER, existing_comment=_REFUSED)
    op.add_column(
        "embedders",
        sa.Column(
            "half_indexed_at",
            sa.DateTime(timezone=True),
            comment="since when its vectors of messages, in both columns, are searched by an index",
        ),
    )


def downgrade() -> None:
    """Revert the migration. The vectors in `half` get full precision again, with the digits of half precision."""
    op.drop_column("embedders", "half_indexed_at")
    op.alter_column("message_vectors", "vector", comment=_REFUSED, existing_comment=_FORMER)
    op.execute("UPDATE message_vectors SET vector = half WHERE half IS NOT NULL")
    op.drop_column("message_vectors", "half")
