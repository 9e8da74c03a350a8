"""Sends messages from a separate process: `python -m benchmarks.producer perdure|floor ...`.

The producer limits the number of messages in flight. The worker therefore always has messages waiting, but never a long
backlog. The producer ends when all messages are done.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from sqlalchemy import text
from sqlalchemy.engine import make_url

from benchmarks import floor
from benchmarks.agents import QUESTION
from benchmarks.setup import connected
from perdure.access.tenants import UserKey
from perdure.assembly import addresses, assemble
from perdure.settings import Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.workers.publish.wake import CeleryWaker

_PAUSE_S = 0.05

Send = Callable[[int], object]
Done = Callable[[], int]


def produce(total: int, window: int, send: Send, done: Done) -> None:
    """Send the messages 0 to `total` - 1, with at most `window` unfinished at a time; return when all are done.

    `send` sends the message of the given number; `done` returns the number of finished messages.
    """
    finished = 0
    for number in range(total):
        while number - finished >= window:
            finished = done()
            if number - finished >= window:
                time.sleep(_PAUSE_S)
        send(number)
    while done() < total:
        time.sleep(_PAUSE_S)


def perdure_messages(total: int, window: int, users: int) -> None:
    """Send messages through `accept`, from `users` users in rotation. Each user has one session."""
    settings = Settings.load()
    where = addresses(settings)
    waker = CeleryWaker(settings, where)
    runtime = assemble(settings, where.database_url, waker)

    def send(number: int) -> object:
        return accept(runtime, Incoming(user=UserKey(f"user-{number % users}"), text=QUESTION))

    with connected(make_url(where.database_url)) as connection:
        settled = text("SELECT coalesce(sum(turn_count), 0)::int FROM sessions")
        produce(total, window, send, lambda: connection.execute(settled).scalar_one())
    waker.close()
    runtime.database.close()


def floor_messages(total: int, window: int, commits: int) -> None:
    """Send bare tasks of `commits` commits each. The sender commits once before each task, as `accept` does."""
    sent = 0

    def send(number: int) -> None:
        nonlocal sent
        floor.commit(0)
        floor.run.apply_async(kwargs={"commits": commits})
        sent = number + 1

    with connected(make_url(os.environ["PERDURE_DATABASE_URL"])) as connection:
        # Reading the sequence costs less than counting rows. The sequence includes commits of unfinished tasks, so the
        # result is exact only at the end.
        rows = text("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM floor_rows_id_seq")
        produce(total, window, send, lambda: (connection.execute(rows).scalar_one() - sent) // commits)


def main() -> None:
    """Parse the command line that `benchmarks.throughput` makes, and send the messages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=["perdure", "floor"])
    for option in ("total", "window", "users", "commits"):
        parser.add_argument(f"--{option}", type=int, default=1)
    given = parser.parse_args()
    if given.target == "perdure":
        perdure_messages(given.total, given.window, given.users)
    else:
        floor_messages(given.total, given.window, given.commits)


if __name__ == "__main__":
    main()
