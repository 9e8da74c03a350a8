"""Resolves host names with a bound on the wait.

The system's resolver can be neither bounded nor interrupted; with an unresponsive name server it takes half a minute.
It runs in a thread of its own, which a waiting caller may abandon.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future
from typing import Any

Found = list[tuple[Any, Any, int, str, Any]]
"""The result of `socket.getaddrinfo`: family, type, protocol, canonical name and socket address of each."""


def look_up(host: str, port: int) -> Future[Found]:
    """The addresses of `host` for TCP, or the resolver's OSError; immediately if `host` is an address."""
    found: Future[Found] = Future()
    found.set_running_or_notify_cancel()
    if _is_address(host):
        _ask(found, host, port)
    else:
        threading.Thread(target=_ask, args=(found, host, port), name="perdure-look-up", daemon=True).start()
    return found


def _ask(found: Future[Found], host: str, port: int) -> None:
    try:
        found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as error:  # noqa: BLE001 (whoever waits raises it; UnicodeError, too: what is no name at all)
        found.set_exception(error)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
