"""An address to listen on, or a sentence about who is in the way."""

from __future__ import annotations

import errno
import os
import socket

from perdure.cli.errors import WRONG_USAGE, Failure

FINISH_S = 5
"""Seconds for sending responses, once no client waits for a turn."""

ACCEPTED_AT_ONCE = 128
"""Connections that the event loop accepts in one round; where descriptors run out, also its attempts in one round."""

_BACKLOG = 2048


def bind(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens there.

    Raises:
        Failure: it cannot be had; the sentence names `option`, which chooses the port.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (socket.gaierror, UnicodeError):
        raise Failure(f"Cannot listen on {host!r}: it is no address, and no name of one.", WRONG_USAGE) from None
    except OSError as error:
        raise Failure(f"Cannot listen on {host} port {port}: {_reason(error)}. {_advice(error, option)}") from None
    return _named_tcp(made)


def _named_tcp(listener: socket.socket) -> socket.socket:
    """The same socket under the protocol's number: asyncio sets `TCP_NODELAY` only where it is given.

    Without it each response on a kept connection waits 40 ms for the client's delayed acknowledgement.
    """
    return socket.socket(listener.family, listener.type, socket.IPPROTO_TCP, fileno=listener.detach())


def require_free(host: str, port: int, option: str) -> None:
    """Refuse an address that cannot be listened on, before anything is started that would need it.

    Raises:
        Failure: as `bind`.
    """
    bind(host, port, option).close()


def _advice(error: OSError, option: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "This machine has no such address."
    return f"Something else may run there, another `perdure up` perhaps; choose another port with {option}."


def _reason(error: OSError) -> str:
    """What the system says, without the address that Python adds; names that do not resolve have no number of its."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else str(error.strerror)
