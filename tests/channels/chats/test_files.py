"""Photos, documents and attachments of chats become files of messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from perdure.channels.services.ingress import Ingress
from perdure.channels.services.protocol import Update
from perdure.channels.services.telegram import Telegram
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.sessions.reading import read_messages
from tests.channels import slack_server
from tests.channels.chats.installation import Installation
from tests.channels.chats.updates import said, slack_event
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.channels.telegram_server import CHAT, SECRET, TOKEN, TelegramServer
from tests.files.contents import BOMBS, pdf, png

PDF = pdf(2, size=20 * 2**20)
IMAGE = png(4_000, 4_000)
FILES = {"cat.png": IMAGE, "bill.pdf": PDF, "bomb.png": BOMBS["an image of ten billion pixels"]}


class FileServer:
    """The service's server of files. `authorizations` are those of the requests."""

    def __init__(self) -> None:
        self.authorizations: list[str | None] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.authorizations.append(self.headers.get("Authorization"))
                name = self.path.rpartition("/")[2]
                self.send_response({"gone": 404, "down": 503}.get(name, 200))
                self.end_headers()
                self.wfile.write(FILES.get(name, b""))

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        return Handler


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """A server of files on the host of the services."""
    made = FileServer()
    yield made
    made.close()


def stored(runtime: Runtime) -> list[tuple[str, list[tuple[str, str | None, int]]]]:
    """The messages of users: the text, and the type, name and size of each file."""
    with runtime.database.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT text, parts FROM inbox ORDER BY accepted_at").all()
    return [
        (row.text, [(each["media_type"], each.get("name"), each["size"]) for each in row.parts or ()]) for row in rows
    ]


def update_of(name: str, url: str, text: str = "", number: int = 1) -> Update:
    """An update of Discord or Slack with the file at `url`."""
    file_name = url.rpartition("/")[2]
    if name == "discord":
        attachment = {"id": "1", "url": url, "filename": file_name, "content_type": "image/png"}
        return said(text, number, attachments=[attachment])
    shared = {"id": "F1", "url_private": url, "name": file_name, "mimetype": "image/png"}
    return slack_event(text, f"{number}.1", subtype="file_share", files=[shared])


@pytest.mark.long
@pytest.mark.parametrize("name", ["discord", "slack"])
def test_files_of_a_chat(installation: Installation, file_server: FileServer, name: str) -> None:
    """With and without text. Slack's server gets the token, Discord's does not need it."""
    take = installation.ingress(name).take
    take(update_of(name, f"{file_server.url}/cat.png", "Look", 1))
    take(update_of(name, f"{file_server.url}/bill.pdf", "", 2))
    assert stored(installation.runtime) == [
        ("Look", [("image/png", "cat.png", len(IMAGE))]),
        ("", [("application/pdf", "bill.pdf", len(PDF))]),
    ]
    expected = None if name == "discord" else f"Bearer {slack_server.TOKEN}"
    assert file_server.authorizations == [expected, expected]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_files_that_cannot_be_read(
    installation: Installation, discord: DiscordServer, slack: SlackServer, file_server: FileServer, name: str
) -> None:
    """A refusal is explained in the chat. An outage is not: the update is repeated. No other host gets the token."""
    take = installation.ingress(name).take
    for number, (url, answer) in enumerate(
        [
            (f"{file_server.url}/bomb.png", "20,000 by 20,000 pixels"),
            (f"{file_server.url}/gone", "could not read the file"),
            (f"{file_server.url.replace('127.0.0.1', 'localhost')}/cat.png", "could not read the file"),
        ]
    ):
        take(update_of(name, url, "", number))
        assert answer in str([*discord.sent, *slack.sent][-1])
    with pytest.raises(Unavailable):
        take(update_of(name, f"{file_server.url}/down", "", 9))
    assert stored(installation.runtime) == []


@pytest.fixture
def telegram() -> Iterator[TelegramServer]:
    """A server that imitates Telegram."""
    made = TelegramServer()
    yield made
    made.close()


@pytest.mark.long
def test_photos_and_documents_of_telegram(
    runtime: Runtime, telegram: TelegramServer, run: Callable[[str], None]
) -> None:
    """20 MB of PDF and a photo of 4,000 pixels, stored once, described to the offline model, and erased."""
    telegram.files = {"small": png(), "large": IMAGE, "doc": PDF, "bomb": FILES["bomb.png"]}
    channel = Telegram(TOKEN, SECRET, telegram.url)
    runtime = replace(runtime, settings=runtime.settings.model_copy(update={"secret_key": None}))
    ingress = Ingress(runtime, channel)
    sizes = [{"file_id": each, "width": width, "height": width} for each, width in (("small", 90), ("large", 4_000))]
    document = {"file_id": "doc", "file_name": "bill.pdf", "mime_type": "application/pdf"}
    ana = {"id": 11, "is_bot": False, "first_name": "Ana"}
    contents: list[dict[str, Any]] = [
        {"photo": sizes, "caption": "What is this?"},
        {"document": document},
        {"photo": sizes},
        {"document": {"file_id": "bomb"}},
        {"document": {"file_id": "gone"}},
    ]
    for number, content in enumerate(contents):
        message = {"message_id": number, "date": 1, "chat": CHAT, "from": ana, **content}
        ingress.take({"update_id": number, "message": message})
    assert stored(runtime) == [
        ("What is this?", [("image/png", None, len(IMAGE))]),
        ("", [("application/pdf", "bill.pdf", len(PDF))]),
        ("", [("image/png", None, len(IMAGE))]),
    ]
    answers = [each["text"] for each in telegram.given("sendMessage")]
    assert len(answers) == 2
    assert "20,000 by 20,000 pixels" in answers[0]
    with runtime.database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM file_contents").scalar_one() == 2
        session_id, user = connection.exec_driver_sql("SELECT session_id, user_id FROM sessions").one()
        run(str(session_id))
        assert len(read_messages(runtime.database, session_id)) == 6
        runtime.eraser.erase(user)
        assert connection.exec_driver_sql("SELECT count(*) FROM file_contents").scalar_one() == 0
    ingress.close()
    channel.close()


def test_an_album_of_telegram_is_answered_together(runtime: Runtime, telegram: TelegramServer) -> None:
    """Telegram sends an album as one message for each photo, with one caption. Another photo is a turn of its own."""
    telegram.files = {"photo": png()}
    channel = Telegram(TOKEN, SECRET, telegram.url)
    ingress = Ingress(runtime, channel)
    photo = [{"file_id": "photo", "width": 4, "height": 3}]
    contents: list[dict[str, Any]] = [
        {"media_group_id": "1", "caption": "Which one?"},
        {"media_group_id": "1"},
        {"media_group_id": "1"},
        {},
    ]
    for number, content in enumerate(contents):
        sender = {"id": 11, "is_bot": False, "first_name": "Ana"}
        message = {"message_id": number, "date": 1, "chat": CHAT, "from": sender, "photo": photo, **content}
        ingress.take({"update_id": number, "message": message})
    with runtime.database.engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT count(*), array_agg(text ORDER BY position) FROM inbox GROUP BY turn_id ORDER BY 1 DESC"
        ).all()
    assert [tuple(each) for each in found] == [(3, ["Which one?", "", ""]), (1, [""])]
    ingress.close()
    channel.close()
