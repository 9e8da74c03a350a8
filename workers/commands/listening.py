"""An address to listen on, or a sentence about who is in the way."""

from __future__ import annotations

import os
import socket

from workers.commands.failing import Failure

_BACKLOG = 2048


def bind(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens there.

    Raises:
        Failure: it cannot be had; the sentence names `option`, which chooses the port.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Failure(
            f"Cannot listen on {host} port {port}: {_reason(error)}. "
            f"Something else may run there, another `perdure up` perhaps; choose another port with {option}."
        ) from None


def require_free(host: str, port: int, option: str) -> None:
    """Refuse an address that cannot be listened on, before anything is started that would need it.

    Raises:
        Failure: as `bind`.
    """
    bind(host, port, option).close()


def _reason(error: OSError) -> str:
    """What the system says, without the address that Python adds; names that do not resolve have no number of its."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else str(error.strerror)
