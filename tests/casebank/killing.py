"""A worker that prunes the CaseBank and is killed on the way, by a real SIGKILL.

    killing DATABASE_URL NUMBER

The signal comes at the boundary of a commit of that number, counted from 0, before and after each.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from perdure.casebank.runs import prune
from perdure.clock import MovedClock
from perdure.database.engine import Database, Moment
from tests.casebank.bank import bank


def main() -> None:
    """Run the weekly policy, a case a batch, until the signal."""
    url, number = sys.argv[1:]
    passed = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(passed) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    prune.run(bank(Database(url, observe=observe), MovedClock(), duplicate_batch=1))
