"""How a call of an MCP server fails, told apart by what is known of the call.

Ours travel through the SDK as JSON-RPC errors, since nothing else finds its way to the one
call that it concerns. A server may send the same codes; it fools nobody but its own calls.
"""

from __future__ import annotations

from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT

MAX_MESSAGE_BYTES = 4_000_000
"""Bytes of one message from a server; of a longer one no more is ever held."""

NOT_SENT = -32_010
"""The request did not leave: the server cannot be reached."""
LOST = -32_011
"""The request left, and no answer came or ever will."""
TOO_LONG = -32_012
"""The answer is longer than `MAX_MESSAGE_BYTES`."""

UNANSWERED = frozenset({LOST, CONNECTION_CLOSED, REQUEST_TIMEOUT})
UNREADABLE = frozenset({TOO_LONG, PARSE_ERROR})
UNHEALTHY = frozenset({INTERNAL_ERROR})


class NotConnected(ConnectionError):
    """There is no connection: the call did not begin."""


class NoAnswer(ConnectionError):
    """The call began, and there is no answer to it."""


class MalformedAnswer(Exception):
    """There is an answer, and it is none."""
