"""PostgreSQL, which stores all durable state: tables, the engine, migrations."""
