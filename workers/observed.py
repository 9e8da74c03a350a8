"""Where the gateway and `perdure status` read the condition of the installation."""

from __future__ import annotations

from collections.abc import Callable

from perdure.assembly import has_embedded_database
from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.observe.disks import disk_states
from perdure.observe.readings import Source
from perdure.observe.servers import redis_servers
from perdure.resilience.registry import Switchboard
from perdure.schedules.entries import active_entries
from perdure.settings import Settings
from perdure.workers.celery_application import TASKS


def observed(
    settings: Settings,
    database: Database,
    clock: Clock,
    *,
    breakers: Switchboard | None,
    redis_url: str | None,
    broker_url: str | None,
    broker_reachable: Callable[[], bool] | None,
) -> Source:
    """The source of the readings. The caller closes it. `broker_reachable` is `None` if the broker is not known."""
    entries = list(active_entries(TASKS, settings).values())
    servers = redis_servers(redis_url, broker_url, settings.redis_prefix)
    return Source(
        database,
        clock,
        entries,
        servers,
        breakers,
        broker_reachable=broker_reachable,
        disks=lambda size: list(disk_states(settings, size, embedded=has_embedded_database(settings))),
    )
