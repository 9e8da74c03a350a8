"""The commands for sessions and schedules. Some tests run a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.database.engine import Database
from perdure.runtime import Runtime
from perdure.sessions.reading import list_sessions, read_messages, read_session
from perdure.snapshots.exchange import read
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Environment, Perdure
from tests.databases import Databases
from tests.turns.harness import until


@pytest.mark.long
@pytest.mark.usefixtures("working")
def test_leaving_a_chat_ends_its_session(perdure: Perdure, database: Database) -> None:
    """After the user leaves a chat, a worker ends and summarises its session. The next chat begins another session."""
    assert perdure("chat", stdin="what is 12*7+5?\n").stdout.strip().endswith("89.")
    until(lambda: [each["state"] for each in list_sessions(database)] == ["ended"], "the end of the conversation")
    ended = list_sessions(database)[0]
    assert ended["summary"]
    assert ended["key_topics"] is not None
    assert perdure("chat", stdin="hello\n").returncode == 0
    until(lambda: [each["state"] for each in list_sessions(database)] == ["ended", "ended"], "the end of the second")


@pytest.mark.long
@pytest.mark.usefixtures("working")
def test_a_session_is_ended_by_its_id(perdure: Perdure, database: Database) -> None:
    """`sessions end` ends a session and exits with 0. If the session is unknown or has ended, the status is 1."""
    assert perdure("send", "hello", "--wait", "30").returncode == 0
    session_id = list_sessions(database)[0]["session_id"]
    assert perdure("sessions", "end", session_id).returncode == 0
    until(lambda: list_sessions(database)[0]["state"] == "ended", "the end")
    again = perdure("sessions", "end", session_id)
    assert (again.returncode, "ended already" in again.stderr) == (1, True)
    assert perdure("sessions", "end", str(uuid4())).returncode == 1


def test_a_sessions_conversation_is_listed(perdure: Perdure) -> None:
    """`sessions list` shows each session's conversation.

    For a session without a conversation, the table shows a dash, and the JSON has `null`.
    """
    assert perdure("send", "hello", "--conversation", "trip").returncode == 0
    assert perdure("send", "hello").returncode == 0
    lines = perdure("sessions", "list").stdout.splitlines()
    assert [line.split("\t")[-1] for line in lines] == ["-", "trip"]
    listed = json.loads(perdure("sessions", "list", "--json").stdout)
    assert [each["conversation"] for each in listed] == [None, "trip"]


def test_schedules_are_listed(perdure: Perdure) -> None:
    """`schedules list` shows each entry whose task is registered and whose feature is enabled."""
    listed = json.loads(perdure("schedules", "list", "--json").stdout)
    six_hourly = "daily at 00:00, 06:00, 12:00 and 18:00 UTC"
    assert {(each["entry"], each["task"], each["schedule"]) for each in listed} == {
        ("expire_idle", "sessions.expire_idle", "each minute"),
        ("consolidate", "memory.consolidate", six_hourly),
        ("decay", "memory.decay", six_hourly),
        ("refresh_hot", "memory.refresh_hot", six_hourly),
        ("prune", "casebank.prune", "Sundays at 02:00 UTC"),
        ("reflect", "casebank.reflect", "daily at 03:30 UTC"),
        ("advance", "casebank.advance", "each minute"),
        ("count_uses", "casebank.count", "each minute"),
        ("retain", "maintenance.retain", "daily at 04:30 UTC"),
    }
    assert "expire_idle\teach minute\t" in perdure("schedules", "list").stdout


def test_the_next_runs_are_listed(perdure: Perdure) -> None:
    """`schedules list --next N` lists the next N runs of each entry, in its zone and with the offset from UTC."""
    made = perdure("schedules", "add", "Rise.", "--cron", "*/15 2 25 10 *", "--timezone", "Europe/Paris", "--json")
    schedule_id = json.loads(made.stdout)["schedule_id"]
    lines = [line.split("\t") for line in perdure("schedules", "list", "--next", "3").stdout.splitlines()]
    assert [entry for entry, *_ in lines].count("prune") == 3
    runs = [run for entry, _, run in lines if entry == schedule_id]
    assert [run[4:19] for run in runs] == ["-10-25T02:00:00", "-10-25T02:15:00", "-10-25T02:30:00"]
    listed = json.loads(perdure("schedules", "list", "--next", "3", "--json").stdout)
    assert {each["entry"]: each["runs"] for each in listed}[schedule_id] == runs


@pytest.fixture
def talked(runtime: Runtime) -> str:
    """The id of a session with two turns, at tick 2."""
    runner = Runner(runtime, owner="test")
    for text in ("hello", "hello again"):
        found = accept(runtime, Incoming(user=UserKey("local"), text=text, channel="cli")).session_id
        runner.run(found)
    runner.close()
    return str(found)


@pytest.mark.long
def test_messages_are_sent_to_a_fork(perdure: Perdure, database: Database, talked: str) -> None:
    """`send --session` accepts the id that `sessions fork` prints. A fork with a wrong tick or id is an error."""
    forked = json.loads(perdure("sessions", "fork", talked, "--tick", "1", "--json").stdout)
    plain = perdure("sessions", "fork", talked)
    assert [each["content"] for each in read_messages(database, UUID(forked["session_id"]))][:1] == ["hello"]
    assert read_session(database, UUID(plain.stdout.split()[1]))["turn_count"] == 2
    sent = perdure("send", "and now?", "--session", forked["session_id"], "--json")
    assert json.loads(sent.stdout)["session_id"] == forked["session_id"]

    before = len(list_sessions(database))
    for arguments, status, says in (
        ((talked, "--tick", "3"), 1, "tick 3"),
        ((talked, "--tick", "-1"), 2, "--tick"),
        (("none",), 2, "none"),
    ):
        refused = perdure("sessions", "fork", *arguments)
        assert (refused.returncode, refused.stdout) == (status, "")
        assert says in refused.stderr
    assert len(list_sessions(database)) == before


@pytest.mark.long
def test_a_snapshot_is_exported_edited_and_imported(
    perdure: Perdure, database: Database, talked: str, tmp_path: Path
) -> None:
    """An exported snapshot can be edited and imported. `sessions show --snapshot` displays the changes."""
    file = tmp_path / "kept" / "snapshot.json"
    file.parent.mkdir()
    file.write_text("what was there")
    assert perdure("sessions", "snapshot", "export", talked, str(file)).returncode == 0
    document = json.loads(file.read_text())
    assert json.loads(perdure("sessions", "snapshot", "export", talked).stdout) == document
    assert (document["agent_id"], document["tick_index"], document["memory"]["working_variables"]) == (talked, 2, {})
    assert [*file.parent.iterdir()] == [file]

    document["memory"]["working_variables"] = {"name": "Ana"}
    file.write_text(json.dumps(document))
    assert perdure("sessions", "snapshot", "import", str(file), "--session", talked).returncode == 0
    assert perdure("sessions", "snapshot", "import", "-", stdin=file.read_text()).returncode == 0
    shown = json.loads(perdure("sessions", "show", talked, "--snapshot", "--json").stdout)
    assert shown["snapshot"]["memory"]["working_variables"] == {"name": "Ana"}
    assert len(shown["messages"]) == 4
    assert 'working_variables\t{"name": "Ana"}' in perdure("sessions", "show", talked, "--snapshot").stdout


@pytest.mark.long
def test_a_bad_snapshot_is_refused_and_nothing_is_changed(perdure: Perdure, database: Database, talked: str) -> None:
    """A snapshot that is truncated, or has the wrong version, session or tick, is refused and changes nothing."""
    text = perdure("sessions", "snapshot", "export", talked).stdout
    good: dict[str, Any] = json.loads(text)
    before = read(database, UUID(talked))
    cases: list[tuple[str, tuple[str, ...], int, str]] = [
        (text[: len(text) // 2], (), 2, "cannot be read"),
        (json.dumps({**good, "schema_version": 2}), (), 2, "schema version 2"),
        (text, ("--session", str(uuid4())), 2, "not of"),
        (json.dumps({**good, "tick_index": 1}), (), 1, "tick 1"),
    ]
    for content, options, status, says in cases:
        refused = perdure("sessions", "snapshot", "import", "-", *options, stdin=content)
        assert (refused.returncode, refused.stdout) == (status, ""), refused.stderr
        assert says in refused.stderr
    assert read(database, UUID(talked)) == before


def test_an_export_that_cannot_be_written_leaves_nothing_behind(perdure: Perdure, talked: str, tmp_path: Path) -> None:
    """An export to a directory, or of an unknown session, fails and leaves no file."""
    kept = tmp_path / "kept"
    kept.mkdir()
    refused = perdure("sessions", "snapshot", "export", talked, str(kept))
    assert (refused.returncode, "cannot be written" in refused.stderr) == (1, True)
    unknown = perdure("sessions", "snapshot", "export", str(uuid4()), str(kept / "x.json"))
    assert (unknown.returncode, "no such session" in unknown.stderr) == (1, True)
    assert [*kept.iterdir()] == []


@pytest.mark.long
@pytest.mark.usefixtures("working")
def test_queued_messages_move_to_another_installation(
    perdure: Perdure, environment: Environment, databases: Databases, database: Database, tmp_path: Path
) -> None:
    """A snapshot moves queued messages to another installation. A second import does not repeat the answers."""
    file = tmp_path / "snapshot.json"
    with databases.one(warm=False) as (elsewhere, _):
        source = {**environment, "PERDURE_DATABASE_URL": elsewhere.render_as_string(hide_password=False)}
        del source["PERDURE_REDIS_URL"]
        for number, text in enumerate(("one", "two", "three")):
            sent = perdure("send", text, "--message-id", f"m{number}", "--json", env=source)
            session_id = json.loads(sent.stdout)["session_id"]
        assert perdure("sessions", "snapshot", "export", session_id, str(file), env=source).returncode == 0
    assert len(json.loads(file.read_text())["event_queue_backup"]) == 3
    imported = perdure("sessions", "snapshot", "import", str(file))
    assert (imported.returncode, "3 accepted, 0 accepted before" in imported.stderr) == (0, True), imported.stderr
    until(lambda: _replies(database, session_id) == 3, "the worker answers")
    again = perdure("sessions", "snapshot", "import", str(file))
    assert (again.returncode, "0 accepted, 3 accepted before" in again.stderr) == (0, True), again.stderr
    assert perdure("send", "four", "--session", session_id, "--wait", "20").returncode == 0
    said = read_messages(database, UUID(session_id))
    assert [each["content"] for each in said if each["role"] == "user"] == ["one", "two", "three", "four"]
    assert _replies(database, session_id) == 4


def _replies(database: Database, session_id: str) -> int:
    return sum(each["role"] == "assistant" for each in read_messages(database, UUID(session_id)))
