"""Restricts Flower to requests for its own host names, and hides the arguments of perdure's tasks in stored events.

An attacker can make the host name of a web page resolve to 127.0.0.1 (DNS rebinding). A browser on this machine then
sends the page's requests to Flower. So Flower refuses each request for a host name that is not its own. This protects
`/metrics` and `/healthcheck`, too, which do not require Flower's authentication.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from perdure.tasks.arguments import hidden
from perdure.workers.celery_application import ROUTES

_FORBIDDEN = 403


def guard(hosts: Collection[str]) -> None:
    """Make the command `flower` check host names and hide arguments. `hosts` are accepted, as are loopback names."""
    from flower import command  # noqa: PLC0415 (only Flower needs it)

    command.Flower = _guarded(command.Flower, frozenset(host.lower() for host in hosts))


def serves(host: str, address: str, hosts: Collection[str]) -> bool:
    """Whether a Flower bound to `address` answers a request with the header `Host: host`.

    It answers requests for loopback names, for `hosts` and for `address` itself. If `hosts` is empty and `address` is
    not loopback, it answers requests for any host.
    """
    if not hosts and not is_loopback(address):
        return True
    name = _name(host)
    return is_loopback(name) or name in hosts or name == address.lower()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_arguments(event: dict[str, Any]) -> dict[str, Any]:
    """`event` as Flower may store it: the arguments of perdure's tasks are hidden.

    Publishers with `task_send_sent_event` send events that contain arguments.
    """
    if not any(fnmatchcase(str(event.get("name")), glob) for glob in ROUTES):
        return event
    return {**event, **{name: hidden(str(event[name])) for name in ("args", "kwargs") if name in event}}


def _guarded(flower: Any, hosts: frozenset[str]) -> Any:
    from tornado.web import RequestHandler  # noqa: PLC0415 (only Flower needs it)

    class Refusal(RequestHandler):
        def prepare(self) -> None:
            self.set_status(_FORBIDDEN)
            self.finish("This name is not one of Flower's. Add it to PERDURE_FLOWER__HOSTS.\n")

    class Guarded(flower):  # type: ignore[misc]  # Flower carries no types
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            keep = self.events.on_event
            self.events.on_event = lambda event: keep(without_arguments(event))

        def start(self) -> None:
            """Serve until a signal arrives, then end the process.

            Python would wait for the threads that inspect workers, and these try for ever to reach the broker.
            """
            try:
                super().start()
            except (KeyboardInterrupt, SystemExit):
                self.stop()
                logging.shutdown()
                os._exit(0)

        def find_handler(self, request: Any, **options: Any) -> Any:
            if self.options.unix_socket or serves(request.host, self.options.address, hosts):
                return super().find_handler(request, **options)
            return self.get_handler_delegate(request, Refusal)

    return Guarded


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
