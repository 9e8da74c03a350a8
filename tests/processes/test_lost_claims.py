"""A claim does not wait for the disk. If PostgreSQL crashes, the claim is lost, and the turn runs once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import Settings
from perdure.tools.variables import VariableSet
from perdure.turns.lease.claim import Claims, read_again
from perdure.turns.lease.tenure import LeaseLost, Tenure
from perdure.turns.outcome import Cancelled
from perdure.turns.run.commit import Step, commit_step
from perdure.turns.run.leave import settle
from perdure.turns.run.verdict import unrun_verdict
from perdure.turns.transcript import Transcript
from tests.conftest import RecordingWaker
from tests.databases import engine_of
from tests.processes.nodes import PostgresServer
from tests.turns.harness import Harness


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server that writes no commit to disk by itself for ten seconds."""
    made = PostgresServer(tmp_path_factory.mktemp("database") / "postgres")
    engine = engine_of(made.administrator, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for setting in ("wal_writer_delay = '10s'", "autovacuum = off"):
            connection.exec_driver_sql(f"ALTER SYSTEM SET {setting}")
    engine.dispose()
    made.restart(signal.SIGINT)
    yield made
    made.stop()


@pytest.fixture
def harness(server: PostgresServer, settings: Settings, clock: MovedClock, waker: RecordingWaker) -> Iterator[Harness]:
    database = Database(server.url)
    made = Harness(settings, clock, database, waker)
    yield made
    made.check()
    database.close()


def _named(harness: Harness, session_id: UUID) -> Tenure:
    return harness.claimed(session_id)


def _drawn(harness: Harness, session_id: UUID) -> Tenure:
    drawn = Claims(harness.runtime, "by hand").draw(None)
    assert isinstance(drawn.found, Tenure)
    assert drawn.session_id == session_id
    return drawn.found


def _commit(harness: Harness, tenure: Tenure) -> None:
    transcript = Transcript.load(harness.database, tenure.at_hand)
    commit_step(harness.runtime, tenure, transcript, VariableSet({}), Step(transcript.uncommitted))


@pytest.mark.long
@pytest.mark.parametrize("claim", [_named, _drawn])
def test_a_crash_takes_a_claim_back_and_its_holder_writes_nothing(
    harness: Harness, server: PostgresServer, claim: Callable[[Harness, UUID], Tenure]
) -> None:
    """The next claim has the lost one's token, but not its nonce. The turn runs once."""
    accepted = harness.send(user_id=claim.__name__)
    lost = claim(harness, accepted.session_id)
    server.restart(signal.SIGQUIT)
    assert harness.session(accepted.session_id).token == 0
    harness.run(accepted.session_id)
    assert harness.session(accepted.session_id).token == lost.token
    assert harness.turn(accepted.turn_id)["status"] == "done"
    with pytest.raises(LeaseLost):
        _commit(harness, lost)
    assert harness.lines(accepted.session_id) == [("user", "hello"), ("assistant", "ok")]


@pytest.mark.long
def test_a_committed_step_keeps_its_claim(harness: Harness, server: PostgresServer) -> None:
    """A step waits for the disk, and its claim is written before it: so no crash takes back a claim with a step."""
    accepted = harness.send(user_id="keeps")
    tenure = harness.claimed(accepted.session_id)
    _commit(harness, tenure)
    server.restart(signal.SIGQUIT)
    assert harness.session(accepted.session_id).token == tenure.token
    assert harness.lines(accepted.session_id) == [("user", "hello")]


@pytest.mark.long
def test_the_claim_of_an_old_turn_waits_for_the_disk(harness: Harness, server: PostgresServer) -> None:
    """The turn may itself have crashed PostgreSQL, so that its attempts must count."""
    accepted = harness.send(user_id="waits")
    harness.sql("UPDATE turns SET accepted_at = accepted_at - interval '2 minutes'")
    tenure = harness.claimed(accepted.session_id)
    server.restart(signal.SIGQUIT)
    assert harness.session(accepted.session_id).token == tenure.token


@pytest.mark.long
def test_the_beginning_of_a_sessions_next_turn_waits_for_the_disk(harness: Harness, server: PostgresServer) -> None:
    """It raises no fence: the holder of a turn that has not begun would settle it."""
    first, second = harness.send(user_id="goes on"), harness.send(user_id="goes on")
    tenure = harness.claimed(first.session_id)
    verdict = unrun_verdict(harness.runtime, tenure.fence, tenure.at_hand, Cancelled())
    settle(harness.database, harness.clock, tenure.fence, tenure.at_hand, verdict, keep_s=30.0)
    read_again(harness.runtime, tenure)
    server.restart(signal.SIGQUIT)
    [row] = harness.sql("SELECT status FROM turns WHERE turn_id = %(id)s", id=second.turn_id)
    assert row.status == "running"
