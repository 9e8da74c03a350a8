"""`perdure chat` on a pseudo-terminal: what the user sees, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psutil
import pytest

from perdure.access.tenants import UserKey
from perdure.database.engine import Database
from perdure.sessions.reading import list_sessions, read_messages
from tests.cli.conftest import COMMAND, Environment, Perdure
from tests.turns.harness import until

pytestmark = pytest.mark.long

_PATIENCE_S = 60.0
_PROMPT = ">"
_TERM = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # this pseudo-terminal does not report its cursor's position
_PRESSES = 4
_LOOKS = 10


class Terminal:
    """A chat in which the test presses the keys."""

    def __init__(self, perdure: Perdure, environment: Environment) -> None:
        self._master, self._slave = pty.openpty()
        self._shown = ""
        device = Path(os.ttyname(self._slave))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), device)
        self._process = perdure.start("chat", env={**environment, **_TERM}, **streams)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def see(self, text: str, within_s: float = _PATIENCE_S) -> str:
        """Wait until `text` is shown. Returns the text shown since the last call, up to the end of `text`.

        Raises:
            TimeoutError: `text` was not shown in time.
        """
        deadline = time.monotonic() + within_s
        while text not in self._shown:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{text!r} was not shown, but {self._shown!r}")
            self._shown += os.read(self._master, 65_536).decode(errors="replace")
        before, _, self._shown = self._shown.partition(text)
        return before + text

    def interrupt(self) -> None:
        """Send SIGINT to the process, as Ctrl-C does."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # the process may have ended already
            os.kill(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def ends(self) -> int | None:
        """Wait for the end of the chat. Returns its exit status."""
        self._process.join(_PATIENCE_S)
        return self._process.exitcode

    def _wait_asleep(self) -> None:
        """Wait until `_LOOKS` samples in a row find the process asleep."""
        deadline, asleep = time.monotonic() + _PATIENCE_S, 0
        with contextlib.suppress(psutil.NoSuchProcess):  # the process may have ended already
            while asleep < _LOOKS and time.monotonic() < deadline:
                asleep = asleep + 1 if psutil.Process(self._process.pid).status() == psutil.STATUS_SLEEPING else 0
                time.sleep(0.01)

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` is shown.

        A signal that arrives just before the prompt reads keys is lost. So the method first presses a key, and waits
        until the key is echoed and the process sleeps.
        """
        for _ in range(_PRESSES):
            self.type("x")
            self.see("x")
            self._wait_asleep()
            self.interrupt()
            with contextlib.suppress(TimeoutError):
                self.see(text, _PATIENCE_S / _PRESSES)
                return
        raise AssertionError(f"Ctrl-C did not lead to {text!r}")

    def close(self) -> None:
        """Kill the process and close the terminal."""
        self._process.kill()
        self._process.join()
        os.close(self._slave)
        os.close(self._master)


@pytest.fixture
def terminal(perdure: Perdure, environment: Environment) -> Iterator[Terminal]:
    """A chat that has just started."""
    made = Terminal(perdure, environment)
    yield made
    made.close()


@pytest.mark.usefixtures("working")
def test_a_reply_and_its_tool_calls_are_shown(terminal: Terminal, database: Database) -> None:
    """A tool call is shown before the reply. `/end` ends the conversation, and Ctrl-D ends the chat."""
    terminal.see(_PROMPT)
    terminal.type("what is 12*7+5?\n")
    shown = terminal.see("89")
    terminal.see(_PROMPT)
    terminal.type("/end\n")
    terminal.see("This conversation has ended.")
    terminal.see(_PROMPT)
    terminal.type("/end\n")
    terminal.see("There is no conversation yet.")
    terminal.see(_PROMPT)
    terminal.type("\x04")
    terminal.see("Goodbye.")

    assert '"12*7+5"' in shown
    assert terminal.ends() == 0
    until(lambda: [each["state"] for each in list_sessions(database)] == ["ended"], "the end of the conversation")


@pytest.mark.usefixtures("working")
def test_a_message_of_several_lines_and_the_history(terminal: Terminal, database: Database) -> None:
    """Alt-Enter inserts a line break, pasted lines form one message, and the up arrow recalls an earlier message."""
    terminal.see(_PROMPT)
    terminal.type("first\x1b\rsecond\n")
    terminal.see("thinking")
    terminal.see(_PROMPT)
    terminal.type("\x1b[200~third\nfourth\x1b[201~")
    terminal.see("fourth")
    terminal.type("\n")
    terminal.see("thinking")
    terminal.see(_PROMPT)
    terminal.type("\x1b[A")
    terminal.see("fourth")

    (session,) = list_sessions(database, UserKey("local"))
    messages = read_messages(database, UUID(session["session_id"]))
    assert [each["content"] for each in messages if each["role"] == "user"] == ["first\nsecond", "third\nfourth"]


@pytest.mark.usefixtures("working")
def test_the_last_messages_are_shown_when_a_conversation_goes_on(perdure: Perdure, environment: Environment) -> None:
    """A chat that continues a conversation shows its last two questions and answers."""
    for question in ("what is 20+2?", "what is 30+3?", "what is 40+4?"):
        assert perdure("send", question, "--wait", "30").returncode == 0
    terminal = Terminal(perdure, environment)
    try:
        shown = terminal.see("Ctrl-D leaves")
    finally:
        terminal.close()
    assert "Continuing a conversation" in shown
    assert "> what is 20+2?" not in shown
    assert "> what is 30+3?" in shown
    assert "> what is 40+4?" in shown
    assert "44" in shown.partition("> what is 40+4?")[2]


def test_ctrl_c_cancels_the_current_turn(terminal: Terminal, database: Database) -> None:
    """Ctrl-C cancels the current turn, and the chat prompts for the next line."""
    terminal.see(_PROMPT)
    terminal.type("hello\n")
    terminal.see("thinking")
    terminal.interrupt()
    terminal.see("TURN_CANCELLED")
    terminal.see(_PROMPT)
    terminal.type("/exit\n")

    assert terminal.ends() == 0
    assert len(list_sessions(database, UserKey("local"))) == 1


def test_ctrl_c_twice_leaves(terminal: Terminal) -> None:
    """At the prompt, the first Ctrl-C prints a warning, and the second one ends the chat."""
    terminal.see(_PROMPT)
    terminal.interrupt_until("again leaves")
    terminal.interrupt_until("Goodbye")

    assert terminal.ends() == 0


def _requested_ends(database: Database) -> list[tuple[bool, int]]:
    """For each session, whether its end was requested, and its number of unsettled turns."""
    with database.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT end_requested_at IS NOT NULL, unsettled FROM sessions").all()
    return [(bool(row[0]), int(row[1])) for row in rows]


def test_sigterm_ends_the_chat_like_exit(terminal: Terminal, database: Database) -> None:
    """After SIGTERM the chat requests the session's end, and prints the command that will show the pending reply."""
    terminal.see(_PROMPT)
    terminal.type("hello\n")
    terminal.see("thinking")
    terminal.terminate()

    terminal.see("conversation has ended")
    assert "message will be answered" in terminal.see("shows the reply")
    assert terminal.ends() == 0
    assert _requested_ends(database) == [(True, 1)]


_LOGIN = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def window(environment: Environment, tmp_path: Path) -> Iterator[Window]:
    """A chat on a terminal that the test can close, as a user closes a window."""
    made = Window({**environment, **_TERM}, tmp_path)
    yield made
    made.close()


class Window:
    """A chat that is the session leader of its terminal, so that closing the terminal sends SIGHUP."""

    def __init__(self, environment: Environment, directory: Path) -> None:
        self._master, slave = pty.openpty()
        self._open = True
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOGIN, *COMMAND, "chat"],
            env=environment, cwd=directory, stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def see(self, text: str) -> None:
        """Wait until `text` is shown."""
        shown, deadline = "", time.monotonic() + _PATIENCE_S
        while text not in shown:
            assert select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0], shown
            shown += os.read(self._master, 65_536).decode(errors="replace")

    def hang_up(self) -> None:
        """Close the terminal and wait for the end of the process."""
        os.close(self._master)
        self._open = False
        self._process.wait(_PATIENCE_S)

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        if self._open:
            os.close(self._master)


@pytest.mark.exhaustive
def test_closing_the_terminal_while_an_answer_is_awaited_leaves(window: Window, database: Database) -> None:
    """If SIGHUP arrives during a wait for a reply, the chat requests the session's end. The message stays accepted."""
    window.see(_PROMPT)
    window.type("hello\n")
    window.see("thinking")
    window.hang_up()
    assert _requested_ends(database) == [(True, 1)]


@pytest.mark.long
@pytest.mark.usefixtures("working")
def test_closing_the_terminal_between_two_lines_leaves(window: Window, database: Database) -> None:
    """After SIGHUP at the prompt, the chat's session ends, as after `/exit`."""
    window.see(_PROMPT)
    window.type("hello\n")
    window.see(_PROMPT)
    until(lambda: [each["turn_count"] for each in list_sessions(database)] == [1], "the answer")
    window.hang_up()
    until(lambda: [each["state"] for each in list_sessions(database)] == ["ended"], "the end of the session")
