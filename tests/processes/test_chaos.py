"""The invariants hold after minutes of random faults in workers, servers, the gateway and beats.

Messages come from a program with the database and over HTTP. Clients of the gateway follow some turns, schedules begin
others. Some replies go to a receiver that accepts connections and never answers. Some calls are tasks of another Celery
application. Some turns have a row that perdure cannot read. One of four workers is of a newer deployment, which has a
changed agent and a new one; a turn ends at the version that began it. After the first third of the time, another Celery
application starts on the same Redis database. From that moment, the faults remove only perdure's keys. They neither
flush nor restart Redis, because that would lose the tasks of the other application.

`make chaos` runs this test. These environment variables change it:

CHAOS_SECONDS   the duration of the faults, default 180
CHAOS_SEED      the random seed
CHAOS_BROKER    `rabbitmq`: RabbitMQ is the broker
CHAOS_POOLER    any value: PgBouncer is between perdure and PostgreSQL
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pytest_celery import CeleryTestSetup

from perdure.agents import Agent, Agents
from perdure.turns.calls.approvals import Decision, decide
from perdure.turns.inbox.accept import Accepted
from perdure.turns.reading import read_turn
from tests.cli.conftest import Perdure
from tests.processes.chaos.beat import Beat
from tests.processes.chaos.faults import Chaos
from tests.processes.chaos.listeners import Listeners
from tests.processes.chaos.planner import Planner
from tests.processes.chaos.senders import HttpSender, Sender
from tests.processes.faults import wait_until
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.invariants import (
    VERSIONS,
    check_deliveries,
    check_effects,
    check_plans,
    check_read,
    check_sent,
    check_slots,
    check_versions,
    wait_for_slots,
)
from tests.processes.neighbourhood import Neighbour
from tests.processes.nodes import PostgresServer
from tests.processes.pooler import Pooler
from tests.processes.rabbit import Rabbit
from tests.processes.receiver import Receiver, SilentReceiver
from tests.processes.test_celery_tools import application_of

SECONDS = float(os.environ.get("CHAOS_SECONDS") or 180)
SEED = int(os.environ.get("CHAOS_SEED") or time.time_ns() % 1_000_000)
BROKER = os.environ.get("CHAOS_BROKER") or "redis"
POOLER = bool(os.environ.get("CHAOS_POOLER"))

DOOMED = 3
"""The number of turns that get an unreadable row."""

LONG_S, COUNTDOWN_S = 110, 150
"""Seconds that the neighbour's tasks run or wait: more than perdure's visibility timeout, less than the neighbour's."""

NEIGHBOURS_TASKS = 4

BACKLOG_S = 300
"""Seconds from the last fault within which all turns must be settled. Busy cores need minutes for the backlog."""

pytestmark = [pytest.mark.chaos]


@pytest.fixture
def postgres_directory() -> Iterator[Path]:
    """The directory of PostgreSQL, which PgBouncer's account may enter, unlike pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="perdure-") as made:
        yield Path(made) / "postgres"


@pytest.fixture
def server(postgres_directory: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL that the test may restart."""
    made = PostgresServer(postgres_directory)
    yield made
    made.stop()


@pytest.fixture
def database_url(server: PostgresServer) -> str:
    """The URL of the workers' database."""
    return server.url


@pytest.fixture
def pooler(server: PostgresServer, postgres_directory: Path) -> Iterator[Pooler | None]:
    """PgBouncer, with `CHAOS_POOLER`."""
    if not POOLER:
        yield None
        return
    made = Pooler(server.url, postgres_directory / "access")
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def pooled_url(pooler: Pooler | None) -> str | None:
    """The URL of the database behind PgBouncer, or `None`."""
    return None if pooler is None else pooler.url


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Rabbit | None]:
    """The broker, if it is not Redis."""
    if BROKER == "redis":
        yield None
        return
    assert BROKER == "rabbitmq", f"CHAOS_BROKER={BROKER}: accepted: redis, rabbitmq"
    (tmp_path / "rabbitmq").mkdir()
    made = Rabbit(tmp_path / "rabbitmq")
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def broker_url(broker: Rabbit | None) -> str | None:
    """The URL of the broker; `None`: Redis is the broker."""
    return None if broker is None else broker.url


@pytest.fixture(autouse=True)
def pinned(installation: Installation) -> None:
    """Let the workers that start later end only turns of their own version."""
    installation.environment["PERDURE_TURN__PIN_AGENTS"] = "true"


@pytest.fixture
def worker_count() -> int:
    """Three workers, so that two run while one restarts."""
    return 3


@pytest.fixture
def gateway(perdure: Perdure, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that answers."""
    made = GatewayProcess(perdure, tmp_path / "gateway.log")
    made.start()
    yield made
    made.kill()


@pytest.fixture
def beats(perdure: Perdure, tmp_path: Path) -> Iterator[list[Beat]]:
    """Two beats."""
    made = [Beat(perdure, tmp_path / f"beat-{number}.log") for number in range(2)]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.kill()


@pytest.fixture
def silence() -> Iterator[SilentReceiver]:
    """A receiver that accepts connections and never answers."""
    made = SilentReceiver()
    yield made
    made.close()


def test_the_invariants_hold_after_minutes_of_chaos(  # noqa: PLR0917 (fixtures, given by name)
    celery_setup: CeleryTestSetup,
    installation: Installation,
    server: PostgresServer,
    pooler: Pooler | None,
    broker: Rabbit | None,
    gateway: GatewayProcess,
    beats: list[Beat],
    neighbour: Neighbour,
    receiver: Receiver,
    silence: SilentReceiver,
) -> None:
    """No message is lost or repeated, no effect class is violated, and each task of the neighbour runs once."""
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g} broker {BROKER}, pooler {POOLER}")  # noqa: T201 (for a failure)
    installation.worker(PERDURE_AGENTS="tests.processes.newer_agents").ready()
    agents = Agents([Agent(name, "Runs in the workers only.") for name in ("tester", "newer")])
    installation.runtime = replace(installation.runtime, agents=agents)
    application = application_of(installation)
    draws = [random.Random(SEED + number) for number in range(5)]  # noqa: S311 (draws of a test)
    chaos = Chaos(
        installation,
        draws[0],
        server=server,
        pooler=pooler,
        broker=broker,
        gateway=gateway,
        beats=beats,
        application=application,
    )
    sender = Sender(installation, draws[1], [receiver.url, silence.url])
    listeners = Listeners(draws[2], gateway.url, SECONDS + BACKLOG_S)
    http = HttpSender(installation, draws[3], gateway.url, listeners)
    planner = Planner(installation, draws[4])
    with listeners, http, sender, planner:
        doomed = _spoil(installation)
        chaos.inject(chaos.all, SECONDS / 3)
        neighbour.worker()
        timed = neighbour.send_timed(NEIGHBOURS_TASKS, LONG_S, COUNTDOWN_S)
        chaos.inject(chaos.harmless, SECONDS * 2 / 3)

    sent = [str(each.turn_id) for each in sender.accepted] + [each.turn_ids[0] for each in http.sent]
    turns = installation.settled(*sent, within_s=BACKLOG_S)
    given_up = _given_up(installation, doomed)
    wait_until(lambda: set(neighbour.runs()) >= set(timed), "the neighbour's tasks have run", COUNTDOWN_S + 60)
    wait_until(lambda: not installation.query("SELECT FROM reminders"), "each schedule has fired", 60)
    wait_until(lambda: not installation.query("SELECT 1 FROM sessions WHERE unsettled > 0"), "no turn is left", 60)
    wait_until(lambda: not installation.query("SELECT 1 FROM erasures"), "each erasure is finished", 60)
    wait_for_slots(installation)
    gateway.stop()
    for beat in beats:
        beat.stop()
    slots = installation.query("SELECT count(*) AS n FROM schedule_slots")[0].n
    print(  # noqa: T201 (the run's figures)
        f"{len(turns)} turns, {len(http.sent)} of them over HTTP with {http.failures} failed requests,"
        f" {len(listeners.readers)} streams with {sum(each.cut for each in listeners.readers)} cuts,"
        f" {sum(each.lost for each in listeners.readers)} lost connections and"
        f" {sum(each.retracted for each in listeners.readers)} rewinds, {len(planner.plans)} schedules, {slots} slots,"
        f" {sum(each.fired for each in beats)} firings by beats,"
        f" {len(given_up)} turns failed with an unreadable row, {len(timed)} tasks of the neighbour,"
        f" {silence.connections} connections to a receiver that never answers, {dict(chaos.done)}"
    )
    assert Counter(turn["status"] for turn in turns) == {"done": len(turns)}
    assert neighbour.runs() == dict.fromkeys(timed, 1), "each task of the neighbour once"
    assert silence.connections, "the receiver that never answers was tried"
    assert check_versions(installation) == len(VERSIONS), "each version of an agent answered"
    assert sum(each.fired for each in beats), "the beats fired slots"
    installation.check()
    check_effects(installation)
    check_sent(installation, http.sent)
    check_read(installation, listeners.readers)
    check_plans(installation, planner.plans)
    check_slots(installation)
    check_deliveries(installation, receiver)


def _spoil(installation: Installation) -> list[Accepted]:
    """Let a few turns wait for approval. Make one row of each turn unreadable, then approve the turns' tool calls."""
    doomed = [installation.accept(f"guarded: {number}", user=f"doomed {number}") for number in range(DOOMED)]
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
        installation.accept(f"hello: behind {number}", user=f"doomed {number}", session_id=each.session_id)
        for number, each in enumerate(doomed)
    ]
    assert {turn["status"] for turn in installation.settled(*(each.turn_id for each in behind))} == {"done"}
    with installation.database.engine.connect() as connection:  # repair the rows for the checks that follow
        connection.exec_driver_sql("UPDATE messages SET role = 'assistant' WHERE role = 'oracle'")
    return turns
