"""Errors as a person at a terminal gets them: a sentence on stderr and an exit status, no trace.

Whatever is not foreseen here is a mistake in this program, and shows its trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from psycopg2 import errors as postgresql
from sqlalchemy.exc import ProgrammingError

from perdure.embedded import EmbeddedServerError
from perdure.errors import IncompatibleDatabase, InvalidRequest, PerdureError, SettingsError, Unavailable

FAILED = 1
WRONG_USAGE = 2
UNAVAILABLE = 3

_NOT_MIGRATED = (postgresql.UndefinedTable, postgresql.UndefinedColumn, postgresql.UndefinedFunction)
_WAY_OUT = (
    "Is it running? `perdure up` starts all; PERDURE_DATABASE_URL and PERDURE_REDIS_URL name servers of your own."
)


class Failure(Exception):
    """A command cannot do what it was asked; the message is the sentence to say."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def explained() -> Iterator[None]:
    """Turn the errors that are foreseen into a sentence and an exit status."""
    try:
        yield
    except Failure as error:
        _leave(str(error), error.status)
    except SettingsError as error:
        _leave(str(error), WRONG_USAGE)
    except EmbeddedServerError as error:
        _leave(str(error), UNAVAILABLE)
    except Unavailable as error:
        _leave(_with_way_out(error), UNAVAILABLE)
    except PerdureError as error:
        _leave(error.message, WRONG_USAGE if isinstance(error, InvalidRequest) else FAILED)
    except ProgrammingError as error:
        if not isinstance(error.orig, _NOT_MIGRATED):
            raise
        _leave("The database has not the tables of this release. Make them with `perdure migrate`.", UNAVAILABLE)


def _with_way_out(error: Unavailable) -> str:
    if isinstance(error, IncompatibleDatabase) or "perdure up" in error.message:
        return error.message
    return f"{error.message} {_WAY_OUT}"


def _leave(sentence: str, status: int) -> NoReturn:
    sys.stderr.write(f"perdure: {sentence}\n")
    sys.exit(status)
