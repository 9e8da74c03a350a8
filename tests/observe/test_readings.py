"""The readings tell what waits, what failed and what runs, and each of them stands alone."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from sqlalchemy import create_engine, event

from perdure import tool
from perdure.database.engine import Database
from perdure.errors import ProviderError
from perdure.memory.import_export import export_messages, import_messages
from perdure.observe import queries
from perdure.observe.disks import DiskState, disk_states
from perdure.observe.exposition import Exposition
from perdure.observe.presence import BEAT, GONE_S, WORKER, Presence
from perdure.observe.readings import Counted, Latest, Readings, Source
from perdure.observe.servers import RedisState
from perdure.observe.status import Fault, Status, explain, judge
from perdure.schedules.entries import active_entries
from perdure.sessions.forking import fork
from perdure.turns.lease.claim import claim
from perdure.turns.outbox import Carrier, DeliveryFailed, Undeliverable, deliver, list_deliveries
from perdure.workers.celery_application import TASKS
from perdure.workers.observed import observed
from tests.databases import Databases, engine_of
from tests.turns.harness import Harness
from tests.turns.scripted import calls

URL = {"url": "https://example.com/hook"}


def _source(harness: Harness) -> Source:
    entries = list(active_entries(TASKS, harness.settings).values())
    return Source(harness.database, harness.clock, entries)


def _faults(read: Readings) -> dict[str, str]:
    return {each.part: each.severity for each in judge(read)}


def _present(harness: Harness, kind: str = WORKER, name: str = "", **given: Any) -> Presence:
    made = Presence(
        harness.database, harness.clock, kind, name or f"{kind}@host", **({"queues": lambda: ["turns"]} | given)
    )
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


def test_old_failures_with_new_ids_are_not_counted(harness: Harness) -> None:
    """A fork and an import give new ids to old turns. Failures of the fork itself count, and those of an hour once."""
    harness.script(ProviderError("down", transient=False))
    failed = harness.ask()
    exported = [json.dumps({**each, "user_id": "ben"}) for each in export_messages(harness.database)]
    forked = fork(harness.database, harness.clock, UUID(failed["session_id"]))
    assert [each.number for each in _source(harness).read().failures] == [1]
    harness.move(4_000)
    fork(harness.database, harness.clock, UUID(failed["session_id"]))
    [imported] = import_messages(harness.database, harness.clock, "assistant", exported)
    assert (imported.added, _source(harness).read().failures) == (2, [])
    harness.script(ProviderError("down", transient=False))
    sent = harness.send(session_id=forked)
    harness.run(sent.session_id)
    assert [each.number for each in _source(harness).read().failures] == [1]


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
    source = Source(
        harness.database, harness.clock, disks=lambda size: list(disk_states(settings, size, embedded=True))
    )
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


def test_the_disk_of_embedded_servers_is_seen_by_processes_that_are_given_the_url(
    harness: Harness, tmp_path: Path
) -> None:
    """`perdure up` gives its processes the URL of the embedded PostgreSQL. Another server's disk is elsewhere."""
    home = tmp_path / "postgres"
    home.mkdir()
    (home / "socket-directory").write_text("/run/perdure-1\n", encoding="utf-8")
    seen = {}
    for host in ("/run/perdure-1", "/run/postgresql"):
        url = SecretStr(f"postgresql+psycopg2://perdure@/perdure?host={host}")
        settings = harness.settings.model_copy(update={"data_dir": tmp_path, "database_url": url})
        servers = {"breakers": None, "redis_url": None, "broker_url": None, "broker_reachable": None}
        source = observed(settings, harness.database, harness.clock, **servers)
        seen[host] = [each.name for each in source.read().disks]
        source.close()
    assert seen == {"/run/perdure-1": ["data_dir"], "/run/postgresql": []}


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
    _present(harness, queues=lambda: ["memory"])
    read = _source(harness).read()

    assert read.workers == []
    assert _faults(read)["workers"] == "down" or "down" in {each.severity for each in judge(read)}
    assert any(re.search(r"was seen \d\d s ago", each.message) for each in judge(read) if each.severity == "down")
    assert _samples(read)["perdure_workers_of_turns"][()] == 0
    assert _samples(read)["perdure_processes_lost"] == {("worker",): 1, ("beat",): 0}


def test_a_worker_that_consumes_turns_no_more_is_not_one_of_turns(harness: Harness) -> None:
    """Each report has the queues of that moment: an operator may cancel a queue at a worker."""
    queues = ["turns", "memory"]
    worker = _present(harness, queues=lambda: queues)
    queues.remove("turns")
    worker.report()
    read = _source(harness).read()

    assert [each.queues for each in read.processes] == [["memory"]]
    assert (read.workers, _faults(read)["workers"]) == ([], "down")


def test_a_dead_beat_is_seen_and_one_that_never_ran_is_no_fault(harness: Harness) -> None:
    """Beat is optional, so only a beat that ran before is missed."""
    worker = _present(harness)
    assert _faults(_source(harness).read()) == {}
    _present(harness, BEAT, queues=list)
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
            "now": harness.clock.now().replace(year=2040), "quiet": False,
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


def test_deliveries_count_from_when_they_are_abandoned(harness: Harness) -> None:
    """Twelve attempts take hours. What was abandoned within the last hour counts, however old the reply is."""
    harness.ask(reply_to=URL)
    (row,) = harness.sql("SELECT delivery_id FROM deliveries")
    harness.move(10_000)
    deliver(harness.database, {"url": Carries(Undeliverable("410 Gone"))}, row.delivery_id)
    abandoned = _source(harness).read()
    harness.move(3_700)
    later = _source(harness).read()

    assert "abandoned within the last hour" in " ".join(each.message for each in judge(abandoned))
    assert _samples(abandoned)["perdure_deliveries_failed_lately"][()] == 1
    assert _samples(abandoned)["perdure_deliveries_failed_oldest_seconds"][()] == pytest.approx(10_000, abs=5)
    assert later.amounts["deliveries_failed_lately"].number == 0
    assert later.amounts["deliveries_failed"].number == 1


def test_abandoned_deliveries_are_listed_by_the_time_of_their_failure(harness: Harness) -> None:
    """The reply that was abandoned last is the first of the list, though it is the older one."""
    found = []
    for user in ("ana", "bob"):
        harness.ask(user_id=user, reply_to=URL)
        (row,) = harness.sql("SELECT delivery_id FROM deliveries WHERE user_id = %(user)s", user=user)
        found.append(row.delivery_id)
        harness.move(10)
    for delivery_id in reversed(found):
        deliver(harness.database, {"url": Carries(Undeliverable("410 Gone"))}, delivery_id)
        harness.move(10)

    listed = list_deliveries(harness.database, status="failed")
    assert [each["delivery_id"] for each in listed] == [str(each) for each in found]


@contextmanager
def _demoted(database: Database) -> Iterator[None]:
    """The server accepts no writes within the block, as a primary does that has become a standby."""

    def demote(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")
        connection.commit()

    event.listen(database.engine, "connect", demote)
    database.engine.dispose()
    try:
        yield
    finally:
        event.remove(database.engine, "connect", demote)


def test_a_database_that_refuses_writes_is_down(harness: Harness) -> None:
    """A standby answers all readings, and accepts no message. After the failover, the next reading succeeds."""
    _present(harness)
    source = _source(harness)
    with _demoted(harness.database):
        read = source.read()

    assert _faults(read) == {"database": "down"}
    assert judge(read)[0].message == "The database accepts no writes at present; please try again."
    assert _samples(read)["perdure_database_up"][()] == 0
    assert judge(source.read()) == ()
    assert _samples(source.read())["perdure_database_up"][()] == 1


_OF_PROCESSES = (
    "perdure_workers", "perdure_workers_of_turns", "perdure_beats", "perdure_processes_lost",
    "perdure_clock_skew_seconds",
)  # fmt: skip


@pytest.mark.parametrize(
    ("failed", "missing"),
    [
        ("server", (*_OF_PROCESSES, "perdure_turns_unsettled", "perdure_sessions_parked", "perdure_breakers")),
        ("processes", _OF_PROCESSES),
        ("unsettled", ("perdure_turns_unsettled",)),
        ("parked", ("perdure_sessions_parked",)),
        ("breakers", ("perdure_breakers",)),
    ],
)
def test_what_was_not_read_has_no_series(failed: str, missing: tuple[str, ...]) -> None:
    """An alert on 0 workers must not fire because the workers cannot be read."""
    read, unread = Readings(), Readings(failed={failed: "The database is busy."})

    assert [name for name in missing if name not in _samples(read)] == []
    assert [name for name in missing if name in _samples(unread)] == []
    assert ("workers" in _faults(unread)) == (failed not in {"server", "processes"})


def test_silence_in_an_outage_is_no_loss(harness: Harness) -> None:
    """While PostgreSQL is unavailable, no process can report. Afterwards, each has the usual time to report again."""
    dead = _present(harness, name="dead@host")
    harness.move(GONE_S + 1)
    worker = _present(harness)
    source = _source(harness)
    assert [each.name for each in source.read().lost] == ["dead@host"]
    with _demoted(harness.database):
        source.read()
        harness.move(600)
        source.read()
    after = source.read()
    harness.move(GONE_S + 1)
    gone = source.read()
    worker.report()
    back = source.read()

    assert ([each.name for each in after.workers], [each.name for each in after.lost]) == (["worker@host"], [dead.name])
    assert [each.name for each in gone.lost] == ["dead@host", "worker@host"]
    assert [each.name for each in back.workers] == ["worker@host"]


def test_a_lock_is_no_open_transaction(harness: Harness, database_url: str) -> None:
    """A process that holds a lock is idle in a transaction that keeps no dead row. One with a snapshot does."""
    engine = create_engine(database_url, isolation_level="REPEATABLE READ")
    with harness.database.lock("channels") as is_held:
        assert is_held
        idle = _source(harness).read().server
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
            harmful = _source(harness).read().server
    engine.dispose()

    assert idle is not None
    assert harmful is not None
    assert (idle.oldest_transaction_s, harmful.oldest_transaction_s > 0) == (0, True)


def test_connections_to_all_databases_count(harness: Harness, databases: Databases, granted: Database) -> None:
    """max_connections is the server's, and a role without rights sees the number of all connections, too."""
    with databases.empty() as elsewhere, ExitStack() as stack:
        engine = engine_of(elsewhere)
        for _ in range(5):
            stack.enter_context(engine.connect()).exec_driver_sql("SELECT 1")
        (own,) = harness.sql(
            "SELECT count(*) AS number FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend'"
        )
        read = [Source(each, harness.clock).read().server for each in (harness.database, granted)]
        stack.close()
        engine.dispose()

    assert all(each is not None and each.connections >= own.number + 5 for each in read)


@pytest.mark.parametrize("redis", [[], [RedisState("redis", None)]])
def test_a_broker_that_cannot_be_reached_is_down(harness: Harness, redis: list[RedisState]) -> None:
    """Also RabbitMQ, of which there are no other readings."""
    _present(harness)
    broken, works = (
        replace(Source(harness.database, harness.clock, broker_reachable=partial(bool, up)).read(), redis=redis)
        for up in (False, True)
    )

    assert judge(broken) == (Fault("broker", "down", "The broker cannot be reached."),)
    assert judge(works) == ()
    assert [_samples(each)["perdure_broker_up"][()] for each in (broken, works)] == [0, 1]
    assert Status(broken, judge(broken)).to_dict()["broker"] == {"fault": "The broker cannot be reached."}
    twice = replace(broken, redis=[RedisState("broker", "The broker cannot be reached.")])
    assert len(judge(twice)) == 1


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
    database = judge(read)[0]
    assert (database.part, database.severity) == ("database", "down")
    assert re.fullmatch(r"The database cannot be reached; .* \(connection to .* refused\)", database.message)


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
