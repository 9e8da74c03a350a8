"""The prompt of `perdure chat` on a terminal: line editing, history, messages of several lines.

Enter sends the message, Alt-Enter begins a new line, and pasted text keeps its line breaks. The history begins with the
user's messages in this session, read from the database. It is kept in memory only, because a history file would outlive
the erasure of the user.
"""

from __future__ import annotations

from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Keyboard:
    """Reads messages from a terminal. `earlier` has the messages for the history, oldest first."""

    def __init__(self, earlier: Iterable[str]) -> None:
        keys = KeyBindings()
        keys.add("escape", "enter")(_begin_line)
        self._session: PromptSession[str] = PromptSession(history=InMemoryHistory(list(earlier)), key_bindings=keys)

    def read(self) -> str:
        """The next message.

        Raises:
            EOFError: Ctrl-D was pressed, or the terminal was closed.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        return self._session.prompt("> ")


def _begin_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")
