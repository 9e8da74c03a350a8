"""`perdure messages` and `perdure memory`, run in the test's process unless a test needs a separate one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner, Result

from perdure.access.tenants import UserKey
from perdure.cli import connecting, load
from perdure.cli.errors import Failure
from perdure.database.engine import Statement
from perdure.errors import Conflict
from perdure.memory import owned
from perdure.runtime import Runtime
from perdure.sessions.reading import list_sessions
from tests.cli.conftest import Perdure
from tests.memory.remembering import add_memory
from tests.memory.test_other_chats import CLAUDE

Command = Callable[..., Result]

LINES = [
    {
        "user_id": user,
        "session": "holiday",
        "message_id": f"{user} {number}",
        "role": "user" if number % 2 else "assistant",
        "content": f"{user} says {text}",
        "occurred_at": f"2026-03-0{number}T10:00:00+00:00",
    }
    for user in ("ann", "bob")
    for number, text in enumerate(["we went to Lyon", "how was it?", "the quenelles were good"], start=1)
]


@pytest.fixture
def command(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A function that runs a command in the test's process, with the test's runtime."""

    @contextmanager
    def whole() -> Iterator[Runtime]:
        yield runtime

    @contextmanager
    def database() -> Iterator[Any]:
        yield runtime.database

    monkeypatch.setattr(connecting, "runtime", whole)
    monkeypatch.setattr(connecting, "accepting_runtime", whole)

    @contextmanager
    def opened() -> Iterator[Any]:
        yield runtime.settings, runtime.database

    monkeypatch.setattr(connecting, "database", database)
    monkeypatch.setattr(connecting, "opened", opened)
    return lambda *arguments, stdin="": CliRunner().invoke(load(arguments[0]), [*arguments], input=stdin)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of an import file with two users' conversations."""
    made = tmp_path / "said.jsonl"
    made.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return made


def _found(command: Command, query: str, user: str = "ann") -> list[str]:
    result = command("memory", "search", query, "--user", user, "--json")
    assert result.exit_code == 0, result.stderr
    return [each["id"] for each in json.loads(result.stdout)["results"]]


def test_a_file_is_imported_found_and_exported(command: Command, file: Path, runtime: Runtime, tmp_path: Path) -> None:
    """Imported sessions are ended and searchable. A repeated import adds nothing. An export has the messages."""
    done = json.loads(command("messages", "import", str(file), "--json").stdout)
    assert done == {"added": 6, "known": 0, "refused": 0, "sessions": 2, "bad": []}
    assert {each["state"] for each in list_sessions(runtime.database)} == {"ended"}
    assert _found(command, "quenelles")[0] == "ann 3"
    with runtime.database.engine.connect() as connection:
        vectors = connection.exec_driver_sql("SELECT count(*) FROM message_vectors").scalar_one()
    assert vectors == 6

    again = json.loads(command("messages", "import", "-", "--json", stdin=file.read_text()).stdout)
    assert (again["added"], again["known"]) == (0, 6)
    out = tmp_path / "out.jsonl"
    assert command("messages", "export", str(out), "--user", "ann").exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["content"] for line in lines] == [line["content"] for line in LINES[:3]]
    assert len(command("messages", "export").stdout.splitlines()) == 6


def test_bad_lines_are_reported_and_good_ones_imported(command: Command, runtime: Runtime) -> None:
    """An import prints the number and the fault of each bad line, and imports the others. The status is not 0."""
    text = "\n".join(["{", json.dumps(LINES[0]), json.dumps({**LINES[1], "role": "system"})])
    result = command("messages", "import", "-", "--json", stdin=text)
    assert isinstance(result.exception, Failure)
    done = json.loads(result.stdout)
    assert (done["added"], done["refused"]) == (1, 2)
    assert [each["line"] for each in done["bad"]] == [1, 3]
    assert "line 3: " in result.stderr
    assert "role" in result.stderr


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_order_mark_and_line_ends_of_windows_are_read(command: Command, tmp_path: Path, ending: str) -> None:
    """Editors and shells of Windows write them."""
    file = tmp_path / "said.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + ending.join(json.dumps(line) for line in LINES).encode())
    assert json.loads(command("messages", "import", str(file), "--json").stdout)["added"] == 6


def test_an_export_of_another_chat_is_imported(command: Command, tmp_path: Path, runtime: Runtime) -> None:
    """`--from` names the chat. Without it, the command says that the file needs it."""
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([CLAUDE, {}]))
    told = command("messages", "import", str(file))
    assert isinstance(told.exception, Failure)
    assert "--from claude" in str(told.exception)
    result = command("messages", "import", str(file), "--from", "claude", "--user", "ann", "--json")
    done = json.loads(result.stdout)
    assert (done["added"], done["refused"], done["other_branches"]) == (2, 1, 1)
    assert "message 3: conversation 2 is not one of claude's" in result.stderr
    assert [each["user_id"] for each in list_sessions(runtime.database)] == ["ann"]
    assert _found(command, "New answer")[0] == "m3"


def test_a_user_is_exported_and_forgotten(command: Command, file: Path, tmp_path: Path) -> None:
    """`memory forget` erases a user only with both `--user` and `--all`. Other users' data stays."""
    command("messages", "import", str(file))
    out = tmp_path / "ann.json"
    assert command("memory", "export", "--user", "ann", str(out)).exit_code == 0
    assert len(json.loads(out.read_text())["tables"]["messages"]) == 3
    for arguments in (("--all",), ("--user", "ann"), ("--user", "ann", "--all", "an id")):
        refused = command("memory", "forget", *arguments)
        assert isinstance(refused.exception, Failure)
        assert refused.exception.status == 2
    assert len(_found(command, "Lyon")) == 3
    erased = json.loads(command("memory", "forget", "--user", "ann", "--all", "--json").stdout)
    assert (erased["user_id"], erased["rows"]["messages"]) == ("ann", 3)
    assert _found(command, "Lyon") == []
    assert len(_found(command, "Lyon", "bob")) == 3


def test_memories_are_consolidated_decayed_and_forgotten(command: Command, runtime: Runtime) -> None:
    """`memory consolidate` and `memory decay` print counts. `memory forget` deletes a memory by its id."""
    said = [
        {**LINES[0], "session": "long", "message_id": str(n), "role": role, "content": content}
        for n, (role, content) in enumerate(
            [
                ("user", f"My brother number {n} is called Ivo {n}.") if n % 2 else ("assistant", "Good to know.")
                for n in range(1, 13)
            ]
        )
    ]
    command("messages", "import", "-", stdin="".join(json.dumps(line) + "\n" for line in said))
    counts = json.loads(command("memory", "consolidate", "--json").stdout)
    assert (counts["processed"], counts["failed"]) == (1, 0)
    with runtime.database.engine.connect() as connection:
        stored = [str(row[0]) for row in connection.exec_driver_sql("SELECT memory_id FROM memories")]
    assert len(stored) == counts["stored"]
    decayed = json.loads(command("memory", "decay", "--json").stdout)
    assert decayed["looked_at"] == len(stored)
    for memory_id in stored:
        assert command("memory", "forget", memory_id, "--user", "ann").exit_code == 0
        assert isinstance(command("memory", "forget", memory_id, "--user", "ann").exception, Failure)
    session = list_sessions(runtime.database)[0]["session_id"]
    nothing = command("memory", "consolidate", "--session", session)
    assert isinstance(nothing.exception, Failure)
    assert "Nothing to do" in str(nothing.exception)


def test_memories_are_listed_shown_and_corrected(command: Command, runtime: Runtime, file: Path) -> None:
    """`memory list`, `show` and `correct` act on the memories of one user, and say which message a memory is from."""
    command("messages", "import", str(file))
    boat, home = (add_memory(runtime, UserKey("ann"), text) for text in ("Ann owns a boat.", "The user lives in Lyon."))
    runtime.database.run(
        Statement(
            "tests.source",
            "INSERT INTO memory_sources SELECT %(id)s, session_id, seq FROM messages WHERE message_id = 'ann 1'",
        ),
        {"id": home},
    )

    def listed(*more: str) -> list[str]:
        return [each["id"] for each in json.loads(command("memory", "list", "--user", "ann", "--json", *more).stdout)]

    assert listed() == [home, boat]
    assert listed("--limit", "1") == [home]
    assert listed("--after", home) == [boat]
    assert [line.split("\t")[0] for line in command("memory", "list", "--user", "ann").stdout.splitlines()] == [
        home,
        boat,
    ]
    shown = json.loads(command("memory", "show", home, "--user", "ann", "--json").stdout)
    assert [(each["message_id"], each["text"]) for each in shown["sources"]] == [("ann 1", "ann says we went to Lyon")]
    assert "ann says we went to Lyon" in command("memory", "show", home, "--user", "ann").stdout
    right = json.loads(command("memory", "correct", home, "I live in Nice.", "--user", "ann", "--json").stdout)
    assert (right["content"], right["message_ids"]) == ("I live in Nice.", ["ann 1"])
    assert "I live in Nice." in command("memory", "correct", right["id"], "I live in Nice.", "--user", "ann").stdout
    found = command("memory", "search", "Where does the user live?", "--user", "ann", "--layer", "semantic").stdout
    ended = owned.read_memory(runtime.database, UUID(home))["valid_until"]
    shown = {columns[4]: columns[3] for columns in (line.split("\t") for line in found.splitlines())}
    assert (shown["The user lives in Lyon."], shown["I live in Nice."]) == (ended, "-")
    for arguments in (("show", home), ("correct", home, "It is mine."), ("show", str(uuid4()))):
        refused = command("memory", *arguments, "--user", "bob")
        assert isinstance(refused.exception, Failure)
        assert "'bob' has no memory" in str(refused.exception)
    assert isinstance(command("memory", "correct", home, "I live in Rome.", "--user", "ann").exception, Conflict)
    empty = command("memory", "correct", boat, " ", "--user", "ann").exception
    assert isinstance(empty, Failure)
    assert empty.status == 2


def _abandon(runtime: Runtime, session: str, user: str = "ann") -> None:
    """Mark the consolidation of the session as abandoned."""
    with runtime.database.engine.connect() as connection:
        connection.exec_driver_sql(
            "UPDATE sessions SET consolidation_attempts = 5, consolidation_given_up_at = perdure_now(),"
            " consolidation_error = 'INVALID_RESPONSE: not valid JSON' WHERE user_id = %s AND imported_as = %s",
            (user, session),
        )


def test_abandoned_consolidations_are_shown_and_retried(command: Command, file: Path, runtime: Runtime) -> None:
    """`sessions list` shows abandoned consolidations. `memory consolidate` retries one or all of them."""
    command("messages", "import", str(file))
    for user in ("ann", "bob"):
        _abandon(runtime, "holiday", user)
    everything = command("sessions", "list", "--json")
    assert [each["consolidation"]["status"] for each in json.loads(everything.stdout)] == ["given_up"] * 2
    assert everything.stderr.startswith("The consolidation of 2 sessions was abandoned")
    [listed] = json.loads(command("sessions", "list", "--given-up", "--user", "ann", "--json").stdout)
    assert "INVALID_RESPONSE: not valid JSON" in command("sessions", "list", "--given-up").stdout
    assert "given_up" in command("sessions", "show", listed["session_id"]).stdout

    nothing = command("memory", "consolidate", "--json")
    assert json.loads(nothing.stdout)["processed"] == 0
    assert "2 sessions are abandoned" in nothing.stderr
    again = command("memory", "consolidate", "--session", listed["session_id"], "--json")
    assert json.loads(again.stdout)["processed"] == 1
    assert len(json.loads(command("sessions", "list", "--given-up", "--json").stdout)) == 1
    assert json.loads(command("memory", "consolidate", "--retry-failed", "--json").stdout)["processed"] == 1
    done = command("sessions", "list", "--json")
    assert {each["consolidation"]["status"] for each in json.loads(done.stdout)} <= {"done", "skipped"}
    assert done.stderr == ""


@pytest.mark.long
def test_the_commands_run_as_processes(perdure: Perdure, file: Path) -> None:
    """The commands work in separate processes. With `--json`, they print only JSON on stdout."""
    assert perdure("messages", "import", str(file)).returncode == 0
    found = json.loads(perdure("memory", "search", "quenelles", "--user", "ann", "--json").stdout)
    assert found["results"][0]["id"] == "ann 3"
    erased = perdure("memory", "forget", "--user", "ann", "--all", "--json")
    assert json.loads(erased.stdout)["everywhere"] is True
    refused = perdure("memory", "forget", "--all")
    assert (refused.returncode, refused.stdout) == (2, "")
