"""Consolidates sessions in a process that kills itself with SIGKILL before or after a commit.

    python -m tests.memory.killing DATABASE_URL NUMBER MODEL

NUMBER chooses the moment of the SIGKILL. The moments before and after each commit are counted from 0. MODEL is `echo`,
or `deciding` for a model that decides what a statement is to the known memories.
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
from tests.memory.archive import GROUPS, Deciding, Echo, Grouped, consolidator


def main(url: str, number: int, model: str) -> None:
    """Consolidate a batch. Send SIGKILL to this process at moment `number`."""
    passed = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    clock = MovedClock()
    database = Database(url, observe=observe)
    keeper = Keeper(database, clock, TurnSettings())
    extracts = Deciding() if model == "deciding" else Echo()
    consolidator(database, clock, keeper, model=extracts, embedder=Grouped(*GROUPS)).batch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
