"""A process that prunes the CaseBank and kills itself with SIGKILL just before or just after a commit.

    killing DATABASE_URL NUMBER

Each commit has two boundaries: one before the commit and one after it. The process dies at the boundary NUMBER, counted
from 0.
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
    """Run the weekly policy, one case per batch. This process kills itself at the given boundary."""
    url, number = sys.argv[1:]
    passed = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(passed) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    prune.run(bank(Database(url, observe=observe), MovedClock(), duplicate_batch=1))
