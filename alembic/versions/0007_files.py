"""Messages have files: each content is stored once for each tenant, and each user has files with these contents.

Revision: 0007, after 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

readable_from = "0001"

_timestamp = sa.DateTime(timezone=True)
_PARTS = "its files, in the order of the text: [{type, file_id, media_type, name, size, at, tokens, ...}]"


def upgrade() -> None:
    """Apply the migration."""
    op.create_table(
        "file_contents",
        sa.Column("content_id", sa.Uuid, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False, comment="'': none"),
        sa.Column("sha256", sa.LargeBinary, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False, comment="bytes"),
        sa.Column("width", sa.Integer, comment="pixels, of an image"),
        sa.Column("height", sa.Integer, comment="pixels, of an image"),
        sa.Column("pages", sa.Integer, comment="of a PDF, as far as they can be counted"),
        sa.Column("place", sa.Text, comment="the URL of its object; NULL: its bytes are in file_chunks"),
        sa.Column("delete_at", _timestamp, comment="no file has it: when its object, then its row, is deleted"),
        comment="The contents of files, each once for each tenant.",
    )
    op.create_index(
        "file_contents_tenant_sha256_key",
        "file_contents",
        ["tenant", "sha256"],
        unique=True,
        postgresql_where=sa.text("delete_at IS NULL"),
    )
    op.create_index(
        "file_contents_delete_at_idx",
        "file_contents",
        ["delete_at"],
        postgresql_where=sa.text("delete_at IS NOT NULL"),
    )
    op.create_table(
        "file_chunks",
        sa.Column("content_id", sa.Uuid, sa.ForeignKey("file_contents.content_id", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False, comment="from 0"),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("content_id", "number"),
        comment="The bytes of the contents that have no object.",
    )
    op.execute("ALTER TABLE file_chunks ALTER COLUMN data SET STORAGE EXTERNAL")  # images and PDFs are compressed
    op.create_table(
        "files",
        sa.Column("file_id", sa.Uuid, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False, comment="'': none"),
        sa.Column("user_id", sa.Text, comment="NULL: uploaded for no user; a message gets a copy for its user"),
        sa.Column("content_id", sa.Uuid, sa.ForeignKey("file_contents.content_id"), nullable=False),
        sa.Column("media_type", sa.Text, nullable=False, comment="as its content shows"),
        sa.Column("name", sa.Text),
        sa.Column("created_at", _timestamp, nullable=False),
        sa.Column("used_at", _timestamp, comment="when a message first had it; NULL: it is deleted after a day"),
        comment="Files of users.",
    )
    op.create_index("files_user_id_idx", "files", ["user_id"])
    op.create_index("files_content_id_idx", "files", ["content_id"])
    op.create_index("files_unused_idx", "files", ["created_at"], postgresql_where=sa.text("used_at IS NULL"))
    op.add_column("inbox", sa.Column("parts", JSONB, comment=_PARTS))
    op.add_column("messages", sa.Column("parts", JSONB, comment=_PARTS))


def downgrade() -> None:
    """Revert the migration."""
    op.drop_column("messages", "parts")
    op.drop_column("inbox", "parts")
    op.drop_table("files")
    op.drop_table("file_chunks")
    op.drop_table("file_contents")
