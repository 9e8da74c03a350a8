"""If SIGTERM shuts down a worker, each of its turns repeats at most one model call."""

from __future__ import annotations

import re
import signal
import time

import psutil
import pytest
from pytest_celery import CeleryTestSetup
from sqlalchemy import NullPool

from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from tests.databases import engine_of
from tests.processes.faults import Place, done, wait_until
from tests.processes.installation import DRAIN_S, Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import Worker

PATIENT = {"PERDURE_SHUTDOWN__DRAIN_S": "50", "PERDURE_SHUTDOWN__HARD_EXIT_S": "60"}
"""Settings of a worker that would drain for longer than the test."""

LONG_LEASE = {
    "PERDURE_TURN__LEASE_S": "90",
    "PERDURE_TURN__HEARTBEAT_S": "10",
    "PERDURE_TURN__TOOL_TIMEOUT_S": "5",
}
HARD_EXIT_S = 3.0
STUCK = {**LONG_LEASE, "PERDURE_SHUTDOWN__DRAIN_S": "0.2", "PERDURE_SHUTDOWN__HARD_EXIT_S": str(HARD_EXIT_S)}
"""Settings of a worker that exits long before the tool's time limit and the lease have passed."""

PHASE = re.compile(r"shutdown, (\d) of 4: (.*)")

REACTION_S = 0.5
"""Seconds within which a thread reacts to a signal, even on a busy machine."""


def _signal(worker: Worker, number: signal.Signals, logged: str = "to drain") -> None:
    """Send a signal, and wait until the worker's log contains `logged`."""
    worker.container.signal(number)
    wait_until(lambda: logged in worker.logs(), f"{worker.name()} reacts to {number.name}")


def _figures(line: str, form: str) -> list[float]:
    """The numbers in a log line, one for each # in `form`."""
    found = re.fullmatch(re.escape(form).replace(r"\#", r"([\d.]+)"), line)
    assert found is not None, f"{line!r} is not of the form {form!r}"
    return [float(each) for each in found.groups()]


def test_a_turn_in_a_model_call_is_parked_and_finished_elsewhere(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """A worker that shuts down parks an unfinished turn, and counts no failed attempt. Another worker finishes it."""
    gate = installation.model_server.gate("hello")
    accepted = installation.accept("hello")
    gate.wait()
    owner = installation.lease_owner(accepted.session_id)
    leaving = next(worker for worker in installation.workers if worker.pid == owner)

    signalled_at = time.monotonic()
    leaving.kill(signal.SIGTERM)
    (turn,) = installation.settled(accepted.turn_id)
    settled_at = max(note.at for note in installation.faults.notes() if note.name == "turns.settle")

    assert leaving.container.wait() == 0
    assert turn["reply"]["text"] == answer_to("hello")
    assert settled_at - signalled_at < DRAIN_S + 2
    assert [number for number, _ in PHASE.findall(leaving.logs())] == ["1", "2", "3", "4"]
    parked = [note for note in installation.faults.notes() if note.name == "turns.shut_down"]
    assert {note.pid for note in parked} == {leaving.pid}
    strikes = installation.query("SELECT strikes FROM sessions")[0].strikes
    assert strikes == 0
    installation.check()


@pytest.mark.long
def test_a_tool_call_under_way_is_awaited(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """A worker that shuts down waits for a running tool call, so that the call's outcome is known."""
    installation.faults.arm(Place("within", "unsafe.entered"), signal.SIGTERM)
    accepted = installation.accept("unsafe: quick")
    (turn,) = installation.settled(accepted.turn_id)
    struck = wait_until(installation.faults.fired, "a worker gets SIGTERM within its tool")
    leaving = next(worker for worker in installation.workers if worker.pid == struck.pid)
    assert leaving.container.wait() == 0
    assert turn["reply"]["text"] == answer_to("unsafe: quick", done("unsafe", "unsafe: quick"))
    assert [effect.pid for effect in installation.faults.effects()] == [leaving.pid]
    installation.check()


@pytest.mark.exhaustive
def test_an_isolated_turn_is_parked_with_its_worker(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """At a shutdown, a turn in its own process is parked like any other turn."""
    gate = installation.model_server.gate("hello", nth=1)
    accepted = installation.accept("hello")
    for deaths in range(1, ISOLATE_FROM_CLAIM + 1):
        gate.wait()
        owner = installation.lease_owner(accepted.session_id)
        victim = next(worker for worker in installation.workers if worker.pid == owner)
        gate = installation.model_server.gate("hello", nth=deaths + 1)
        victim.kill()
        victim.container.start()
    gate.wait()
    isolated = psutil.Process(installation.lease_owner(accepted.session_id))
    leaving = next(worker for worker in installation.workers if worker.pid == isolated.ppid())

    leaving.kill(signal.SIGTERM)

    assert leaving.container.wait() == 0
    assert not isolated.is_running()
    (turn,) = installation.settled(accepted.turn_id)
    assert turn["reply"]["text"] == answer_to("hello")
    installation.check()


@pytest.mark.long
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_the_drain(installation: Installation, first: signal.Signals) -> None:
    """At a second signal, the worker exits at once with status 0. No turn is lost.

    The log counts a turn that ends between the signals as finished, and a turn that still runs as parked. It does not
    count a turn that ended before the first signal.
    """
    gates = {text: installation.model_server.gate(text) for text in ("hello", "soon")}
    leaving = installation.worker(**PATIENT)
    leaving.container.ready()
    installation.settled(installation.accept("before", user="before").turn_id)
    accepted = {text: installation.accept(text, user=text) for text in gates}
    for gate in gates.values():
        gate.wait()

    began = time.monotonic()
    _signal(leaving, first)
    gates["soon"].opened.set()
    installation.settled(accepted["soon"].turn_id)
    waited_s = time.monotonic() - began
    _signal(leaving, signal.SIGTERM if first is signal.SIGHUP else signal.SIGINT, logged="parks 1 turns")

    assert leaving.container.wait() == 0
    took_s = time.monotonic() - began
    rows = installation.query("SELECT status FROM turns WHERE turn_id = %(id)s", id=accepted["hello"].turn_id)
    assert rows[0].status == "parked"
    phases = dict(PHASE.findall(leaving.logs()))
    drained = _figures(phases["2"], "drained; 1 turns finished, 1 parked (# s)")
    flushed = _figures(phases["3"], "flushed 3 of 3 sessions, # turns (# s)")
    closed = _figures(phases["4"], "released 0 leases, closed (# s; # s in all)")
    assert "returned 0 of 0" in phases["1"]
    assert waited_s - REACTION_S < drained[0] < closed[1] < took_s
    assert drained[0] + flushed[1] + closed[0] <= closed[1] + 0.01
    installation.worker()
    assert installation.settled(accepted["hello"].turn_id)[0]["reply"]["text"] == answer_to("hello")
    installation.check()


@pytest.mark.long
def test_at_the_hard_limit_leases_are_released(installation: Installation) -> None:
    """If a tool never returns, the worker releases its leases and exits with 1. Another worker runs the turn again."""
    leaving = installation.worker(**STUCK)
    leaving.container.ready()
    accepted = installation.accept("stuck: now")
    wait_until(lambda: installation.faults.effects("stuck: now"), "the tool is called")

    began = time.monotonic()
    leaving.container.signal(signal.SIGTERM)

    assert leaving.container.wait() == 1
    assert time.monotonic() - began < HARD_EXIT_S + 2 * REACTION_S, "the leases are released before the limit"
    assert "released 1 of 1 leases" in leaving.logs()
    (session,) = installation.query("SELECT lease_until, strikes FROM sessions")
    assert (session.lease_until, session.strikes) == (None, 0)
    installation.worker(**LONG_LEASE)
    (turn,) = installation.settled(accepted.turn_id)
    assert turn["reply"]["text"] == answer_to("stuck: now", done("stuck", "stuck: now"))
    assert len(installation.faults.effects("stuck: now")) == 2
    installation.check()


@pytest.mark.long
def test_a_hanging_database_delays_no_exit(installation: Installation) -> None:
    """The worker exits at the hard limit even if the database hangs. Its leases expire later."""
    leaving = installation.worker(**STUCK)
    leaving.container.ready()
    installation.accept("stuck: now")
    wait_until(lambda: installation.faults.effects("stuck: now"), "the tool is called")

    # A connection without the timeouts of perdure's engine.
    engine = engine_of(installation.environment["PERDURE_DATABASE_URL"], poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("SELECT FROM sessions FOR UPDATE")
        began = time.monotonic()
        leaving.container.signal(signal.SIGTERM)
        assert leaving.container.wait() == 1
        took_s = time.monotonic() - began

    assert took_s < HARD_EXIT_S + 2 * REACTION_S
    assert "the hard limit is reached" in leaving.logs()
    assert "of 1 leases" not in leaving.logs()


@pytest.mark.long
def test_messages_received_during_the_shutdown_return_to_the_queue(installation: Installation) -> None:
    """A worker that shuts down returns a message that its pending BRPOP receives. Another worker gets it at once.

    No sweep runs in this test, and the first worker drains until the test ends.
    """
    rare = {**PATIENT, "PERDURE_TURN__SWEEP_S": "60"}
    gate = installation.model_server.gate("slow")
    leaving = installation.worker(**rare)
    leaving.container.ready()
    installation.accept("slow", user="slow")
    gate.wait()
    accepted: list[Accepted] = []

    def stopped() -> bool:
        accepted.append(installation.accept("hello", user=f"user {len(accepted)}"))
        return "1 of 4" in leaving.logs()

    leaving.container.signal(signal.SIGTERM)
    wait_until(stopped, "the worker consumes no more")
    accepted.append(installation.accept("hello", user="last"))
    installation.worker(**rare)

    installation.settled(*(each.turn_id for each in accepted))
    assert leaving.container.status == "running"
    gate.opened.set()
    assert leaving.container.wait() == 0
    wait_until(lambda: not _unsettled(installation), "all turns are settled")
    installation.check()


def _unsettled(installation: Installation) -> int:
    return int(installation.query("SELECT count(*) AS n FROM turns WHERE settled_at IS NULL")[0].n)
