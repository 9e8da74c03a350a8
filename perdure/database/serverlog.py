"""Whether PostgreSQL's own log may quote users' texts, which no erasure reaches.

Read when a program starts. The server of `perdure up` runs with settings under which it quotes nothing; for another
server its operator decides (docs/operating.md, "What erasing reaches").
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
    """The settings under which the server's log quotes texts, as `NAME is VALUE, …`; None if there are none.

    Raises:
        Unavailable: the database cannot be reached.
    """
    row = database.run(SETTINGS, {})[0]
    found = [(name, getattr(row, name)) for name, quiet in _QUIET.items() if getattr(row, name) not in quiet]
    return ", ".join(f"{name} is {value}" for name, value in found) or None
