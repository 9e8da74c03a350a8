"""Commands that are one process of the system each: migrate, gateway, worker, beat, flower."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from perdure.cli.serve.listening import bind, require_free
from perdure.clock import SystemClock
from perdure.queues import QUEUES
from perdure.resilience.kill_reports import Kills
from perdure.settings import Settings
from perdure.workers import logs
from perdure.workers.application import CONCURRENCY
from perdure.workers.assembly import addresses, assemble, check, database_address, require_database
from perdure.workers.flower import guard
from perdure.workers.flower import settings as flowering
from perdure.workers.publish.background import BackgroundWaker

_FLOWER_PORT = 5555

Host = Annotated[str, typer.Option(help="Address to listen on; anything but loopback needs PERDURE_API_KEYS.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")]


def migrate() -> None:
    """Bring the database to the tables of this release."""
    from perdure.database.migrate import migrate as migrate_database  # noqa: PLC0415 (as in gateway)

    settings = Settings.load()
    logs.configure()
    migrate_database(database_address(settings))


def gateway(host: Host = "127.0.0.1", port: Port = 8080) -> None:
    """Serve the HTTP gateway."""
    from perdure.channels.http.app import create_app  # noqa: PLC0415 (the other commands start in half the time)
    from perdure.channels.http.auth import Keys  # noqa: PLC0415 (the same)
    from perdure.cli.serve.server import serve  # noqa: PLC0415 (the same)

    settings = Settings.load()
    settings.require_keys_for(host)
    Keys(settings, SystemClock())  # reads the key files: one that cannot be read stops the start
    check(settings, asks_models=False)
    logs.configure()
    where = addresses(settings)
    require_database(where.database_url)
    waker = BackgroundWaker(settings, where)
    runtime = assemble(settings, where.database_url, waker, where.redis_url)
    kills = Kills(where.redis_url, settings.redis_prefix)

    def close() -> None:
        waker.close()
        kills.close()
        if runtime.redis_memory is not None:
            runtime.redis_memory.close()
        if runtime.breakers is not None:
            runtime.breakers.close()
        runtime.database.close()

    try:
        app, listener = create_app(runtime, waker.reachable, kills.lately), bind(host, port, "--port")
    except BaseException:
        close()
        raise
    raise typer.Exit(serve(app, listener, settings.shutdown, close))


def worker(
    queues: Annotated[str, typer.Option(help="Which queues to serve, with commas between.")] = ",".join(QUEUES),
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks at once; they mostly wait.")] = CONCURRENCY,
    name: Annotated[str, typer.Option(help="The worker's name, before the @ and the host's.")] = "",
    *,
    task_events: Annotated[
        bool, typer.Option("--task-events", help="Tell of each task from the start; else while Flower runs.")
    ] = False,
) -> None:
    """Run turns and all other queued tasks."""
    chosen = [queue.strip() for queue in queues.split(",") if queue.strip()]
    unknown = [queue for queue in chosen if queue not in QUEUES]
    if unknown or not chosen:
        raise typer.BadParameter(f"{queues!r}; accepted: {', '.join(QUEUES)}", param_hint="--queues")
    node = f"{name or f'worker-{os.getpid()}'}@%h"
    _celery(
        Settings.load(),
        "worker",
        f"--hostname={node}",
        f"--queues={','.join(chosen)}",
        f"--concurrency={concurrency}",
        "--pool=threads",
        "--without-gossip",
        "--without-mingle",
        "--loglevel=INFO",
        *(["--task-events"] if task_events else []),
    )


def beat() -> None:
    """Put scheduled work into the queue when its time comes."""
    settings = Settings.load()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    _celery(settings, "beat", f"--schedule={settings.data_dir / 'beat-schedule'}", "--loglevel=INFO")


def flower(
    address: Annotated[
        str | None,
        typer.Option(help="Address; anything but loopback needs FLOWER_BASIC_AUTH. Default: FLOWER_ADDRESS, 127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the pages. Default: FLOWER_PORT, 5555")
    ] = None,
) -> None:
    """Show workers and tasks on web pages."""
    settings = Settings.load()  # before the variables are read: `.env` may have them
    flowering.check_environment()
    address = address or os.environ.get("FLOWER_ADDRESS", flowering.LOOPBACK)
    port = port or int(os.environ.get("FLOWER_PORT", _FLOWER_PORT))
    flowering.require_authentication(address)
    require_free(address, port, "--port")
    guard.guard(settings.flower.hosts)
    _celery(settings, "flower", f"--address={address}", f"--port={port}", "--persistent=False")


def _celery(settings: Settings, *argv: str) -> None:
    """Become a process of Celery's, configured as `celery -A perdure` would be.

    Raises:
        SettingsError: a setting is wrong.
    """
    check(settings, asks_models=argv[0] == "worker", asks_embedder=argv[0] == "worker")
    flowering.STARTED.set(argv[0])
    from perdure.workers.celery import app  # noqa: PLC0415 (importing it looks for the servers)

    raise typer.Exit(app.start(["--quiet", *argv]) or 0)
