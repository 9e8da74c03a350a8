"""Cases belong to banks, and an administrator can share a user's case with all users.

The new columns have constant defaults, so PostgreSQL rewrites no row. By default, a case is in the common bank and is
not shared. The previous release adds cases to the common bank and finds the cases of every bank.

The downgrade moves all cases into one bank. It withdraws shared cases from users other than the author, and deletes the
history of sharing.

Each statement commits separately. If the migration is interrupted, the next run repeats all statements.

Revision: 0021, after 0020.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

readable_from = "0016"

_SEARCHABLE = "status = 'active' AND query_vector IS NOT NULL"
_NEW = {
    "cases_bank_idx": (["bank", "embedder"], _SEARCHABLE),
    "cases_everybodys_idx": (["bank", "embedder"], f"{_SEARCHABLE} AND user_id IS NULL"),
    "cases_approved_idx": (
        ["bank", "embedder"],
        f"{_SEARCHABLE} AND shared_at IS NOT NULL AND user_id IS NOT NULL",
    ),
}
_OLD = {
    "cases_searchable_idx": (["embedder"], _SEARCHABLE),
    "cases_shared_idx": (["embedder"], f"{_SEARCHABLE} AND user_id IS NULL"),
}
_EVENT = "case_history_event_check"
_OLD_EVENTS = "event IN ('added', 'archived', 'absorbed', 'restored')"
_NEW_EVENTS = "event IN ('added', 'archived', 'absorbed', 'restored', 'shared', 'unshared')"
_COMMENT = "Every change of a case''s status{}, and of its counts by a merge. Appended, never rewritten."


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        op.add_column(
            "cases",
            sa.Column(
                "bank",
                sa.Text(),
                server_default="common",
                nullable=False,
                comment="an agent finds the cases of its bank only",
            ),
            if_not_exists=True,
        )
        op.add_column(
            "cases",
            sa.Column(
                "shared_at",
                sa.DateTime(timezone=True),
                nullable=True,
                comment="since when an administrator lets it enter the prompts of all users",
            ),
            if_not_exists=True,
        )
        _allow(_NEW_EVENTS)
        op.execute(f"COMMENT ON TABLE case_history IS '{_COMMENT.format(' and readers')}'")
        _replace(_OLD, _NEW)


def downgrade() -> None:
    """Revert the migration."""
    with op.get_context().autocommit_block():
        _replace(_NEW, _OLD)
        op.execute("DELETE FROM case_history WHERE event IN ('shared', 'unshared')")
        _allow(_OLD_EVENTS)
        op.execute(f"COMMENT ON TABLE case_history IS '{_COMMENT.format('')}'")
        op.drop_column("cases", "shared_at", if_exists=True)
        op.drop_column("cases", "bank", if_exists=True)


def _allow(events: str) -> None:
    op.drop_constraint(op.f(_EVENT), "case_history", type_="check", if_exists=True)
    op.create_check_constraint(op.f(_EVENT), "case_history", events, postgresql_not_valid=True)
    op.execute(f"ALTER TABLE case_history VALIDATE CONSTRAINT {_EVENT}")


def _replace(gone: dict[str, tuple[list[str], str]], made: dict[str, tuple[list[str], str]]) -> None:
    for name in [*gone, *made]:  # an interrupted build leaves an invalid index
        op.drop_index(name, table_name="cases", if_exists=True, postgresql_concurrently=True)
    for name, (columns, condition) in made.items():
        op.create_index(name, "cases", columns, postgresql_where=sa.text(condition), postgresql_concurrently=True)
