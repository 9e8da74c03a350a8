"""A process that prunes the CaseBank and kills itself with SIGKILL at a commit.

    killing DATABASE_URL NUMBER

NUMBER is the boundary at which the process dies, counted from 0. Each commit has one boundary before it and one after
it.
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
    """Run the weekly policy, one case per batch, until the signal."""
    url, number = sys.argv[1:]
    passed = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(passed) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    prune.run(bank(Database(url, observe=observe), MovedClock(), duplicate_batch=1))
