"""`perdure up`: everything on this machine, in the foreground, until Ctrl-C.

PostgreSQL and Redis are embedded ones under the data directory where no URLs are given; then
the gateway, two workers, beat and Flower, each started again when it dies. Settings are checked
before anything is started, and a process that refuses one stops all of them. On the way out the
gateway takes nothing in first, while the workers answer whom it lets wait; then the workers
drain and beat and Flower end; then the servers stop. A second Ctrl-C hastens them all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from kombu.utils.url import maybe_sanitize_url
from rich.console import Console

from perdure.cli.errors import WRONG_USAGE
from perdure.cli.serve.listening import require_free
from perdure.cli.serve.processes import Host, Port
from perdure.clock import SystemClock
from perdure.embedded import Running, postgres, redis, supervisor
from perdure.embedded.supervisor import Process
from perdure.settings import Settings
from perdure.workers import logs
from perdure.workers.assembly import check, require_database
from perdure.workers.flower import settings as flowering

WORKERS = 2

_LOOPBACK = "127.0.0.1"
_ENTRANCE, _WORK, _SERVERS = range(3)
_SERVERS_STOP_S = 90
_MARGIN_S = 5


def up(
    host: Host = _LOOPBACK,
    port: Port = 8080,
    flower_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Flower's pages.")] = 5555,
    *,
    no_flower: Annotated[bool, typer.Option("--no-flower", help="Leave Flower out.")] = False,
) -> None:
    """Run everything on this machine: servers, gateway, two workers, beat, Flower."""
    from perdure.channels.http.auth import Keys  # noqa: PLC0415 (as below)
    from perdure.database.migrate import migrate  # noqa: PLC0415 (the other commands start sooner without it)

    settings = Settings.load()
    settings.require_keys_for(host)
    Keys(settings, SystemClock())  # reads the key files, as the gateway will
    check(settings)
    logs.configure()
    require_free(host, port, "--port")
    if not no_flower:
        flowering.check_environment()
        require_free(_LOOPBACK, flower_port, "--flower-port")
    data_dir = settings.data_dir.resolve()
    status = 0
    with _interruptible(), ExitStack() as stack:
        environment, keepers = _servers(settings, data_dir, stack)
        migrate(environment["PERDURE_DATABASE_URL"])
        require_database(environment["PERDURE_DATABASE_URL"])  # a newer release may have migrated it
        settings.signing_key()
        settings.webhook_keys()
        pages = None if no_flower else _Pages(flower_port, flowering.own_credentials(settings), flowering.config_file())
        processes = [*keepers, *_processes(settings, environment, host, port, None if no_flower else flower_port)]
        redis_url = environment["PERDURE_REDIS_URL"]
        broker_url = settings.broker_url.get_secret_value() if settings.broker_url else redis_url
        welcome = partial(_welcome, data_dir, host, port, pages, (broker_url, redis_url))
        try:
            status = supervisor.run(processes, on_ready=welcome)
        finally:
            _ignore_signals()
    raise typer.Exit(status)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Until the supervisor takes the signals over, each of them ends the start like a Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        _ignore_signals()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        _say("Stopped before everything was started.")


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # stopping the servers cleanly has its own time limit


def _servers(settings: Settings, data_dir: Path, stack: ExitStack) -> tuple[Mapping[str, str], list[Process]]:
    """Start the servers that no URL names; return the processes' environment, and who keeps the servers up."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PERDURE_DATA_DIR": str(data_dir)}
    keepers = []
    for name, url, start in (
        ("postgres", settings.database_url, postgres.start),
        ("redis", settings.redis_url, redis.start),
    ):
        variable = "PERDURE_DATABASE_URL" if name == "postgres" else "PERDURE_REDIS_URL"
        if url is not None:
            environment[variable] = url.get_secret_value()
            continue
        directory = data_dir / name
        _say(f"Starting {name} in {directory} ...")
        server: Running = start(directory)
        stack.callback(_stop, name, server)
        environment[variable] = server.url
        keepers.append(_keeper(name, directory))
    return environment, keepers


def _keeper(name: str, directory: Path) -> Process:
    """The process that starts a server again, should it die."""
    argv = (sys.executable, "-P", "-m", "perdure.embedded", name, str(directory))
    return Process(name, argv, stop_rank=_SERVERS, stop_within_s=_SERVERS_STOP_S)


def _stop(name: str, server: Running) -> None:
    _say(f"Stopping {name} ...")
    if not server.stop():
        _say(f"{name} goes on: another process uses it.")


def _processes(
    settings: Settings, environment: Mapping[str, str], host: str, port: int, flower_port: int | None
) -> Iterator[Process]:
    leave_s = settings.shutdown.hard_exit_s + _MARGIN_S
    reached_at = _LOOPBACK if host in {"0.0.0.0", "::"} else host  # noqa: S104 (compared, not bound)

    def perdure(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "perdure.cli", *arguments)

    yield Process(
        "gateway",
        perdure("gateway", "--host", host, "--port", str(port)),
        environment,
        stop_within_s=leave_s,
        ready=partial(supervisor.listening, reached_at, port),
        final_status=WRONG_USAGE,
    )
    for number in range(1, WORKERS + 1):
        name = f"worker{number}"
        argv = perdure("worker", "--name", name, *(["--task-events"] if flower_port is not None else []))
        yield Process(name, argv, environment, stop_rank=_WORK, stop_within_s=leave_s, final_status=WRONG_USAGE)
    yield Process("beat", perdure("beat"), environment, stop_rank=_WORK, final_status=WRONG_USAGE)
    if flower_port is not None:
        yield Process(
            "flower",
            perdure("flower", "--address", _LOOPBACK, "--port", str(flower_port)),
            environment,
            stop_rank=_WORK,
            ready=partial(supervisor.listening, _LOOPBACK, flower_port),
            final_status=WRONG_USAGE,
        )


@dataclass(frozen=True, slots=True)
class _Pages:
    """Flower's pages: port, the user and password that it asks for by default, the file that may have others."""

    port: int
    credentials: tuple[str, str] | None
    file: Path | None

    def __str__(self) -> str:
        url = f"http://{_LOOPBACK}:{self.port}"
        if self.credentials is None:
            return url
        unless = f", unless {self.file.name} has others" if self.file else ""
        return f"{url}        (user {self.credentials[0]}, password {self.credentials[1]}{unless})"


def _welcome(data_dir: Path, host: str, port: int, pages: _Pages | None, celery: tuple[str, str]) -> None:
    """Print where everything is; `celery` has the URLs of broker and result backend, shown without passwords."""
    broker_url, backend_url = map(maybe_sanitize_url, celery)
    shown = f"[{host}]" if ":" in host else host
    lines = [
        "",
        "[bold]perdure is up.[/bold] Ctrl-C stops it; what it knows stays in " + str(data_dir),
        "",
        f"  gateway   http://{shown}:{port}        (its routes: /openapi.json)",
    ]
    if pages is not None:
        lines.append(f"  Flower    {pages}")
    lines.append(f"  broker    {broker_url}")
    if backend_url != broker_url:
        lines.append(f"  results   {backend_url}")
    program = typed()
    lines += [
        "",
        "Try, in another terminal:",
        "",
        f'  {program} send "what is 12*7+5?" --wait 20',
        f"  {program} chat",
        f'  curl http://{shown}:{port}/v1/messages -d \'{{"user_id": "local", "text": "what time is it?"}}\'',
        "",
    ]
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line, markup=line.startswith("[bold]"))


def typed() -> str:
    """What a person types to run this program: its name where a shell finds it, else the way to it from here."""
    program = Path(sys.executable).parent / "perdure"
    found = shutil.which("perdure")
    if not program.exists() or (found is not None and Path(found).absolute() == program):
        return "perdure"
    here = Path.cwd()
    return shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()
