"""The tenants of identities, one-time codes that link an identity to a user, and deliveries that ask for approval.

No release before this one writes to `identities`. PostgreSQL deletes a user's code together with the user. An erasure
by the previous release therefore leaves no code.

A turn has one delivery for its reply. It may now have further deliveries, which ask a chat for approvals. The previous
release does not send the further deliveries.

The index on `deliveries` is built concurrently. The statements that change `deliveries` run first, and each of them
commits separately. If the migration is interrupted, the next run repeats all statements.

Revision: 0024, after 0023.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

readable_from = "0016"


_KEY = "deliveries_turn_key"
_FORMER = "deliveries_turn_id_key"


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        op.add_column(
            "deliveries",
            sa.Column(
                "asking_seq",
                sa.BigInteger(),
                nullable=True,
                comment="seq of the message whose calls need approval; NULL: the reply",
            ),
            if_not_exists=True,
        )
        op.drop_index(_KEY, table_name="deliveries", if_exists=True, postgresql_concurrently=True)
        op.create_index(
            _KEY,
            "deliveries",
            ["turn_id", "asking_seq"],
            unique=True,
            postgresql_nulls_not_distinct=True,
            postgresql_concurrently=True,
        )
        op.execute(f"ALTER TABLE deliveries DROP CONSTRAINT IF EXISTS {_FORMER}")
    _link()  # last, in the transaction that stores Alembic's version


def _link() -> None:
    op.add_column("identities", sa.Column("tenant", sa.Text(), server_default="", nullable=False))
    op.execute("UPDATE identities SET tenant = split_part(user_id, chr(31), 1) WHERE strpos(user_id, chr(31)) > 0")
    op.drop_constraint(op.f("identities_pkey"), "identities", type_="primary")
    op.create_primary_key(op.f("identities_pkey"), "identities", ["tenant", "channel", "external_id"])
    op.create_table(
        "link_codes",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("code_hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the code"),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.user_id"], name=op.f("link_codes_user_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("user_id", name=op.f("link_codes_pkey")),
        sa.UniqueConstraint("code_hash", name=op.f("link_codes_code_hash_key")),
        comment="The newest code of each user that links another channel.",
    )
    op.create_index(op.f("link_codes_expires_at_idx"), "link_codes", ["expires_at"])
    op.create_table(
        "link_attempts",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "channel", "external_id", name=op.f("link_attempts_pkey")),
        comment="Codes that an identity has sent since a time.",
    )
    op.create_index(op.f("link_attempts_since_idx"), "link_attempts", ["since"])


def downgrade() -> None:
    """Revert the migration. Deletes identities of tenants, because the previous release stores no tenant.

    Also deletes the deliveries that ask for approvals, because the previous release allows one delivery per turn.
    """
    with op.get_context().autocommit_block():
        op.execute("DELETE FROM deliveries WHERE asking_seq IS NOT NULL")
        op.drop_index(_FORMER, table_name="deliveries", if_exists=True, postgresql_concurrently=True)
        op.create_index(_FORMER, "deliveries", ["turn_id"], unique=True, postgresql_concurrently=True)
        op.execute(f"ALTER TABLE deliveries ADD CONSTRAINT {_FORMER} UNIQUE USING INDEX {_FORMER}")
        op.drop_index(_KEY, table_name="deliveries", if_exists=True, postgresql_concurrently=True)
        op.drop_column("deliveries", "asking_seq", if_exists=True)
    op.drop_table("link_attempts")
    op.drop_table("link_codes")
    op.execute("DELETE FROM identities WHERE tenant <> ''")
    op.drop_constraint(op.f("identities_pkey"), "identities", type_="primary")
    op.create_primary_key(op.f("identities_pkey"), "identities", ["channel", "external_id"])
    op.drop_column("identities", "tenant")
