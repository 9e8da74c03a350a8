"""The tables, the engine and the migrations of PostgreSQL, which stores all durable state.

Each function of perdure that runs a statement raises `Unavailable` if the database cannot be reached. A docstring says
so only if it adds what the caller may do then.
"""
