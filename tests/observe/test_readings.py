"""The readings tell what waits, what failed and what runs, and each of them stands alone."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure import tool
from perdure.database.engine import Database
from perdure.errors import ProviderError
from perdure.observe import queries
from perdure.observe.disks import DiskState, disk_states
from perdure.observe.exposition import Exposition
from perdure.observe.presence import BEAT, GONE_S, WORKER, Presence
from perdure.observe.readings import Counted, Latest, Readings, Source
from perdure.observe.status import Fault, explain, judge
from perdure.schedules.entries import active_entries
from perdure.turns.lease.claim import claim
from perdure.turns.outbox import Carrier, DeliveryFailed, Undeliverable, deliver
from perdure.workers.celery_application import TASKS
from tests.turns.harness import Harness
from tests.turns.scripted import calls

URL = {"url": "https://example.com/hook"}


def _source(harness: Harness) -> Source:
    entries = list(active_entries(TASKS, harness.settings).values())
    return Source(harness.database, harness.clock, entries)


def _faults(read: Readings) -> dict[str, str]:
    return {each.part: each.severity for each in judge(read)}


def _present(harness: Harness, kind: str = WORKER, **given: Any) -> Presence:
    made = Presence(harness.database, harness.clock, kind, f"{kind}@host", **({"queues": ["turns"]} | given))
    made.report()
    return made


def _samples(read: Readings) -> dict[str, dict[tuple[str, ...], float]]:
    text = Exposition(lambda: read, {"assistant"}, {"offline"}).text().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_an_idle_installation_with_a_worker_has_no_fault(harness: Harness) -> None:
    """With a worker and no work there is nothing to report."""
    _present(harness)
    read = _source(harness).read()

    assert (judge(read), read.failed) == ((), {})
    assert [each.name for each in read.workers] == ["worker@host"]


def test_a_backlog_is_seen_by_priority_with_its_age(harness: Harness) -> None:
    """Due sessions are counted by priority. The age is that of the oldest turn, and an old backlog is a fault."""
    harness.send(user_id="ana")
    harness.move(100)
    harness.send(user_id="bob", priority=9)
    _present(harness)
    read = _source(harness).read()

    assert {priority: each.number for priority, each in read.due.items() if each.number} == {5: 1, 9: 1}
    assert read.due[5].oldest_s == pytest.approx(100, abs=5)
    assert _faults(read) == {"backlog": "warning"}
    samples = _samples(read)
    assert samples["perdure_sessions_due"]["5",] == 1
    assert samples["perdure_sessions_due_oldest_seconds"]["5",] == pytest.approx(100, abs=5)
    assert samples["perdure_turns_unsettled"]["assistant", "accepted"] == 2
    assert samples["perdure_turns_unsettled"]["assistant", "running"] == 0


def test_failed_turns_are_counted_by_their_codes_and_unknown_agents_share_a_label(harness: Harness) -> None:
    """Turns that failed within the last hour are counted. An agent that a sender invents makes no label."""
    harness.script(ProviderError("down", transient=False))
    harness.ask()
    harness.sql("UPDATE turns SET agent = 'invented' RETURNING 1")
    read = _source(harness).read()
    harness.move(4_000)

    assert _samples(read)["perdure_turns_failed_lately"] == {("other", "PROVIDER_ERROR"): 1}
    assert _source(harness).read().failures == []


class Carries(Carrier):
    """Raises `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        raise self.error


def test_deliveries_that_fail_are_seen(harness: Harness) -> None:
    """A reply that waits, and one that was abandoned, are counted apart."""
    _present(harness)
    for user, error in (("ana", DeliveryFailed("timeout")), ("bob", Undeliverable("410 Gone"))):
        harness.ask(user_id=user, reply_to=URL)
        (row,) = harness.sql("SELECT delivery_id FROM deliveries WHERE attempts = 0")
        deliver(harness.database, {"url": Carries(error)}, row.delivery_id)
    read = _source(harness).read()

    assert read.amounts["deliveries_pending"].number == read.amounts["deliveries_failing"].number == 1
    assert read.amounts["deliveries_failed"].number == read.amounts["deliveries_failed_lately"].number == 1
    assert _faults(read) == {"deliveries": "warning"}


def test_consolidations_that_fail_are_seen(harness: Harness) -> None:
    """A session whose extraction failed is counted until its next run begins."""
    _present(harness)
    harness.ask()
    harness.sql(
        "UPDATE sessions SET ended_at = perdure_now(), state = 'ended', routable = false, consolidation_attempts = 1,"
        " consolidation_error = 'UNKNOWN', consolidation_due_at = perdure_now() RETURNING 1"
    )
    failing = _source(harness).read()
    harness.sql("UPDATE sessions SET consolidation_due_at = NULL RETURNING 1")
    running = _source(harness).read()

    assert failing.amounts["consolidations_failing"].number == 1
    assert _faults(failing) == {"consolidation": "warning"}
    assert _samples(failing)["perdure_consolidations_failing"][()] == 1
    assert running.amounts["consolidations_failing"].number == 0
    assert running.amounts["consolidations_waiting"].number == 1


def test_sessions_that_wait_for_a_model_are_a_fault(harness: Harness) -> None:
    """While a provider is down and turns wait for it, no turn fails, so the sessions that wait are shown."""
    _present(harness)
    harness.send()
    harness.sql(
        "UPDATE sessions SET not_before = perdure_now() + interval '1 hour', paced = true, parked_for = 'offline'"
        " RETURNING 1"
    )
    (fault,) = judge(_source(harness).read())

    assert fault == Fault("models", "warning", "1 sessions wait for offline.")


def test_many_failed_turns_are_a_fault() -> None:
    """The most frequent error is named. A few failures, which the input may have caused, are no fault."""
    few, many = (Readings(failures=[Counted(("a", "TIMEOUT"), n), Counted(("b", "UNKNOWN"), 3)]) for n in (17, 18))

    assert "turns" not in _faults(few)
    assert Fault("turns", "warning", "21 turns of the last hour failed, 18 of a with TIMEOUT.") in judge(many)


def test_disks_that_are_nearly_full_are_seen(harness: Harness, tmp_path: Path) -> None:
    """The database is held against its capacity, and the disk of embedded servers against its own size."""
    size = harness.sql("SELECT pg_database_size(current_database()) AS bytes")[0].bytes
    set_up = {"database_capacity_gb": size / 0.95 / 1e9, "data_dir": tmp_path, "database_url": None}
    settings = harness.settings.model_copy(update=set_up)
    source = Source(harness.database, harness.clock, disks=lambda size: list(disk_states(settings, size)))
    database, data_dir = source.read().disks
    total = shutil.disk_usage(tmp_path).total

    assert database.name == "database"
    assert database.fill == pytest.approx(0.95, abs=0.01)
    assert (data_dir.name, data_dir.size_bytes) == ("data_dir", total)
    assert 0 < data_dir.used_bytes < total
    full = Readings(disks=[database, DiskState("data_dir", 95, 100), DiskState("data_dir", 85, 100)])
    found = [each.message for each in judge(full) if each.part == "disk"]
    assert len(found) == 2
    assert found[0].startswith("95 % of PERDURE_DATABASE_CAPACITY_GB")
    assert found[1] == "95 % of the disk of PERDURE_DATA_DIR, which has the embedded servers, are used."
    assert _samples(full)["perdure_disk_size_bytes"] == {("database",): database.size_bytes, ("data_dir",): 100}


@tool(requires_approval=True)
def pay() -> str:
    """Pay."""
    return "paid"


def test_approvals_and_the_reason_of_a_stuck_session_are_seen(harness: Harness) -> None:
    """A call that waits for a person is counted, and its session's reason says so."""
    harness.equip(pay)
    harness.script(calls(("pay", {})))
    session_id = harness.send().session_id
    harness.run(session_id)
    harness.move(100)
    source = _source(harness)
    read = source.read()

    assert read.amounts["approvals"].number == 1
    assert read.amounts["approvals"].oldest_s == pytest.approx(100, abs=5)
    (row,) = source.stuck(60, 10)
    assert "waits for a person" in explain(row, read).reason
    assert source.stuck(1_000, 10) == []


def test_stuck_sessions_say_who_holds_them(harness: Harness) -> None:
    """A held session names its worker, and an unclaimed one its wake-ups."""
    held, due = harness.send(user_id="ana").session_id, harness.send(user_id="bob").session_id
    harness.move(100)
    claim(harness.runtime, held, "host:1")
    source = _source(harness)
    read = source.read()
    reasons: dict[UUID, str] = {row.session_id: explain(row, read).reason for row in source.stuck(60, 10)}

    assert reasons[held].startswith("held by host:1 until")
    assert reasons[due].startswith("due, woken")
    harness.move(100)
    (expired,) = [row for row in source.stuck(60, 10) if row.session_id == held]
    assert "expired" in explain(expired, read).reason


def test_a_worker_that_stops_reporting_is_gone(harness: Harness) -> None:
    """Without a live worker of turns no message would be answered. Workers of other queues do not count."""
    _present(harness)
    harness.move(GONE_S + 1)
    _present(harness, queues=["memory"])
    read = _source(harness).read()

    assert read.workers == []
    assert _faults(read)["workers"] == "down" or "down" in {each.severity for each in judge(read)}
    assert any(re.search(r"was seen \d\d s ago", each.message) for each in judge(read) if each.severity == "down")
    assert _samples(read)["perdure_workers_of_turns"][()] == 0
    assert _samples(read)["perdure_processes_lost"] == {("worker",): 1, ("beat",): 0}


def test_a_dead_beat_is_seen_and_one_that_never_ran_is_no_fault(harness: Harness) -> None:
    """Beat is optional, so only a beat that ran before is missed."""
    worker = _present(harness)
    assert _faults(_source(harness).read()) == {}
    _present(harness, BEAT, queues=[])
    harness.move(GONE_S + 1)
    worker.report()
    read = _source(harness).read()

    assert _faults(read) == {"beat": "warning"}
    assert _samples(read)["perdure_beats"][()] == 0


def test_a_process_that_stops_says_so(harness: Harness) -> None:
    """A worker that shuts down is shown as stopped at once."""
    worker = _present(harness)
    worker._thread = threading.Thread(target=lambda: None)
    worker._thread.start()
    worker.stop()
    (found,) = _source(harness).read().processes

    assert (found.stopped, found.is_alive) == (True, False)


def test_a_clock_that_differs_is_seen(harness: Harness) -> None:
    """A worker reports how far its clock is from PostgreSQL's."""
    harness.database.run(
        queries.REPORT,
        {
            "process_id": UUID(int=1), "kind": WORKER, "name": "w", "owner": "h:1", "release": "1", "queues": ["turns"],
            "now": harness.clock.now().replace(year=2040),
        },
    )  # fmt: skip
    read = _source(harness).read()

    assert _faults(read) == {"clock": "warning"}


def test_a_late_sweep_and_a_closed_intake_are_seen(harness: Harness) -> None:
    """A sweep that no worker takes is late. While the intake is closed, no message is answered."""
    harness.sql("INSERT INTO sweeps (name, due_at) VALUES ('turns', perdure_now() - interval '5 minutes') RETURNING 1")
    harness.sql("INSERT INTO intake (name, closed_at) VALUES ('fleet', perdure_now()) RETURNING 1")
    _present(harness)

    assert _faults(_source(harness).read()) == {"intake": "down", "sweeper": "warning"}


@pytest.mark.long
def test_a_reading_that_fails_leaves_the_others(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing table fails its own reading, which is named."""
    harness.sql("ALTER TABLE processes RENAME TO gone")
    read = _source(harness).read()
    harness.sql("ALTER TABLE gone RENAME TO processes")

    assert list(read.failed) == ["processes"]
    assert read.server is not None
    assert _samples(read)["perdure_readings_failed"][()] == 1


def test_without_a_database_the_metrics_say_so(harness: Harness) -> None:
    """If PostgreSQL cannot be reached, one attempt is made, and the text is still valid."""
    nowhere = Source(Database("postgresql+psycopg2://x@127.0.0.1:1/x"), harness.clock)
    read = nowhere.read()

    assert list(read.failed) == ["server"]
    assert _samples(read)["perdure_database_up"][()] == 0
    assert judge(read)[0] == Fault("database", "down", "The database cannot be reached; please try again.")


def test_concurrent_callers_share_a_reading(harness: Harness) -> None:
    """Within `every_s` seconds, callers get the same readings."""
    read: list[Readings] = []

    def once() -> Readings:
        read.append(Readings())
        return read[-1]

    latest = Latest(once, harness.clock, 5)
    threads = [threading.Thread(target=latest) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 1
    harness.move(6)
    latest()
    assert len(read) == 2
