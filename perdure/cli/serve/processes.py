"""The commands that run one process each: migrate, gateway, worker, beat, flower."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli import collection
from perdure.cli.serve.listening import bind, require_free
from perdure.cli.serve.options import LOOPBACK, Host, Port
from perdure.network.queues import QUEUES

if TYPE_CHECKING:
    from celery import Celery

    from perdure.settings import Settings

_FLOWER_PORT = 5555


def migrate(
    grant: Annotated[
        str | None,
        typer.Option(metavar="ROLE", help="Let this role insert messages (perdure.send), after migrating."),
    ] = None,
) -> None:
    """Create or upgrade the database's tables for this release, and print what was done."""
    from perdure.assembly import migration_address
    from perdure.cli.display import write_text
    from perdure.database.grants import grant_sending
    from perdure.database.migrate import migrate as migrate_database
    from perdure.settings import Settings
    from perdure.workers import logs

    settings = Settings.load()
    logs.configure(form=settings.log.format)
    write_text(str(migrate_database(migration_address(settings), schema=settings.database_schema)))
    if grant is not None:
        grant_sending(migration_address(settings), settings.database_schema, grant)
        write_text(f"The role {grant} may insert messages (perdure.send).")


def gateway(host: Host = LOOPBACK, port: Port = 8080) -> None:
    """Serve the HTTP gateway."""
    with collection.deferred():
        from perdure.assembly import addresses, check
        from perdure.channels.http.auth import Keys
        from perdure.cli.serve.server import serve
        from perdure.clock import SystemClock
        from perdure.settings import Settings
        from perdure.workers import logs
        from perdure.workers.opened import open_gateway

    settings = Settings.load()
    settings.require_keys_for(host)
    Keys(settings, SystemClock())  # fails now if a key file cannot be read
    check(settings, asks_models=False)
    logs.configure(form=settings.log.format)
    opened = open_gateway(settings, addresses(settings))
    try:
        listener = bind(host, port, "--port")
    except BaseException:
        opened.close()
        raise
    raise typer.Exit(serve(opened.app, listener, settings.shutdown, opened.close))


def worker(
    queues: Annotated[str, typer.Option(help="The queues to serve, separated by commas.")] = ",".join(QUEUES),
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Tasks that run at once; they mostly wait for I/O. Default: 100")
    ] = None,
    name: Annotated[str, typer.Option(help="The worker's name; Celery appends @ and the host.")] = "",
    *,
    task_events: Annotated[
        bool, typer.Option("--task-events", help="Send task events from the start; default: only while Flower runs.")
    ] = False,
) -> None:
    """Run turns and all other queued tasks."""
    chosen = [queue.strip() for queue in queues.split(",") if queue.strip()]
    unknown = [queue for queue in chosen if queue not in QUEUES]
    if unknown or not chosen:
        raise typer.BadParameter(f"{queues!r}; accepted: {', '.join(QUEUES)}", param_hint="--queues")
    with collection.deferred():
        from celery.utils.nodenames import default_nodename, host_format

        from perdure.settings import Settings
        from perdure.workers.celery_application import CONCURRENCY

        made = _celery(Settings.load(), "worker").Worker(
            hostname=host_format(default_nodename(f"{name or f'worker-{os.getpid()}'}@%h")),
            queues=chosen,
            concurrency=concurrency or CONCURRENCY,
            pool_cls="threads",
            task_events=task_events or None,
            without_gossip=True,
            without_mingle=True,
            loglevel=logging.INFO,
            quiet=True,
        )
    made.start()
    raise typer.Exit(made.exitcode or 0)


def beat() -> None:
    """Publish scheduled tasks when they are due."""
    from perdure.settings import Settings

    settings = Settings.load()
    with collection.deferred():
        made = _celery(settings, "beat").Beat(loglevel=logging.INFO, quiet=True)
    made.run()


def flower(
    address: Annotated[
        str | None,
        typer.Option(help="Address; any but loopback needs FLOWER_BASIC_AUTH. Default: FLOWER_ADDRESS, 127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the pages. Default: FLOWER_PORT, 5555")
    ] = None,
) -> None:
    """Show workers and tasks on web pages."""
    from perdure.settings import Settings
    from perdure.workers.flower import guard
    from perdure.workers.flower import settings as flowering

    settings = Settings.load()  # first: `.env` may set the variables below
    flowering.check_environment()
    address = address or os.environ.get("FLOWER_ADDRESS", flowering.LOOPBACK)
    port = port or int(os.environ.get("FLOWER_PORT", _FLOWER_PORT))
    flowering.require_authentication(address)
    require_free(address, port, "--port")
    guard.guard(settings.flower.hosts)
    argv = ["flower", f"--address={address}", f"--port={port}", "--persistent=False"]
    raise typer.Exit(_celery(settings, "flower").start(["--quiet", *argv]) or 0)


def _celery(settings: Settings, command: str) -> Celery:
    """The application of `celery -A perdure`, for the process of a Celery command.

    The worker and beat are made without Celery's command line, which would import all of Celery's commands and Flower.

    Raises:
        SettingsError: a setting is invalid.
    """
    from perdure.assembly import check
    from perdure.workers.flower import settings as flowering

    is_worker = command == "worker"
    check(settings, asks_models=is_worker, asks_embedder=is_worker, signs=is_worker)
    flowering.STARTED.set(command)
    from perdure.workers.celery import app  # resolves the servers' addresses, so the settings are checked first

    # Celery warns because a pickled task can do anything as root. Here, workers accept JSON only.
    warnings.filterwarnings("ignore", "You're running the worker with superuser privileges")
    return app
