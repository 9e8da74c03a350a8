"""Minutes of faults drawn at random over a fleet; what must hold is checked in the end.

Run by `make chaos`. `PERDURE_CHAOS_MINUTES` says how long (default 3), `PERDURE_CHAOS_SEED`
repeats a run's draws.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_celery import CeleryTestSetup

from perdure.errors import Unavailable
from perdure.turns.inbox import Accepted
from tests.processes.installation import LEASE_S, Installation
from tests.processes.nodes import PostgresServer
from tests.processes.scene import wait_until

MINUTES = float(os.environ.get("PERDURE_CHAOS_MINUTES", "3"))
SEED = int(os.environ.get("PERDURE_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
USERS = 24
KINDS = ("hello", "pure", "idempotent", "unsafe", "probed", "all")

pytestmark = [pytest.mark.chaos]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL to be restarted."""
    made = PostgresServer(tmp_path / "postgres")
    yield made
    made.stop()


@pytest.fixture
def database_url(server: PostgresServer) -> str:
    """The database of the fleet."""
    return server.url


@pytest.fixture
def worker_count() -> int:
    """A fleet of which some always live."""
    return 3


class Chaos:
    """What can befall an installation. Each fault is over when its method returns."""

    def __init__(self, installation: Installation, server: PostgresServer, drawn: random.Random) -> None:
        self._installation = installation
        self._server = server
        self._drawn = drawn
        self._pause = threading.Event()
        self.faults = [self.kill, self.kill, self.stop, self.leave, self.flush, self.restart, self.silence, self.outage]

    def kill(self) -> None:
        """A worker dies."""
        worker = self._drawn.choice(self._installation.workers)
        worker.kill()
        worker.container.start()

    def stop(self) -> None:
        """A worker freezes, perhaps past its lease."""
        worker = self._drawn.choice(self._installation.workers)
        os.kill(worker.pid, signal.SIGSTOP)
        self._pause.wait(self._drawn.uniform(0, LEASE_S * 2))
        os.kill(worker.pid, signal.SIGCONT)

    def leave(self) -> None:
        """A worker is deployed."""
        worker = self._drawn.choice(self._installation.workers)
        worker.kill(signal.SIGTERM)
        worker.container.start()

    def flush(self) -> None:
        """Redis forgets everything."""
        self._installation.redis.flush()

    def restart(self) -> None:
        """Redis dies and comes back."""
        self._installation.redis.restart()

    def silence(self) -> None:
        """Redis says nothing for a while."""
        self._installation.redis.kill("SIGSTOP")
        self._pause.wait(self._drawn.uniform(0, 3))
        self._installation.redis.kill("SIGCONT")

    def outage(self) -> None:
        """PostgreSQL restarts, in one way or another."""
        self._server.restart(self._drawn.choice([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL]))


def test_what_holds_holds_after_minutes_of_chaos(
    celery_setup: CeleryTestSetup, installation: Installation, server: PostgresServer
) -> None:
    """Faults that nobody thought of together: no message lost, none doubled, no effect against its class."""
    drawn = random.Random(SEED)  # noqa: S311 (draws of a test)
    print(f"PERDURE_CHAOS_SEED={SEED}")  # noqa: T201 (shown with a failure)
    accepted: list[Accepted] = []
    over = threading.Event()
    sender = threading.Thread(target=_send, args=(installation, random.Random(SEED + 1), accepted, over))  # noqa: S311
    sender.start()
    chaos = Chaos(installation, server, drawn)
    done: Counter[str] = Counter()
    until = time.monotonic() + MINUTES * 60
    try:
        while time.monotonic() < until:
            fault = drawn.choice(chaos.faults)
            fault()
            done[fault.__name__] += 1
            over.wait(drawn.uniform(0, 1))
    finally:
        over.set()
        sender.join(60)

    turns = installation.settled(*(each.turn_id for each in accepted), within_s=120)
    print(f"{len(turns)} turns, {dict(done)}")  # noqa: T201 (the run's figures)
    assert Counter(turn["status"] for turn in turns) == {"done": len(turns)}
    wait_until(lambda: not installation.query("SELECT 1 FROM sessions WHERE unsettled > 0"), "nothing is left to do")
    installation.check()
    _check_effects(installation)


def _send(installation: Installation, drawn: random.Random, accepted: list[Accepted], over: threading.Event) -> None:
    for number in itertools.count():
        text = f"{drawn.choice(KINDS)}: {number}"
        while not over.is_set():
            try:
                accepted.append(
                    installation.accept(text, user=f"user {drawn.randrange(USERS)}", message_id=f"message {number}")
                )
                break
            except Unavailable:
                over.wait(0.1)
        if over.wait(0.05):
            return


def _check_effects(installation: Installation) -> None:
    happened = Counter((effect.tool, effect.effect_id) for effect in installation.scene.effects())
    rows = installation.query("SELECT tool, effect_id, status FROM tool_effects")
    for row in rows:
        times = happened.pop((row.tool, str(row.effect_id)), 0)
        if row.tool in ("unsafe", "probed"):
            assert times <= 1, "an unsafe call is never repeated"
        if row.status == "done":
            assert times >= 1, "what is told as done was done"
    assert not happened, "each effect has an intent"
