"""Tests of durable turns, repeated over PgBouncer in transaction mode and over RabbitMQ.

Some are also repeated with an agent of pydantic-ai. `test_boundaries` kills workers of both kinds of agents at every
commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_celery import CeleryTestSetup

from perdure.cli.inspect import server_settings
from perdure.database.engine import Database, Statement
from perdure.errors import Unavailable
from perdure.settings import Settings
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.cancel import cancel
from tests.conftest import shared_directory
from tests.processes import pooler, rabbit
from tests.processes.faults import Place, done, wait_until
from tests.processes.installation import ADAPTED, NATIVE, Installation
from tests.processes.model_server import PLANS, ModelServer
from tests.processes.nodes import RedisContainer
from tests.processes.test_order import (  # noqa: F401 (collected)
    test_messages_sent_at_once_are_answered_in_the_order_accepted,
)
from tests.processes.test_recovery import (  # noqa: F401 (collected)
    Stopped,
    test_a_worker_stopped_in_a_tool,
    test_another_worker_continues_within_lease_and_sweep,
)
from tests.processes.test_recovery import stopped as stopped  # noqa: PLC0414 (a fixture)
from tests.processes.test_replies import test_a_reply_is_posted_until_the_receiver_accepts_it  # noqa: F401 (collected)
from tests.processes.test_shutdown import (
    test_a_turn_in_a_model_call_is_parked_and_finished_elsewhere,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.fixture
def pooled_url(database_url: str, pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of the test's database behind PgBouncer."""
    with pooler.running(database_url, shared_directory(pytestconfig) / "postgres" / "access") as url:
        yield url


@pytest.fixture(params=[("pgbouncer", NATIVE), ("rabbitmq", NATIVE)], ids="-".join)
def installation(
    request: pytest.FixtureRequest,
    database_url: str,
    redis_server: RedisContainer,
    model_server: ModelServer,
    tmp_path: Path,
) -> Iterator[Installation]:
    """An installation over a server, whose messages are for an agent; without workers."""
    server, agent = request.param
    broker_url = request.getfixturevalue("rabbitmq") if server == "rabbitmq" else None
    pooled_url = request.getfixturevalue("pooled_url") if server == "pgbouncer" else None
    made = Installation(
        database_url, redis_server, model_server, tmp_path, broker_url, pooled_url=pooled_url, agent=agent
    )
    yield made
    made.close()
    if broker_url is not None:
        rabbit.empty_queues(made.waker.app, broker_url)


def test_a_pooler_refuses_the_settings_of_a_connection(pooled_url: str) -> None:
    """The error names the setting with which perdure works behind PgBouncer."""
    database = Database(pooled_url)
    with pytest.raises(Unavailable) as raised:
        database.run(Statement("test.one", "SELECT 1", writes=False), {})
    database.close()
    assert raised.value.reason.endswith("set PERDURE_DATABASE_PREPARE=false")


@pytest.mark.parametrize("mode", ["statement", "transaction", "session"])
def test_doctor_names_the_mode_of_a_pooler_that_does_not_work(
    database_url: str, pytestconfig: pytest.Config, mode: str
) -> None:
    """In statement mode, single statements work and transactions do not: only `doctor` can tell why."""
    access = shared_directory(pytestconfig) / "postgres" / "access"
    settings = Settings(_env_file=None, database_prepare=False)
    with pooler.running(database_url, access, mode) as url:
        database = Database(url, prepare=False)
        found = [each.setting for each in server_settings._pooler(settings, database)]
        database.close()
    assert found == (["pool_mode is statement"] if mode == "statement" else [])


adapted = pytest.mark.parametrize(
    "installation",
    [(server, ADAPTED) for server in ("redis", "pgbouncer", "rabbitmq")],
    ids="-".join,
    indirect=True,
)
"""Runs a test with an agent of pydantic-ai."""


@adapted
def test_an_adapted_turn_is_parked_and_finished_elsewhere(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """A shutdown parks the turn of an agent of pydantic-ai like any other."""
    test_a_turn_in_a_model_call_is_parked_and_finished_elsewhere(celery_setup, installation)


@adapted
def test_an_adapted_turn_killed_amid_its_calls(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """The other worker uses the recorded results, repeats what may be repeated, and reports the rest as unknown."""
    text = "all: killed"
    installation.faults.arm(Place("within", "idempotent.acted"))
    accepted = installation.accept(text)
    (turn,) = installation.settled(accepted.turn_id)
    results = [row.content for row in installation.transcript(accepted.session_id) if row.role == "tool"]
    ids = {
        tool: [effect.effect_id for effect in installation.faults.effects(text) if effect.tool == tool]
        for tool in PLANS["all"]
    }
    assert installation.faults.fired() is not None
    assert (turn["status"], turn["attempts"]) == ("done", 2)
    assert results[:2] == [done("pure", text), done("idempotent", text)]
    assert results[2] in {done("unsafe", text), UNKNOWN_OUTCOME}
    assert len(ids["idempotent"]) == 2
    assert [len(set(each)) for each in ids.values()][:2] == [1, 1], "a repeated call keeps its id"
    assert len(ids["unsafe"]) <= 1
    installation.check()


@pytest.mark.exhaustive
@adapted
def test_a_worker_stopped_in_a_tool_of_an_adapted_turn(stopped: Stopped, installation: Installation) -> None:
    """Another worker takes over the turn of an agent of pydantic-ai, and the stopped one writes nothing."""
    test_a_worker_stopped_in_a_tool(stopped, installation, "unsafe", "acted")


@adapted
def test_an_adapted_turn_is_cancelled_while_its_model_answers(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """The model call is aborted, and the worker goes on with the next message of the session."""
    gate = installation.model_server.gate("hello")
    accepted = installation.accept("hello")
    gate.wait()
    cancel(installation.runtime, accepted.turn_id)
    (turn,) = installation.settled(accepted.turn_id)
    assert turn["status"] == "cancelled"
    later = installation.accept("pure: later")
    (turn,) = installation.settled(later.turn_id)
    assert turn["status"] == "done"
    wait_until(lambda: not installation.query("SELECT 1 FROM sessions WHERE unsettled > 0"), "all turns are settled")
