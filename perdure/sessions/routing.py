"""Computes the scope of a message, by which the message is routed to one of its user's sessions.

A user has at most one live session per scope. The scope of a message with a conversation's key is a slash and the key,
whatever the message's channel. For a message without a key, `PERDURE_SESSION__SCOPE` selects the scope: the channel's
name, or the empty string for all channels. No channel's name begins with a slash.
"""

from __future__ import annotations

from perdure.settings import Scope


def scope_of(setting: Scope, channel: str, conversation: str | None = None) -> str:
    """The scope by which a message is routed to a session."""
    if conversation is not None:
        return f"/{conversation}"
    return channel if setting is Scope.CHANNEL else ""


def conversation_of(scope: str) -> str | None:
    return scope[1:] if scope.startswith("/") else None
