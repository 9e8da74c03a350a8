"""The conversation of `perdure chat`: reads messages, prints replies.

On a terminal, the chat prints the tool calls, and the reply as the model writes it. On a pipe, it prints only committed
replies. Ctrl-C cancels the running turn. If no turn is running, Ctrl-C twice leaves the chat.

The command `/exit`, SIGTERM, and SIGHUP from a closed terminal also leave the chat. The session then ends, unless the
user has recently used it on another channel. Messages that were already sent are answered before the session ends.
"""

from __future__ import annotations

import errno
import io
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from perdure.channels.cli import Speaker, TerminalConversation
from perdure.cli.display import printable, write_text
from perdure.cli.talk.wrapping import Wrapping
from perdure.errors import PerdureError
from perdure.events.event import Event, EventKind
from perdure.runtime import Runtime
from perdure.text.untrusted import is_storable, shown_json
from perdure.turns.reading import cut_off, question_of

_HELP = """/new      begin another conversation       /list      list your conversations
/open KEY continue one of them             /session   show the id of this session
/end      end this conversation            /cancel    cancel the turn of the last message
/exit     leave (also /quit and Ctrl-D)    Ctrl-C     cancel the running turn; twice: leave
                                           Alt-Enter  begin a new line in the message"""
_NO_SESSION = "There is no conversation yet."
_ENDED = "This conversation has ended. The next one begins with its summary."
_NO_MESSAGE = "There is no message yet."
_LEAVING = frozenset({"/exit", "/quit"})
_LONGEST_CALL = 200
_LONGEST_KEY = 200
_RECALLED = 4
"""The messages that are shown when a conversation is continued."""
_LONGEST_RECALLED = 600


class _Left(Exception):
    """The user leaves the chat."""


class _Ended(SystemExit):
    """SIGTERM arrived, or SIGHUP from a closed terminal.

    It is a `SystemExit`, because asyncio re-raises a `SystemExit` from a callback instead of logging it.
    """


class Prompt:
    """A chat with one user, at a terminal or over a pipe."""

    def __init__(self, runtime: Runtime, speaker: Speaker, conversation: str | None = None) -> None:
        self._at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._notes = Console(stderr=True, highlight=False)
        self._status = self._notes.status("thinking", spinner="dots")
        self._conversation = TerminalConversation(runtime, speaker, conversation, self._note)
        self._read: Callable[[], str] = input

    def run(self) -> None:
        """Converse until the user leaves or the input ends."""
        _tolerate_any_bytes()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        try:
            self._talk()
        except _Ended:  # possibly during `_leave`, which may safely run twice
            self._leave()
            self._name_pending_turn()
        finally:
            self._conversation.close()

    def _talk(self) -> None:
        try:
            self._greet()
            while True:
                self._turn(self._line())
                if self._at_terminal:
                    self._note("")
        except (_Left, KeyboardInterrupt):  # Ctrl-C that neither `_line` nor `_turn` handled
            self._leave()
        except OSError as error:
            self._leave()
            if error.errno != errno.EIO:  # EIO: the terminal was closed, and SIGHUP follows
                raise

    def _name_pending_turn(self) -> None:
        waited_for = self._conversation.waited_for
        if waited_for is not None:
            self._note(f"\nYour message will be answered: `perdure turns show {waited_for}` shows the reply.")

    def _leave(self) -> None:
        try:
            self._conversation.note_presence()
            ends = self._conversation.leave()
        except PerdureError as error:
            self._note(f"{error.message} ({error.code}) The conversation ends by itself after the idle timeout.")
            return
        except KeyboardInterrupt:
            self._note("\nThis conversation ends by itself after the idle timeout, or continues when you return.")
            return
        if not self._at_terminal:
            return
        if ends:
            self._note(f"\n{_ENDED}")
        elif self._conversation.session_id is not None:
            self._note("\nThis conversation continues when you return.")
        else:
            self._note("\nGoodbye.")

    def _greet(self) -> None:
        earlier = self._conversation.resume()
        self._conversation.note_presence()
        if earlier:
            self._note(f"Continuing a conversation of {earlier} messages.")
            self._recall()
        elif self._at_terminal:
            self._note("A new conversation.")
        if self._at_terminal:
            from perdure.cli.talk.keyboard import Keyboard

            self._read = Keyboard(self._conversation.earlier()).read
            self._note("/help lists the commands; Ctrl-D leaves.")

    def _line(self) -> str:
        """The next message or command. Blank lines are skipped.

        Raises:
            _Left: the input has ended, or Ctrl-C was pressed twice (on a pipe: once).
        """
        interrupted = False
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                raise _Left from None
            except KeyboardInterrupt:
                if interrupted or not self._at_terminal:
                    raise _Left from None
                interrupted = True
                self._note("\nCtrl-C again leaves.")
                continue
            if line:
                return line

    def _turn(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(line)
                return
            self._conversation.say(line)
            self._listen()
        except PerdureError as error:
            self._note(f"{error.message} ({error.code})")
        except KeyboardInterrupt:
            self._note("Interrupted. The message may not have been sent.")

    def _command(self, line: str) -> None:
        if line in _LEAVING:
            raise _Left
        command, _, key = line.partition(" ")
        if command == "/open" and key.strip():
            self._open(key.strip())
            return
        act: Callable[[], object] = {
            "/new": lambda: self._open(f"chat-{secrets.token_hex(4)}"),
            "/list": self._list,
            "/session": lambda: self._note(str(self._conversation.session_id or _NO_SESSION)),
            "/cancel": lambda: self._note("Cancel requested." if self._conversation.cancel() else _NO_MESSAGE),
            "/end": lambda: self._note(_ENDED if self._conversation.end() else _NO_SESSION),
            "/help": lambda: self._note(_HELP),
        }.get(line, lambda: self._note(f"There is no command {line}.\n{_HELP}"))
        act()

    def _open(self, key: str) -> None:
        if not is_storable(key) or len(key) > _LONGEST_KEY:
            self._note(f"A conversation's key has at most {_LONGEST_KEY} characters, and no NUL.")
            return
        messages = self._conversation.switch(key)
        begun = f"Continuing the conversation {key}, of {messages} messages." if messages else f"Conversation {key}."
        self._note(begun)
        self._recall()

    def _recall(self) -> None:
        """Show the last messages of the conversation that is continued."""
        if not self._at_terminal:
            return
        for message in self._conversation.last(_RECALLED):
            mark = "> " if message["role"] == "user" else ""
            text = message["content"].strip()
            short = text if len(text) <= _LONGEST_RECALLED else f"{text[:_LONGEST_RECALLED]}…"
            self._note(f"\n{mark}{short}")
        self._note("")

    def _list(self) -> None:
        found = self._conversation.others()
        for each in found:
            mark = "*" if each["conversation"] == self._conversation.key else " "
            self._note(f"{mark} {each['conversation']}  {each['title']}")
        if not found:
            self._note("There is no conversation with a key yet; /new begins one.")

    def _listen(self) -> None:
        """Print the reply; the first Ctrl-C cancels the turn.

        Raises:
            _Left: Ctrl-C was pressed twice.
        """
        try:
            turn = self._wait_for_reply()
        except KeyboardInterrupt:
            self._conversation.cancel()
            self._note("Cancelling; Ctrl-C again leaves.")
            try:
                turn = self._wait_for_reply()
            except KeyboardInterrupt:
                raise _Left from None
        if (note := cut_off(turn)) is not None:
            self._note(note)
        if turn["error"] is not None:
            received = self._conversation.received()
            self._note(f"({turn['error']['code']})" + (f" {received}" if received else ""))

    def _wait_for_reply(self) -> dict[str, Any]:
        if not self._at_terminal:
            return self._conversation.listen(_print_reply)
        reply = _LiveReply(self._note, self._status)
        with self._status:
            return self._conversation.stream(reply.show)

    def _note(self, text: str) -> None:
        """Print a note on stderr; stdout has only the conversation. Errors of a closed terminal are ignored."""
        with suppress(OSError):
            self._notes.print(Text(printable(text), style="dim"))


def _print_reply(message: dict[str, Any]) -> None:
    if message["role"] == "assistant" and message["content"]:
        write_text(message["content"])


class _LiveReply:
    """Prints a reply as the model writes it.

    If the model begins the reply again, the old text stays visible, and a note precedes the new text.
    """

    def __init__(self, note: Callable[[str], None], status: Status) -> None:
        self._note = note
        self._status = status
        self._shown = ""
        self._wrapping = Wrapping(_columns())

    def show(self, event: Event) -> None:  # noqa: C901 (a case for each kind)
        match event.kind:
            case EventKind.DELTA:
                self._write(event.data["text"])
            case EventKind.REWIND:
                self._withdraw()
            case EventKind.MESSAGE if event.data["role"] == "assistant":
                self._commit(event.data["content"])
            case EventKind.STATE if (question := question_of(event.data)) is not None:
                self._commit(question)
                self._status.stop()
            case EventKind.PROGRESS:
                self._status.update(printable(f"{event.data['tool']}: {event.data['text']}"))
            case EventKind.TOOL_RESULT:
                self._status.update("thinking")
            case EventKind.TOOL_CALL:
                self._note(f"  {event.data['name']} {shown_json(event.data['arguments'])[:_LONGEST_CALL]}")
            case EventKind.APPROVAL_REQUIRED:
                tool, call_id, approver = (event.data[name] for name in ("tool", "call_id", "approver"))
                by = "" if approver == "user" else f" by {approver}"
                self._note(f"  {tool} waits for approval{by} ({call_id}): perdure turns approve or deny")
            case _:
                pass

    def _write(self, text: str) -> None:
        self._status.stop()
        self._shown += text
        self._print(self._wrapping.add(printable(text)))

    def _commit(self, content: str) -> None:
        if not content.startswith(self._shown):
            self._withdraw()
        if content:
            self._write(content[len(self._shown) :])
            self._end_line()
        self._shown = ""
        self._status.start()

    def _withdraw(self) -> None:
        if self._shown:
            self._end_line()
            self._note("The answer begins again:")
        self._shown = ""

    def _end_line(self) -> None:
        self._print(self._wrapping.end() + "\n")
        self._wrapping = Wrapping(_columns())

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _end(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt leaving
    raise _Ended


def _tolerate_any_bytes() -> None:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
