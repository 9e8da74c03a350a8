"""The servers and processes of `perdure up`, and the addresses that it prints once they run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kombu.utils.url import maybe_sanitize_url
from rich.console import Console

from perdure.channels.services.configured import listens
from perdure.cli.errors import WRONG_USAGE
from perdure.cli.serve.options import LOOPBACK
from perdure.servers import Running, postgres, redis, supervisor
from perdure.servers.supervisor import SupervisedProcess
from perdure.settings import Settings

WORKERS = 2

_WORK, _SERVERS = 1, 2
"""Ranks for the order of stopping: processes with a lower rank stop first. The gateway has rank 0."""

_SERVERS_STOP_S = 90
_MARGIN_S = 5


def start_servers(
    settings: Settings, data_dir: Path, stack: ExitStack
) -> tuple[Mapping[str, str], list[SupervisedProcess]]:
    """Start the servers for which no URL is set.

    Returns the environment for the other processes, and for each embedded server a process that restarts the server
    when the server dies.
    """
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


def _keeper(name: str, directory: Path) -> SupervisedProcess:
    """The keeper of a server: a process that restarts the server when the server dies."""
    argv = (sys.executable, "-P", "-m", "perdure.servers", name, str(directory))
    return SupervisedProcess(name, argv, stop_rank=_SERVERS, stop_within_s=_SERVERS_STOP_S)


def _stop(name: str, server: Running) -> None:
    _say(f"Stopping {name} ...")
    if not server.stop():
        _say(f"{name} keeps running: another process uses it.")


def processes_of(
    settings: Settings, environment: Mapping[str, str], host: str, port: int, flower_port: int | None
) -> Iterator[SupervisedProcess]:
    """The gateway, the workers, beat, `channels` if a channel listens, and Flower unless `flower_port` is `None`."""
    stop_s = settings.shutdown.hard_exit_s + _MARGIN_S
    client_host = LOOPBACK if host in {"0.0.0.0", "::"} else host  # noqa: S104 (compared, not bound)

    def perdure(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "perdure.cli", *arguments)

    yield SupervisedProcess(
        "gateway",
        perdure("gateway", "--host", host, "--port", str(port)),
        environment,
        stop_within_s=stop_s,
        ready=partial(supervisor.listening, client_host, port),
        final_status=WRONG_USAGE,
    )
    for number in range(1, WORKERS + 1):
        name = f"worker{number}"
        argv = perdure("worker", "--name", name, *(["--task-events"] if flower_port is not None else []))
        yield SupervisedProcess(
            name, argv, environment, stop_rank=_WORK, stop_within_s=stop_s, final_status=WRONG_USAGE
        )
    yield SupervisedProcess("beat", perdure("beat"), environment, stop_rank=_WORK, final_status=WRONG_USAGE)
    if listens(settings):
        yield SupervisedProcess(
            "channels", perdure("channels"), environment, stop_within_s=stop_s, final_status=WRONG_USAGE
        )
    if flower_port is not None:
        yield SupervisedProcess(
            "flower",
            perdure("flower", "--address", LOOPBACK, "--port", str(flower_port)),
            environment,
            stop_rank=_WORK,
            ready=partial(supervisor.listening, LOOPBACK, flower_port),
            final_status=WRONG_USAGE,
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """Flower's pages: the port, the default user and password, and a configuration file that may override both."""

    port: int
    credentials: tuple[str, str] | None
    file: Path | None

    def __str__(self) -> str:
        url = f"http://{LOOPBACK}:{self.port}"
        if self.credentials is None:
            return url
        unless = f", unless {self.file.name} sets others" if self.file else ""
        return f"{url}        (user {self.credentials[0]}, password {self.credentials[1]}{unless})"


def welcome(data_dir: Path, host: str, port: int, pages: Pages | None, celery: tuple[str, str]) -> None:
    """Print the addresses. `celery` has the URLs of the broker and the result backend, printed without passwords."""
    broker_url, backend_url = map(maybe_sanitize_url, celery)
    shown = f"[{host}]" if ":" in host else host
    lines = [
        "",
        "[bold]perdure is up.[/bold] Ctrl-C stops it; its data stays in " + str(data_dir),
        "",
        f"  chat      http://{shown}:{port}/",
        f"  gateway   http://{shown}:{port}/v1     (its routes: /openapi.json; OpenAI clients: this base URL)",
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
    """The shell command for this program: `perdure` if the shell finds this program by that name, else its path."""
    program = Path(sys.executable).parent / "perdure"
    found = shutil.which("perdure")
    if not program.exists() or (found is not None and Path(found).absolute() == program):
        return "perdure"
    here = Path.cwd()
    return shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
