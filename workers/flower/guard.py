"""Restricts Flower to requests for its own host names, and removes the arguments of perdure's tasks from its events.

A web page can make a browser on this machine send requests to the page's host name, after that name has been changed to
resolve to 127.0.0.1 (DNS rebinding). So Flower refuses each request for a host that is not its own. This includes
`/metrics` and `/healthcheck`, which Flower's authentication does not protect.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from perdure.tasks.arguments import hidden
from perdure.workers.application import ROUTES

_FORBIDDEN = 403


def guard(hosts: Collection[str]) -> None:
    """Make the command `flower` serve the guarded application. `hosts`: host names in addition to loopback's."""
    from flower import command  # noqa: PLC0415 (only Flower needs it)

    command.Flower = _guarded(command.Flower, frozenset(host.lower() for host in hosts))


def serves(host: str, address: str, hosts: Collection[str]) -> bool:
    """Whether a Flower bound to `address` answers a request with the header `Host: host`.

    On loopback the name must be a loopback name or one of `hosts`. On another address any name is accepted, unless
    `hosts` are configured.
    """
    if not hosts and not is_loopback(address):
        return True
    name = _name(host)
    return is_loopback(name) or name in hosts or name == address.lower()


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_arguments(event: dict[str, Any]) -> dict[str, Any]:
    """`event` as Flower may store it. Arguments are removed if it is an event of one of perdure's tasks.

    Publishers with `task_send_sent_event`, and workers of an earlier release, send events with the arguments.
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
