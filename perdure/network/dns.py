"""DNS look-ups with a time limit.

The system's resolver has no time limit, cannot be interrupted, and takes half a minute if a nameserver does not answer.
Each look-up runs in its own thread, which ends when the resolver returns, even if the caller has stopped waiting.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future
from typing import Any

AddressInfo = list[tuple[Any, Any, int, str, Any]]
"""The result of `socket.getaddrinfo`: (family, type, protocol, canonical name, socket address) of each address."""


def look_up(host: str, port: int) -> Future[AddressInfo]:
    """Look up the TCP addresses of `host`. The future gets the addresses or the resolver's `OSError`.

    For an IP address, the future is complete at once.
    """
    found: Future[AddressInfo] = Future()
    found.set_running_or_notify_cancel()
    if _is_address(host):
        _resolve(found, host, port)
    else:
        threading.Thread(target=_resolve, args=(found, host, port), name="perdure-look-up", daemon=True).start()
    return found


def _resolve(found: Future[AddressInfo], host: str, port: int) -> None:
    try:
        found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as error:  # noqa: BLE001 (the waiting caller raises it; UnicodeError: an invalid name)
        found.set_exception(error)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
