"""PostgreSQL, the truth: tables, the engine, and how a statement becomes a commit."""
