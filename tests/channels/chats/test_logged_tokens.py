"""No token of a chat service appears in a log: a log is read by more people than the settings are."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from perdure.channels.services.protocol import Place, Shared
from perdure.settings import LogFormat
from perdure.workers import logs
from tests.channels import discord_server, slack_server, telegram_server
from tests.channels.chats.installation import AllServers, Installation

TOKENS = (
    telegram_server.TOKEN, slack_server.TOKEN, slack_server.APP_TOKEN, slack_server.SIGNING_SECRET, discord_server.TOKEN
)  # fmt: skip


@contextmanager
def _logged(configure: Callable[[], None]) -> Iterator[io.StringIO]:
    """What is written to the log within the block, in a process that has called `configure`."""
    root, before, levels = logging.getLogger(), threading.excepthook, _levels()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    configure()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    written = io.StringIO()
    handler.stream = written
    try:
        yield written
    finally:
        root.handlers, threading.excepthook = handlers, before
        root.setLevel(level)
        for name, each in levels.items():
            logging.getLogger(name).setLevel(each)


def _levels() -> dict[str, int]:
    return {name: each.level for name, each in logging.root.manager.loggerDict.items() if hasattr(each, "level")}


def _as_an_application() -> None:
    """The log of an application that shows the lines of all libraries, as `celery worker -l INFO` does."""
    logging.basicConfig(level=logging.INFO, force=True)
    for name in _levels():
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "configure",
    [
        logs.configure,
        lambda: logs.configure(form=LogFormat.JSON),
        lambda: logs.configure(logging.DEBUG),
        _as_an_application,
    ],
    ids=["text", "json", "debug", "application"],
)
def test_no_token_is_logged(three: Installation, every: AllServers, configure: Callable[[], None]) -> None:
    """Telegram's API has the bot's token in each URL, and HTTP clients log URLs at INFO."""
    chats = {"telegram": "21", "discord": "21", "slack": "D1"}
    with _logged(configure) as written:
        for name, chat in chats.items():
            three.channels[name].send(Place(chat), "Hello.", (), f"to {name}")
        telegram: Any = three.channels["telegram"]
        every.telegram.files["f1"] = b"a file"
        telegram.download(Shared("f1"), lambda _: None)
        stop = threading.Event()
        every.telegram.updates.append(_update())
        telegram.listen(lambda _: stop.set(), stop)
        logging.getLogger("perdure").info("the end")

    assert len(every.texts()) == len(chats)
    assert "the end" in written.getvalue()
    assert [token for token in TOKENS if token in written.getvalue()] == []


def _update() -> dict[str, Any]:
    person = {"id": 11, "is_bot": False, "first_name": "Ana"}
    return {
        "update_id": 1,
        "message": {"message_id": 1, "date": 1, "chat": telegram_server.CHAT, "from": person, "text": "hi"},
    }


@pytest.mark.parametrize("client", ["httpx", "httpx2", "httpcore", "urllib3", "botocore", "google_genai", "groq"])
def test_requests_of_clients_are_not_logged(client: str) -> None:
    """A process of perdure logs no line for each request of a library, whichever client the library uses."""
    with _logged(logs.configure) as written:
        logging.getLogger(f"{client}.part").info("HTTP Request: POST https://example.com/?key=%s", TOKENS[0])
        logging.getLogger(client).info("HTTP Request: POST %s", httpx2.URL("https://example.com/?key=1"))
        logging.getLogger(client).warning("the end")

    assert [line.split()[-1] for line in written.getvalue().splitlines()] == ["end"]
