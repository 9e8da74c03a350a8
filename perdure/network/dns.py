"""DNS look-ups in threads, so that a caller can stop waiting.

The system's resolver accepts no time limit and cannot be interrupted. It takes half a minute if a nameserver does not
answer. Each look-up runs in its own thread, which ends when the resolver returns.
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
    """Look up the TCP addresses of `host`. The future gets the addresses or the resolver's error.

    If `host` is an IP address, the returned future is already complete.
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
