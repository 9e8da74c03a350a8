"""Cases have an author, and the uses of a case are counted in a later transaction.

A turn records its use of a case in `case_executions` and does not update the case. The migration drops the foreign key
from `case_executions` to `cases`, because the check of the key locks the case's row. With the key, the turn would wait
for any transaction that has locked this row. `counted` defaults to true, because the previous release counts a use when
it records the use. Workers of that release may still insert rows during the upgrade.

A case with a turn but without an author gets the turn's user as its author. If that turn no longer exists, the author
is ''. No user has this id, so the case enters no prompt unless `PERDURE_CASEBANK__SCOPE` is `all`.

The migration drops the old vector indexes. Each old index contains all cases. Each new index contains either the cases
without an author or the cases with an author. The next run of the task `casebank.reflect` builds the new indexes. Until
then, a search reads the rows of the table.

Each statement commits separately. If the migration is interrupted, the next run repeats all statements.

Revision: 0018, after 0017.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

readable_from = "0016"

_FOREIGN_KEY = "case_executions_case_id_fkey"
_AUTHOR = "cases_author_check"
_INDEXES = {
    "case_executions_uncounted_idx": ("case_executions", "case_id", "NOT counted"),
    "cases_shared_idx": ("cases", "embedder", "status = 'active' AND query_vector IS NOT NULL AND user_id IS NULL"),
}
_AUTHOR_COMMENTS = {
    "old": "whose words it was learnt from; NULL where it was imported",
    "new": "the author: the user whose words it holds; NULL: everybody's",
}
_LOCK_COMMENT = "no foreign key: its check would lock the case's row"

_AUTHORS = """
    UPDATE {table} AS c
    SET user_id = coalesce((SELECT t.user_id FROM turns AS t WHERE t.turn_id = c.turn_id), '')
    WHERE c.user_id IS NULL AND c.turn_id IS NOT NULL
"""
_COUNT = """
    UPDATE cases AS c
    SET usage_count = c.usage_count + fresh.uses, last_accessed_at = greatest(c.last_accessed_at, fresh.at)
    FROM (SELECT case_id, count(*) AS uses, max(executed_at) AS at FROM case_executions WHERE NOT counted
          GROUP BY case_id) AS fresh
    WHERE c.case_id = fresh.case_id
"""
_ORPHANS = "DELETE FROM case_executions AS e WHERE NOT EXISTS (SELECT FROM cases WHERE case_id = e.case_id)"
_VECTOR_INDEXES = r"""
    SELECT indexrelid::regclass::text FROM pg_index
    WHERE indrelid = 'cases'::regclass AND indexrelid::regclass::text ~ 'cases_[a-z_]*nearest_\d+_idx'
"""


def upgrade() -> None:
    """Apply the migration."""
    with op.get_context().autocommit_block():
        _drop_vector_indexes()
        op.drop_constraint(op.f(_FOREIGN_KEY), "case_executions", type_="foreignkey", if_exists=True)
        op.add_column(
            "case_executions",
            sa.Column(
                "counted",
                sa.Boolean(),
                server_default=sa.text("true"),
                nullable=False,
                comment="whether the case's usage_count and last_accessed_at include it",
            ),
            if_not_exists=True,
        )
        op.execute(f"COMMENT ON COLUMN case_executions.case_id IS '{_LOCK_COMMENT.replace(chr(39), chr(39) * 2)}'")
        _comment_authors("new")
        for table in ("cases", "case_archive"):
            op.execute(_AUTHORS.format(table=table))
        op.drop_constraint(op.f(_AUTHOR), "cases", type_="check", if_exists=True)
        op.create_check_constraint(
            op.f(_AUTHOR), "cases", "turn_id IS NULL OR user_id IS NOT NULL", postgresql_not_valid=True
        )
        op.execute(f"ALTER TABLE cases VALIDATE CONSTRAINT {_AUTHOR}")
        _drop_indexes()  # an interrupted build leaves an invalid index
        for name, (table, column, condition) in _INDEXES.items():
            op.create_index(name, table, [column], postgresql_where=sa.text(condition), postgresql_concurrently=True)


def downgrade() -> None:
    """Revert the migration. Counts the uses that are not counted yet, and deletes the uses of deleted cases."""
    with op.get_context().autocommit_block():
        _drop_vector_indexes()
        _drop_indexes()
        op.drop_constraint(op.f(_AUTHOR), "cases", type_="check", if_exists=True)
        _comment_authors("old")
        op.execute("COMMENT ON COLUMN case_executions.case_id IS NULL")
    op.execute("LOCK TABLE case_executions IN SHARE ROW EXCLUSIVE MODE")  # no new uses until the column is dropped
    op.execute(_COUNT)
    op.execute(_ORPHANS)
    op.drop_column("case_executions", "counted")
    op.create_foreign_key(op.f(_FOREIGN_KEY), "case_executions", "cases", ["case_id"], ["case_id"], ondelete="CASCADE")


def _comment_authors(which: str) -> None:
    comment = _AUTHOR_COMMENTS[which].replace("'", "''")
    for table in ("cases", "case_archive"):
        op.execute(f"COMMENT ON COLUMN {table}.user_id IS '{comment}'")


def _drop_indexes() -> None:
    for name, (table, _, _) in _INDEXES.items():
        op.drop_index(name, table_name=table, if_exists=True, postgresql_concurrently=True)


def _drop_vector_indexes() -> None:
    for name in op.get_bind().execute(sa.text(_VECTOR_INDEXES)).scalars().all():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
