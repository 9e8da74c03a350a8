"""The tables, the engine and the migrations of PostgreSQL, which stores all durable state."""
