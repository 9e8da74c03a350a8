"""Opens the gateway with its connections: for `perdure gateway`, and for an application that mounts it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from celery import Celery
from fastapi import FastAPI

from perdure.assembly import Addresses, assemble, require_database
from perdure.channels.http.app import create_app
from perdure.channels.http.auth import Authenticate, MayApprove
from perdure.resilience.kill_reports import Kills
from perdure.settings import Settings
from perdure.workers.observed import observed
from perdure.workers.publish.background import BackgroundWaker


class OpenGateway(NamedTuple):
    """A gateway's application. `close` closes its connections; the application must have been shut down before."""

    app: FastAPI
    close: Callable[[], None]


def open_gateway(
    settings: Settings,
    where: Addresses,
    *,
    publisher: Celery | None = None,
    authenticate: Authenticate | None = None,
    may_approve: MayApprove | None = None,
) -> OpenGateway:
    """Open the gateway. If that fails, nothing stays open.

    Args:
        settings: The settings of this process.
        where: The servers' addresses.
        publisher: The Celery application that publishes wake-ups. Default: one for `where.broker_url`.
        authenticate: See `create_app`.
        may_approve: See `create_app`.

    Raises:
        PerdureError: a setting is invalid, or the database is not migrated.
    """
    require_database(settings, where.database_url)
    with ExitStack() as opened:
        waker = BackgroundWaker(settings, where, publisher)
        opened.callback(waker.close)
        runtime = assemble(settings, where.database_url, waker, where.redis_url)
        opened.callback(runtime.close)
        kills = Kills(where.redis_url, settings.redis_prefix)
        opened.callback(kills.close)
        source = observed(
            settings, runtime.database, runtime.clock,
            breakers=runtime.breakers, redis_url=where.redis_url, broker_url=where.broker_url,
            broker_reachable=waker.reachable,
        )  # fmt: skip
        opened.callback(source.close)
        app = create_app(runtime, waker.reachable, kills.lately, authenticate, may_approve, source=source)
        return OpenGateway(app, opened.pop_all().close)
