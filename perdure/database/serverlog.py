"""Checks whether PostgreSQL's own log may quote users' texts.

The erasure of a user does not remove texts from that log. The embedded server of `perdure up` logs no texts. For any
other server, the operator chooses the log settings (docs/operating.md, "What erasing reaches"). `perdure doctor`
reports the settings that make the log quote texts.
"""

from __future__ import annotations

from perdure.database.engine import Database, Statement

SETTINGS = Statement(
    "database.log_settings",
    """
    SELECT current_setting('log_min_error_statement') AS log_min_error_statement,
           current_setting('log_error_verbosity') AS log_error_verbosity,
           current_setting('log_statement') AS log_statement,
           current_setting('log_min_duration_statement') AS log_min_duration_statement
    """,
    writes=False,
)

_QUIET = {
    "log_min_error_statement": ("fatal", "panic"),
    "log_error_verbosity": ("terse",),
    "log_statement": ("none", "ddl"),
    "log_min_duration_statement": ("-1",),
}


def quoting(database: Database) -> str | None:
    """Lists, as `NAME is VALUE, …`, the settings that put users' texts into the server's log, or returns `None`."""
    row = database.run(SETTINGS, {})[0]
    found = [(name, getattr(row, name)) for name, quiet in _QUIET.items() if getattr(row, name) not in quiet]
    return ", ".join(f"{name} is {value}" for name, value in found) or None
