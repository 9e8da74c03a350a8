"""Ends a Celery process that cannot start, with a message on stderr and an exit status.

If the import of the application's module fails, Celery itself prints a traceback. If the receiver of a signal raises
an error, Celery only logs the error. `exit_unless_startable` ends the process in both cases. The exit statuses are
those of the `perdure` command: 2 for an invalid setting, 3 for an unavailable server. `lifecycle.or_exit` ends the
process with 1 after any other error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from perdure.errors import SettingsError, Unavailable
from perdure.servers import EmbeddedServerError

FAILED = 1
MISCONFIGURED = 2
UNAVAILABLE = 3


@contextmanager
def exit_unless_startable() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        sys.stderr.write(f"perdure: {error}\n")
        raise SystemExit(MISCONFIGURED) from None
    except (Unavailable, EmbeddedServerError) as error:
        sys.stderr.write(f"perdure: {error}\n")
        raise SystemExit(UNAVAILABLE) from None
