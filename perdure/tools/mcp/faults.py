"""The errors of calls to an MCP server.

The transports report failures as JSON-RPC errors with the codes below, because the SDK attributes a JSON-RPC error to a
single call. Other errors may make all calls of the server fail. A server that sends these codes itself affects only its
own calls.
"""

from __future__ import annotations

from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT

MAX_MESSAGE_BYTES = 4_000_000
"""The most bytes of one message from a server that are read into memory."""

NOT_SENT = -32_010
"""The request was not sent: the server cannot be reached."""
LOST = -32_011
"""The request was sent, and no answer will come."""
TOO_LONG = -32_012
"""The answer is longer than `MAX_MESSAGE_BYTES`."""

UNANSWERED = frozenset({LOST, CONNECTION_CLOSED, REQUEST_TIMEOUT})
UNREADABLE = frozenset({TOO_LONG, PARSE_ERROR})
UNHEALTHY = frozenset({INTERNAL_ERROR})


class NotConnected(ConnectionError):
    """The server is not connected; the call was not sent."""


class NoAnswer(ConnectionError):
    """The call was sent, and no answer will come."""


class MalformedAnswer(Exception):
    """The server's answer is malformed."""
