"""Errors of commands: a message on stderr and an exit status. Unexpected errors keep their traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 1
WRONG_USAGE = 2
UNAVAILABLE = 3
INTERRUPTED = 130

_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_WAY_OUT = (
    "Is it running? `perdure up` starts everything; "
    "PERDURE_DATABASE_URL and PERDURE_REDIS_URL name servers of your own."
)


class Failure(Exception):
    """A command cannot do what was requested. The text is printed on stderr; `status` is the exit status."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # while the modules of the command are imported; later, typer handles it
        sys.exit(INTERRUPTED)
    except Exception as error:
        expected = _expected(error)
        if expected is None:
            raise
        message, status = expected
        sys.stderr.write(f"perdure: {message}\n")
        sys.exit(status)


def _expected(error: Exception) -> tuple[str, int] | None:
    """The message and the exit status of an expected error; `None` for an unexpected one."""
    from perdure.errors import IncompatibleDatabase, InvalidRequest, PerdureError, SettingsError, Unavailable

    match error:
        case Failure():
            return str(error), error.status
        case SettingsError():
            return str(error), WRONG_USAGE
        case Unavailable():
            has_way_out = (
                isinstance(error, IncompatibleDatabase) or "perdure up" in error.message or _has_answered(error)
            )
            return error.explained if has_way_out else f"{error.explained} {_WAY_OUT}", UNAVAILABLE
        case OSError() if error.errno in _UNWRITABLE:
            return f"The output cannot be written: {error.strerror}.", FAILED
        case PerdureError():
            return error.message, WRONG_USAGE if isinstance(error, InvalidRequest) else FAILED
        case _:
            return _expected_of_servers(error)


def _has_answered(error: Exception) -> bool:
    """Whether PostgreSQL answered with an error, such as a lock timeout."""
    return getattr(getattr(error.__cause__, "orig", None), "pgcode", None) is not None


def _expected_of_servers(error: Exception) -> tuple[str, int] | None:
    from psycopg2 import errors as postgresql
    from sqlalchemy.exc import ProgrammingError

    from perdure.servers import EmbeddedServerError

    not_migrated = (postgresql.UndefinedTable, postgresql.UndefinedColumn, postgresql.UndefinedFunction)
    match error:
        case EmbeddedServerError():
            return str(error), UNAVAILABLE
        case ProgrammingError() if isinstance(error.orig, not_migrated):
            return "The database lacks the tables of this release. Create them with `perdure migrate`.", UNAVAILABLE
        case _:
            return None
