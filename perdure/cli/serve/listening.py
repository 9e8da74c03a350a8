"""Binds a listening socket, with an error message for each cause of failure."""

from __future__ import annotations

import errno
import os
import socket

from perdure.cli.errors import WRONG_USAGE, Failure

FINISH_S = 5
"""Seconds that a shutdown allows for sending the last responses. They begin when no client waits for a turn."""

ACCEPTED_AT_ONCE = 128
"""The most `accept` calls of the event loop per iteration. Calls that fail for lack of a free descriptor count, too."""

BACKLOG = 2048
"""The most connections that the system keeps until the event loop accepts them."""

SEND_BUFFER_BYTES = 2**18
"""The system's buffer for the unsent bytes of a connection. By default it grows to some MiB, and reports a slow
client's progress only in steps of a third of its size."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        Failure: the address cannot be bound. The message names `option`, which sets the port.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections inherit this
    except (socket.gaierror, UnicodeError):
        raise Failure(f"Cannot listen on {host!r}: it is not an address and does not resolve.", WRONG_USAGE) from None
    except OSError as error:
        raise Failure(f"Cannot listen on {host} port {port}: {_reason(error)}. {_advice(error, option)}") from None
    return _named_tcp(made)


def _named_tcp(listener: socket.socket) -> socket.socket:
    """The same socket with TCP as its protocol number, so that asyncio sets `TCP_NODELAY`.

    Without that option, each response on a keep-alive connection waits 40 ms for the client's delayed acknowledgement.
    """
    return socket.socket(listener.family, listener.type, socket.IPPROTO_TCP, fileno=listener.detach())


def require_free(host: str, port: int, option: str) -> None:
    """Check that an address can be bound, before the process that needs it is started.

    Raises:
        Failure: as `bind`.
    """
    bind(host, port, option).close()


def _advice(error: OSError, option: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "This machine has no such address."
    return f"Another process may use it, perhaps another `perdure up`; choose another port with {option}."


def _reason(error: OSError) -> str:
    """The system's message for the error, without the address that Python appends."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else str(error.strerror)
