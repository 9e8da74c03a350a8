"""PostgreSQL restarts under load: no accepted message is lost, and the workers recover by themselves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest
from pytest_celery import CeleryTestSetup

from perdure.errors import Unavailable
from perdure.turns.inbox.accept import Accepted
from tests.processes.installation import Installation
from tests.processes.nodes import PostgresServer

MESSAGES = 120
SESSIONS = 20
SENDERS = 4
GIVE_UP_S = 40.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A separate PostgreSQL server, because these tests restart the server."""
    made = PostgresServer(tmp_path_factory.mktemp("database") / "postgres")
    yield made
    made.stop()


@pytest.fixture
def database_url(server: PostgresServer) -> str:
    """The URL of the workers' database."""
    return server.url


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGKILL,
    ],
    ids=lambda number: number.name,
)
def test_accepted_messages_survive_a_restart(
    celery_setup: CeleryTestSetup, installation: Installation, server: PostgresServer, number: signal.Signals
) -> None:
    """An accepted message survives a fast shutdown, an immediate shutdown and a killed postmaster."""
    installation.model_server.latency_s = 0.05
    pids = [worker.pid for worker in installation.workers]
    accepted: list[Accepted] = []
    halfway = threading.Event()

    def send(sender: int) -> None:
        for position in range(MESSAGES // SENDERS):
            accepted.append(_until_accepted(installation, f"{number.name} {sender}-{position}"))
            if len(accepted) >= MESSAGES // 2:
                halfway.set()

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(SENDERS)]
    for sender in senders:
        sender.start()
    assert halfway.wait(GIVE_UP_S)
    server.restart(number)
    for sender in senders:
        sender.join(GIVE_UP_S)

    turns = installation.settled(*(each.turn_id for each in accepted), within_s=60)
    assert len({turn["turn_id"] for turn in turns}) == MESSAGES
    assert {turn["status"] for turn in turns} == {"done"}
    assert [worker.pid for worker in installation.workers if worker.container.status == "running"] == pids
    installation.check()


def _until_accepted(installation: Installation, text: str) -> Accepted:
    """Send a message repeatedly, with the same id, until it is accepted."""
    user = f"user {text.partition('-')[2]}-{text.partition(' ')[0]}"
    give_up = time.monotonic() + GIVE_UP_S
    while True:
        try:
            return installation.accept(text, user=user, message_id=text)
        except Unavailable:
            if time.monotonic() > give_up:
                raise
