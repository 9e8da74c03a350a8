"""Routes a message to a session by its scope: a conversation's key, a channel, or neither.

A message with a conversation's key goes to the conversation's live session, whatever the message's channel. A message
without a key is routed by `PERDURE_SESSION__SCOPE`. A user has at most one live session per scope. A conversation's
scope begins with a slash; a channel's name does not.
"""

from __future__ import annotations

from perdure.settings import Scope
from perdure.text.untrusted import first_line

MAX_TITLE_CHARS = 80
"""The longest title of a conversation."""


def scope_of(setting: Scope, channel: str, conversation: str | None = None) -> str:
    """The scope by which a message is routed to a session."""
    if conversation is not None:
        return f"/{conversation}"
    return channel if setting is Scope.CHANNEL else ""


def conversation_of(scope: str) -> str | None:
    """The conversation's key in a session's scope; `None` if the scope is not a conversation's."""
    return scope[1:] if scope.startswith("/") else None


def title_of(text: str) -> str:
    """A title from a message or a summary: its first sentence or line, within `MAX_TITLE_CHARS`."""
    line = first_line(text, 10 * MAX_TITLE_CHARS)
    sentence, stop, _ = line.partition(". ")
    return first_line(sentence if stop else line, MAX_TITLE_CHARS)
