"""The terminal of `perdure chat`: reads lines, prints committed text.

On a terminal it shows the agent, tool calls and progress; a pipe gets the replies only. Ctrl-C cancels the running
turn, or exits if there is none. SIGHUP (a closed terminal) and SIGTERM leave the conversation as `/exit` does: it ends,
unless another channel was used shortly before. Messages already sent are answered first.
"""

from __future__ import annotations

import errno
import io
import json
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from perdure.channels.cli import Conversation
from perdure.cli.display import printable, write_text
from perdure.errors import PerdureError
from perdure.runtime import Runtime

_HELP = """/session  the id of this conversation    /cancel  cancel the last message
/end      begin another conversation     Ctrl-C   cancel what is being answered, twice: leave
/exit     leave (/quit and Ctrl-D too)"""
_LEAVING = frozenset({"/exit", "/quit"})
_LONGEST_CALL = 200


class _Left(Exception):
    """The person wants to leave."""


class _Ended(BaseException):
    """SIGTERM, or SIGHUP because the terminal was closed."""


class Prompt:
    """One person at a terminal, or at the other end of a pipe."""

    def __init__(self, runtime: Runtime, user: str, agent: str | None, tenant: str | None = None) -> None:
        self._at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._notes = Console(stderr=True, highlight=False)
        self._status = self._notes.status("thinking", spinner="dots")
        self._conversation = Conversation(runtime, user, agent, self._note, tenant)

    def run(self) -> None:
        """Talk until the person leaves or the input ends."""
        _tolerate_any_bytes()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        try:
            self._talk()
        except _Ended:  # at any moment, also while it leaves; leaving twice is leaving once
            self._leave()
            self._say_where_the_reply_is()
        finally:
            self._conversation.close()

    def _talk(self) -> None:
        try:
            self._greet()
            while True:
                self._turn(self._line())
        except (_Left, KeyboardInterrupt):  # Ctrl-C between two lines leaves as well
            self._leave()
        except OSError as error:
            self._leave()
            if error.errno != errno.EIO:  # that is a terminal which was closed: SIGHUP is on its way
                raise

    def _say_where_the_reply_is(self) -> None:
        waited_for = self._conversation.waited_for
        if waited_for is not None:
            self._note(f"\nYour message is accepted and is answered: `perdure turns show {waited_for}` has the reply.")

    def _leave(self) -> None:
        try:
            ends = self._conversation.leave()
        except PerdureError as error:
            self._note(f"{error.message} ({error.code}) The conversation ends by itself after a while.")
            return
        except KeyboardInterrupt:
            self._note("\nThis conversation ends by itself after a while, or goes on when you come back.")
            return
        if not self._at_terminal:
            return
        if ends:
            self._note("\nThis conversation is over, and remembered when you come back.")
        elif self._conversation.session_id is not None:
            self._note("\nThis conversation goes on when you come back.")
        else:
            self._note("\nUntil you come back.")

    def _greet(self) -> None:
        earlier = self._conversation.resume()
        if earlier:
            self._note(f"Continuing a conversation of {earlier} messages.")
        elif self._at_terminal:
            self._note("A new conversation.")
        if self._at_terminal:
            import readline  # noqa: F401, PLC0415 (importing it gives input() its line editing)

            self._note("/help lists the commands; Ctrl-D leaves.")

    def _line(self) -> str:
        """The next line that says something.

        Raises:
            _Left: there is none.
        """
        interrupted = False
        while True:
            try:
                line = input("> " if self._at_terminal else "").strip()
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
            self._note("Not sent, as far as is known.")

    def _command(self, line: str) -> None:
        if line in _LEAVING:
            raise _Left
        if line == "/session":
            self._note(str(self._conversation.session_id or "There is none yet."))
        elif line == "/cancel":
            self._note("Asked for." if self._conversation.cancel() else "Nothing was said yet.")
        elif line == "/end":
            self._note("This conversation is over." if self._conversation.end() else "There is none yet.")
        elif line == "/help":
            self._note(_HELP)
        else:
            self._note(f"There is no command {line}.\n{_HELP}")

    def _listen(self) -> None:
        """Show the answer; the first Ctrl-C cancels it.

        Raises:
            _Left: there was a second one.
        """
        try:
            turn = self._heard()
        except KeyboardInterrupt:
            self._conversation.cancel()
            self._note("Cancelling; Ctrl-C again leaves.")
            try:
                turn = self._heard()
            except KeyboardInterrupt:
                raise _Left from None
        if turn["error"] is not None:
            self._note(f"({turn['error']['code']})")

    def _heard(self) -> dict[str, Any]:
        if not self._at_terminal:
            return self._conversation.listen(self._show)
        with self._status:
            return self._conversation.listen(self._show)

    def _show(self, message: dict[str, Any]) -> None:
        if self._at_terminal:
            self._status.stop()
        if message["role"] == "assistant" and message["content"]:
            write_text(message["content"])
        for call in message.get("tool_calls", ()) if self._at_terminal else ():
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            self._note(f"  {call['name']} {arguments[:_LONGEST_CALL]}")
        if self._at_terminal:
            self._status.start()

    def _note(self, text: str) -> None:
        """Say something that is no part of the conversation. A terminal that was closed shows nothing."""
        with suppress(OSError):
            self._notes.print(Text(printable(text), style="dim"))


def _end(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # leaving is not interrupted
    raise _Ended


def _tolerate_any_bytes() -> None:
    """Bytes that are not UTF-8 are replaced, coming in and going out, and end nothing."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
