"""Alembic's environment script. It runs the migrations on the connection that `perdure.database.migrate` supplies.

Each migration declares `readable_from`. The value states which releases can use the schema after the migration: the
value is the newest migration of the oldest such release. After each upgrade or downgrade step, the script stores the
current revision's `readable_from`.
"""

from __future__ import annotations

from typing import Any

from alembic import context
from sqlalchemy import text

from perdure.database.schema import quoted
from perdure.database.session import maintenance_engine
from perdure.database.tables import metadata

_LOCK_TIMEOUT = "5s"


_DECLARE = text("""
    INSERT INTO schema_compatibility (single, readable_from) VALUES (true, :readable_from)
    ON CONFLICT (single) DO UPDATE SET readable_from = excluded.readable_from
""")


def declare(ctx: Any, step: Any, **_: Any) -> None:
    """Store the `readable_from` of the revision after this step, in the transaction of the migration.

    Restores the lock timeout, which a migration that builds an index concurrently has set to 0.
    """
    ctx.connection.execute(text(f"SET lock_timeout = '{_LOCK_TIMEOUT}'"))
    for arrived_at in step.destination_revisions:
        ctx.connection.execute(_DECLARE, {"readable_from": arrived_at.module.readable_from})


def run() -> None:
    """Run the migrations, each in its own transaction and with a lock timeout of `_LOCK_TIMEOUT`."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        connection = maintenance_engine(context.config.attributes["database_url"]).connect()
    schema = context.config.attributes["schema"]
    connection.execute(text(f"SET lock_timeout = '{_LOCK_TIMEOUT}'"))
    connection.execute(text(f"SET search_path = {quoted(schema)}"))
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=schema,
        transaction_per_migration=True,
        compare_server_default=True,
        on_version_apply=declare,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
