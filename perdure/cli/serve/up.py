"""`perdure up`: runs everything on this machine in the foreground, until Ctrl-C.

The command checks the settings before it starts anything. It starts an embedded PostgreSQL if no database URL is set,
and an embedded Redis if no Redis URL is set. Then it starts the gateway, two workers, beat and Flower. It restarts a
process that dies. If a process exits because a setting is invalid, the command stops all processes.

On Ctrl-C the gateway stops first: it refuses new messages, and waits until the workers have finished the turns that its
clients wait for. Then the workers drain, and beat and Flower stop. The embedded servers stop last. A second Ctrl-C
shortens every step.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer

from perdure.cli.serve.interrupting import ignore_signals, interruptible
from perdure.cli.serve.listening import require_free
from perdure.cli.serve.options import LOOPBACK, Host, Port


def up(
    host: Host = LOOPBACK,
    port: Port = 8080,
    flower_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Flower's pages.")] = 5555,
    *,
    no_flower: Annotated[bool, typer.Option("--no-flower", help="Do not run Flower.")] = False,
) -> None:
    """Run everything on this machine: servers, gateway, two workers, beat, Flower."""
    from perdure.assembly import check, migration_address, require_database
    from perdure.channels.http.auth import Keys
    from perdure.cli.serve.installation import Pages, processes_of, start_servers, welcome
    from perdure.clock import SystemClock
    from perdure.database.migrate import migrate
    from perdure.servers import supervisor
    from perdure.settings import Settings
    from perdure.workers import logs
    from perdure.workers.flower import settings as flowering

    settings = Settings.load()
    settings.require_keys_for(host)
    Keys(settings, SystemClock())  # an unreadable key file fails here, before the gateway starts
    check(settings)
    logs.configure(form=settings.log.format)
    require_free(host, port, "--port")
    if not no_flower:
        flowering.check_environment()
        require_free(LOOPBACK, flower_port, "--flower-port")
    pages = None if no_flower else Pages(flower_port, flowering.own_credentials(settings), flowering.config_file())
    data_dir = settings.data_dir.resolve()
    status = 0
    with interruptible("Stopped before everything was started."), ExitStack() as stack:
        environment, keepers = start_servers(settings, data_dir, stack)
        migrate(migration_address(settings, environment), schema=settings.database_schema)
        require_database(settings, environment["PERDURE_DATABASE_URL"])  # fails if the schema is newer and incompatible
        programs = processes_of(settings, environment, host, port, None if no_flower else flower_port)
        redis_url = environment["PERDURE_REDIS_URL"]
        broker_url = settings.broker_url.get_secret_value() if settings.broker_url else redis_url
        on_ready = partial(welcome, data_dir, host, port, pages, (broker_url, redis_url))
        try:
            status = supervisor.run([*keepers, *programs], on_ready=on_ready)
        finally:
            ignore_signals()
    raise typer.Exit(status)
