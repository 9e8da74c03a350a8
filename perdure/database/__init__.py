"""Access to PostgreSQL, which stores all durable state. Has the tables, the engine and the migrations."""
