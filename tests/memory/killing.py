"""A process that consolidates and kills itself with SIGKILL at a commit.

    python -m tests.memory.killing DATABASE_URL NUMBER

NUMBER is the boundary at which the process dies, counted from 0. Each commit has one boundary before it and one after
it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from perdure.clock import MovedClock
from perdure.database.engine import Database, Moment
from perdure.settings import TurnSettings
from perdure.turns.lease.keeper import Keeper
from tests.memory.archive import GROUPS, Echo, Grouped, consolidator


def main(url: str, number: int) -> None:
    """Consolidate a batch until the signal."""
    passed = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    clock = MovedClock()
    database = Database(url, observe=observe)
    keeper = Keeper(database, clock, TurnSettings())
    consolidator(database, clock, keeper, model=Echo(), embedder=Grouped(*GROUPS)).batch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
