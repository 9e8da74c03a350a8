"""The invariants hold after minutes of random faults in workers and servers.

Some replies go to a receiver that accepts connections and never answers. Some turns have a row that perdure cannot
read. Some messages are for an agent that only one of four workers has, as in a rolling deploy. After the first third of
the time, another Celery application starts on the same Redis database. From that moment, the faults remove only
perdure's keys. They neither flush nor restart Redis, because that would lose the tasks of the other application.

`make chaos` runs this test. `PERDURE_CHAOS_MINUTES` sets the duration (default 3). `PERDURE_CHAOS_SEED` sets the random
seed.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import pytest
from pytest_celery import CeleryTestSetup
from redis import Redis

from perdure.access.tenants import UserKey
from perdure.agents import Agent, Agents
from perdure.errors import Unavailable
from perdure.network.queues import QUEUES
from perdure.redis import client_url
from perdure.turns.calls.approvals import Decision, decide
from perdure.turns.inbox.accept import Accepted
from perdure.turns.reading import read_turn
from tests.databases import engine_of
from tests.processes.faults import wait_until
from tests.processes.installation import LEASE_S, TOOL_TIMEOUT_S, Installation
from tests.processes.neighbourhood import Neighbour
from tests.processes.nodes import PostgresServer
from tests.processes.receiver import Receiver, SilentReceiver

MINUTES = float(os.environ.get("PERDURE_CHAOS_MINUTES", "3"))
SEED = int(os.environ.get("PERDURE_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
USERS = 24
KINDS = ("hello", "pure", "idempotent", "unsafe", "probed", "all")
OWED = 10
"""One turn in `OWED` has a `reply_to`. About half of these turns use the receiver that never answers."""

NEW = 8
"""One message in `NEW` is for the agent that only the worker of the newer deployment has."""

DOOMED = 3
"""The number of turns that get an unreadable row."""

LONG_S, COUNTDOWN_S = 110, 150
"""Seconds that the neighbour's tasks run or wait: more than perdure's visibility timeout, less than the neighbour's."""

NEIGHBOURS_TASKS = 4

BACKLOG_S = 300
"""Seconds from the last fault within which all turns must be settled. Busy cores need minutes for the backlog."""

OWN_KEYS = ["perdure:*", *(glob for name in QUEUES for glob in (name, f"{name}\x06\x16*"))]
"""Globs that match perdure's keys in Redis: keys with its prefix, and the lists of its queues for each priority."""

pytestmark = [pytest.mark.chaos]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL that the test may restart."""
    made = PostgresServer(tmp_path / "postgres")
    yield made
    made.stop()


@pytest.fixture
def database_url(server: PostgresServer) -> str:
    """The URL of the workers' database."""
    return server.url


@pytest.fixture
def worker_count() -> int:
    """Three workers, so that two run while one restarts."""
    return 3


@pytest.fixture
def silence() -> Iterator[SilentReceiver]:
    """A receiver that accepts connections and never answers."""
    made = SilentReceiver()
    yield made
    made.close()


class Chaos:
    """Causes faults in an installation, with a method for each kind. A method ends its fault before it returns."""

    def __init__(self, installation: Installation, server: PostgresServer, drawn: random.Random) -> None:
        self._installation = installation
        self._fleet = tuple(installation.workers)
        self._server = server
        self._drawn = drawn
        self._pause = threading.Event()
        self.erased = 0
        self.harmless = [self.kill, self.kill, self.stop, self.leave, self.forget, self.silence, self.outage]
        self.harmless += [self.erase, self.maintain]
        """Faults that do not harm another application on the same Redis database."""
        self.all = [*self.harmless, self.flush, self.restart]

    def kill(self) -> None:
        """Kill a worker, and start it again."""
        worker = self._drawn.choice(self._fleet)
        worker.kill()
        worker.container.start()

    def stop(self) -> None:
        """Pause a worker, possibly for longer than its lease."""
        worker = self._drawn.choice(self._fleet)
        os.kill(worker.pid, signal.SIGSTOP)
        self._pause.wait(self._drawn.uniform(0, LEASE_S * 2))
        os.kill(worker.pid, signal.SIGCONT)

    def leave(self) -> None:
        """Stop a worker with SIGTERM and start it again, as a deploy does."""
        worker = self._drawn.choice(self._fleet)
        worker.kill(signal.SIGTERM)
        worker.container.start()

    def flush(self) -> None:
        """Delete all data of Redis."""
        self._installation.redis.flush()

    def forget(self) -> None:
        """Delete only perdure's queues and keys in Redis."""
        with Redis.from_url(client_url(self._installation.redis.url), socket_timeout=10) as client:
            own = [key for glob in OWN_KEYS for key in client.scan_iter(match=glob, count=1_000)]
            if own:
                client.delete(*own)

    def restart(self) -> None:
        """Kill Redis, and start it again."""
        self._installation.redis.restart()

    def silence(self) -> None:
        """Pause Redis for up to three seconds."""
        self._installation.redis.kill("SIGSTOP")
        self._pause.wait(self._drawn.uniform(0, 3))
        self._installation.redis.kill("SIGCONT")

    def outage(self) -> None:
        """Restart PostgreSQL with a fast or immediate shutdown or a SIGKILL."""
        self._server.restart(self._drawn.choice([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL]))

    def erase(self) -> None:
        """Erase a user whose turn may be running."""
        self.erased += 1
        user = f"erased {self.erased}"
        self._installation.accept("hello", user=user)
        self._pause.wait(self._drawn.uniform(0, 0.5))
        self._installation.runtime.eraser.erase(UserKey(user))

    def maintain(self) -> None:
        """Hold a lock that conflicts with `ANALYZE` and with the build of an index, as `VACUUM` does."""
        engine = engine_of(self._server.url)
        with engine.begin() as connection:
            connection.exec_driver_sql("LOCK TABLE messages, users IN SHARE UPDATE EXCLUSIVE MODE")
            self._pause.wait(self._drawn.uniform(0, 8))
        engine.dispose()


def test_the_invariants_hold_after_minutes_of_chaos(  # noqa: PLR0917 (fixtures, given by name)
    celery_setup: CeleryTestSetup,
    installation: Installation,
    server: PostgresServer,
    neighbour: Neighbour,
    receiver: Receiver,
    silence: SilentReceiver,
) -> None:
    """No message is lost or repeated, no effect class is violated, and each task of the neighbour runs once."""
    drawn = random.Random(SEED)  # noqa: S311 (draws of a test)
    print(f"PERDURE_CHAOS_SEED={SEED}")  # noqa: T201 (shown with a failure)
    installation.worker(PERDURE_AGENTS="tests.processes.newer_agents")
    agents = Agents([Agent(name, "Runs in the workers only.") for name in ("tester", "newer")])
    installation.runtime = replace(installation.runtime, agents=agents)
    sender = Sender(installation, random.Random(SEED + 1), [receiver.url, silence.url])  # noqa: S311 (as above)
    chaos = Chaos(installation, server, drawn)
    done: Counter[str] = Counter()
    with sender:
        doomed = _spoil(installation)
        _inject(chaos.all, drawn, MINUTES * 20, done)
        neighbour.worker()
        sent = neighbour.send_timed(NEIGHBOURS_TASKS, LONG_S, COUNTDOWN_S)
        _inject(chaos.harmless, drawn, MINUTES * 40, done)

    turns = installation.settled(*(each.turn_id for each in sender.accepted), within_s=BACKLOG_S)
    given_up = _given_up(installation, doomed)
    wait_until(lambda: set(neighbour.runs()) >= set(sent), "the neighbour's tasks have run", COUNTDOWN_S + 60)
    wait_until(lambda: not installation.query("SELECT 1 FROM sessions WHERE unsettled > 0"), "no turn is left")
    wait_until(lambda: not installation.query("SELECT 1 FROM erasures"), "each erasure is finished", 60)
    print(  # noqa: T201 (the run's figures)
        f"{len(turns)} turns, {len(given_up)} failed with an unreadable row, {len(sent)} tasks of the neighbour,"
        f" {silence.connections} connections to a receiver that never answers, {dict(done)}"
    )
    assert Counter(turn["status"] for turn in turns) == {"done": len(turns)}
    assert neighbour.runs() == dict.fromkeys(sent, 1), "each task of the neighbour once"
    assert silence.connections, "the receiver that never answers was tried"
    installation.check()
    _check_effects(installation)
    _check_deliveries(installation, receiver)


def _inject(faults: Sequence[Callable[[], None]], drawn: random.Random, seconds: float, done: Counter[str]) -> None:
    pause, until = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < until:
        fault = drawn.choice(faults)
        fault()
        done[fault.__name__] += 1
        pause.wait(drawn.uniform(0, 1))


class Sender:
    """Sends messages of many users from a thread within a `with` block; `accepted` lists the accepted messages."""

    def __init__(self, installation: Installation, drawn: random.Random, receivers: Sequence[str]) -> None:
        self.accepted: list[Accepted] = []
        self._installation = installation
        self._drawn = drawn
        self._receivers = receivers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _send(self) -> None:
        for number in itertools.count():
            text = f"{self._drawn.choice(KINDS)}: {number}"
            user = f"user {self._drawn.randrange(USERS)}"
            owed = {"reply_to": {"url": self._drawn.choice(self._receivers)}} if number % OWED == 0 else {}
            while not self._over.is_set():
                try:
                    given = {**owed, **({"agent": "newer"} if number % NEW == 0 else {})}
                    self.accepted.append(
                        self._installation.accept(text, user=user, message_id=f"message {number}", **given)
                    )
                    break
                except Unavailable:
                    self._over.wait(0.1)
            if self._over.wait(0.05):
                return


def _spoil(installation: Installation) -> list[Accepted]:
    """Let a few turns wait for approval. Make one row of each turn unreadable, then approve the turns' tool calls."""
    doomed = [installation.accept("guarded: x", user=f"doomed {number}") for number in range(DOOMED)]
    for each in doomed:
        wait_until(partial(_waits, installation, each.turn_id), "the turn waits for approval", 60)
    with installation.database.engine.connect() as connection:
        connection.exec_driver_sql("ALTER TABLE messages DROP CONSTRAINT messages_role_check")
        connection.exec_driver_sql(
            "UPDATE messages SET role = 'oracle' WHERE role = 'assistant' AND turn_id = ANY (%(ids)s::uuid[])",
            {"ids": [each.turn_id for each in doomed]},
        )
    for each in doomed:
        decide(installation.runtime, each.turn_id, Decision(call_id="call_0", decision="approve"))
    return doomed


def _waits(installation: Installation, turn_id: UUID) -> bool:
    return bool(read_turn(installation.database, turn_id)["status"] == "waiting_approval")


def _given_up(installation: Installation, doomed: Sequence[Accepted]) -> list[dict[str, Any]]:
    """Assert that the turns with an unreadable row fail, and that each session's next message is answered."""
    turns = installation.settled(*(each.turn_id for each in doomed), within_s=120)
    assert {(turn["status"], turn["error"]["code"]) for turn in turns} == {("failed", "BUDGET_EXHAUSTED")}
    behind = [
        installation.accept("hello", user=f"doomed {number}", session_id=each.session_id)
        for number, each in enumerate(doomed)
    ]
    assert {turn["status"] for turn in installation.settled(*(each.turn_id for each in behind))} == {"done"}
    with installation.database.engine.connect() as connection:  # repair the rows for the checks that follow
        connection.exec_driver_sql("UPDATE messages SET role = 'assistant' WHERE role = 'oracle'")
    return turns


def _check_deliveries(installation: Installation, receiver: Receiver) -> None:
    owed = installation.query(
        "SELECT d.turn_id, d.target ->> 'url' AS url, d.status, d.attempts FROM deliveries AS d ORDER BY d.created_at"
    )
    for row in (row for row in owed if row.url == receiver.url):
        wait_until(partial(receiver.of, str(row.turn_id)), "the reply is delivered", 60)
    silent = [row for row in owed if row.url != receiver.url]
    assert {row.status for row in silent} <= {"pending", "failed"}, "no receiver accepted these"


def _check_effects(installation: Installation) -> None:
    # A worker paused inside a tool may resume and act after its successor's probe. Nothing can prevent that.
    frozen = [effect for effect in installation.faults.effects() if effect.after_s >= TOOL_TIMEOUT_S]
    happened = Counter((effect.tool, effect.effect_id) for effect in installation.faults.effects())
    stopped = Counter((effect.tool, effect.effect_id) for effect in frozen)
    rows = installation.query("SELECT tool, effect_id, status FROM tool_effects")
    for row in rows:
        key = (row.tool, str(row.effect_id))
        times = happened.pop(key, 0)
        if row.tool == "unsafe":
            assert times <= 1, "an unsafe call is never repeated"
        if row.tool == "probed":
            assert times - stopped[key] <= 1, "a call with a probe is repeated only if the probe ran before the effect"
        if row.status == "done":
            assert times >= 1, "a call that is reported as done was done"
    assert not happened, "each effect has an intent"
