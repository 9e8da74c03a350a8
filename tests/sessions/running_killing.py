"""Summarises what is due in a process that kills itself with SIGKILL before or after a statement that writes.

    python -m tests.sessions.running_killing DATABASE_URL NUMBER

NUMBER chooses the moment of the SIGKILL. The moments before and after each commit are counted from 0.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from perdure.clock import MovedClock
from perdure.database.engine import Database, Moment
from perdure.models.offline import OfflineModel
from perdure.sessions.running_summary import summarise_due


def main(url: str, number: int) -> None:
    """Summarise what is due. Send SIGKILL to this process at moment `number`."""
    passed = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    summarise_due(Database(url, observe=observe), MovedClock(), OfflineModel(), 10)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
