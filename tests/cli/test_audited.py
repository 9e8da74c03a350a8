"""Operators' commands are recorded: each command that changes something declares its action."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from perdure import audit
from perdure.access.tenants import UserKey
from perdure.cli import COMMANDS, load
from perdure.database.engine import Database
from perdure.runtime import Runtime
from perdure.timetable import reminders
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import parse_incoming
from tests.cli.conftest import Perdure

UNRECORDED = {
    "up", "demo", "migrate", "gateway", "worker", "beat", "flower", "channels", "completion",
    "doctor", "status", "usage", "approvals list", "breakers list", "deliveries list", "schedules list",
    "sessions list", "sessions show", "sessions export", "sessions snapshot export",
    "turns list", "turns show", "turns prompt", "turns export", "turns replay", "messages export",
    "memory search", "memory list", "memory show", "memory export",
    "cases export", "cases list", "cases show", "cases search", "cases runs show", "cases runs",
    "certify", "chat", "send", "memory decay", "cases reflect",
}  # fmt: skip
"""Commands that serve, that read, that speak as a user, or that do what beat does by itself."""


def _commands() -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [(name, typer.main.get_command(load(name)).commands[name]) for name in COMMANDS]  # type: ignore[attr-defined]
    for words, command in waiting:
        if hasattr(command, "commands"):
            waiting += [(f"{words} {name}", each) for name, each in command.commands.items()]
        if not hasattr(command, "commands") or words == "cases runs":
            yield words, command.callback


def test_each_command_that_changes_something_is_recorded() -> None:
    """A new command must declare its action, or be named above."""
    recorded = {words for words, callback in _commands() if hasattr(callback.__wrapped__, "audited")}
    known = {words for words, _ in _commands()}
    assert known - recorded == UNRECORDED
    assert len(recorded) > 20


def test_a_command_is_recorded(perdure: Perdure, runtime: Runtime, database: Database) -> None:
    """The record has who ran the command where, its target and user, and how it ended. A dry run leaves none."""
    ids = accept.accept(runtime, parse_incoming({"user_id": "ann", "text": "a secret"}))
    assert perdure("turns", "cancel", "--user", "ann", "--dry-run").returncode == 0
    assert perdure("pause").returncode == 0
    assert audit.list_actions(database, 10) == []
    for arguments in (
        ("turns", "cancel", str(ids.turn_id)),
        ("pause", "--user", "ann", "--agent", "assistant"),
        ("schedules", "add", "a secret", "--user", "ann", "--cron", "0 7 * * *"),
    ):
        assert perdure(*arguments).returncode == 0, arguments
    assert perdure("breakers", "reset", "llm:none").returncode == 1
    reset, added, paused, cancelled = audit.list_actions(database, 10)
    members = ("via", "action", "target", "user_id", "note", "outcome")
    assert [cancelled[each] for each in members] == ["command", "turns.cancel", str(ids.turn_id), "ann", None, "done"]
    assert [paused[each] for each in members] == ["command", "pauses.begin", None, "ann", "agent assistant", "done"]
    made = reminders.list_reminders(database, UserKey("ann"))[0]["schedule_id"]
    assert [added[each] for each in members] == ["command", "schedules.add", None, "ann", made, "done"]
    assert [reset[each] for each in members] == ["command", "breakers.reset", "llm:none", None, None, "NOT_FOUND"]
    assert "@" in cancelled["actor"]
    assert "a secret" not in str([reset, added, paused, cancelled])


def test_a_link_is_recorded(perdure: Perdure, database: Database) -> None:
    """Who may link an account to a user may write as this user. The code is not recorded, and a list is no change."""
    code = perdure("link", "--user", "ann").stdout.split()[1]
    assert perdure("link", "--user", "ann", "--list").returncode == 0
    assert perdure("link", "--user", "ann", "--remove", "telegram:77").returncode == 1
    removed, minted = audit.list_actions(database, 10)
    members = ("via", "action", "user_id", "note", "outcome")
    assert [minted[each] for each in members] == ["command", "links.mint", "ann", None, "done"]
    assert [removed[each] for each in members] == ["command", "links.mint", "ann", "remove telegram:77", "Failure"]
    assert code not in str([removed, minted])


def test_an_import_that_is_partly_refused_is_recorded_so(perdure: Perdure, database: Database) -> None:
    """The outcome is that of the command, not `done`. The note has the counts, and none of the lines' text."""
    line = {"user_id": "ann", "session": "s", "message_id": "1", "role": "user", "content": "a secret"}
    lines = "\n".join([json.dumps({**line, "occurred_at": "2026-01-01T00:00:00Z"}), '{"a secret": 1}'])
    case = {"case_id": "c", "query": "a secret", "response_text": "no", "usage_count": 0, "success_rate": 0}
    for command, given in (("messages", lines), ("cases", f'{json.dumps(case)}\n{{"a secret": 1}}')):
        assert perdure(command, "import", "-", stdin=given).returncode == 1
    cases, messages = audit.list_actions(database, 10)
    assert (messages["outcome"], messages["note"]) == ("Failure", "1 added, 0 known, 1 refused")
    assert (cases["outcome"], cases["note"]) == ("Failure", "1 added, 0 unchanged, 1 refused")
    assert "a secret" not in str([cases, messages])


@pytest.mark.parametrize("everything", [True, False])
def test_an_erasure_by_command_is_recorded_without_the_user(
    perdure: Perdure, database: Database, *, everything: bool
) -> None:
    """An erasure would erase a record that names the user; forgetting one memory is recorded with the user."""
    given = ["--all"] if everything else ["01931e6f-5d6a-7c3e-9f64-6f1a3f0f2b11"]
    done = perdure("memory", "forget", *given, "--user", "ann")
    [record] = audit.list_actions(database, 10)
    assert (record["action"], record["user_id"]) == ("memories.forget", None if everything else "ann")
    assert (done.returncode, record["outcome"]) == ((0, "done") if everything else (1, "Failure"))
