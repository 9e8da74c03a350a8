"""How Alembic runs the migrations: over the connection that `perdure.database.migrate` made."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, text

from perdure.database.tables import metadata

_LOCK_TIMEOUT = "5s"


def run() -> None:
    """Migrate, each migration in a transaction of its own, waiting for locks no longer than a moment."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        connection = create_engine(context.config.attributes["database_url"]).connect()
    connection.execute(text(f"SET lock_timeout = '{_LOCK_TIMEOUT}'"))
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
