"""`perdure channels`: receives messages from chat services over connections that perdure opens."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.observe.alive import alive_file, touch
from perdure.servers.process.stop_signals import stop_signals

if TYPE_CHECKING:
    from perdure.channels.services.listening import Listening

_STOP_WITHIN_S = 20.0
_LOOK_S = 0.2
_LOOKS_A_TOUCH = 100


def channels() -> None:
    """Listen on chats: Discord's gateway, Slack's Socket Mode, Telegram's long polling.

    Channels that receive webhooks need only the gateway.
    """
    from perdure.assembly import addresses, assemble, check, require_database
    from perdure.channels.services import configured
    from perdure.channels.services.ingress import Ingress
    from perdure.channels.services.listening import Listening
    from perdure.settings import Settings
    from perdure.workers import logs
    from perdure.workers.publish.background import BackgroundWaker

    settings = Settings.load()
    check(settings, asks_models=False)
    logs.configure(form=settings.log.format)
    where = addresses(settings)
    require_database(settings, where.database_url)
    waker = BackgroundWaker(settings, where)
    runtime = assemble(settings, where.database_url, waker, where.redis_url)
    made = configured.channels(settings, runtime.clock)
    ingresses = [(each, Ingress(runtime, each)) for each in made.values() if each.listens]
    listening = Listening(runtime.database, ingresses)
    try:
        if not listening.any:
            raise Failure(
                "No channel to listen on: set PERDURE_DISCORD__TOKEN, PERDURE_SLACK__TOKEN and "
                "PERDURE_SLACK__APP_TOKEN, or PERDURE_TELEGRAM__TOKEN without PERDURE_TELEGRAM__WEBHOOK_SECRET.",
                WRONG_USAGE,
            )
        _run(listening, alive_file(settings.data_dir, "channels"))
    finally:
        stopped = listening.stop(_STOP_WITHIN_S)
        for _, ingress in ingresses:
            ingress.close()
        for each in made.values():
            each.close()
        waker.close()
        runtime.close()
    raise typer.Exit(0 if stopped else 1)


def _run(listening: Listening, alive: Path) -> None:
    """Listen until one of `stop_signals` arrives."""
    stopping = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True  # no `Event`: the signal may interrupt a call that holds the event's lock

    for number in stop_signals():
        signal.signal(number, end)
    listening.start()
    for look in itertools.count():
        if stopping:
            return
        if look % _LOOKS_A_TOUCH == 0 and listening.is_alive:
            touch(alive)
        time.sleep(_LOOK_S)
