"""Photos, documents and attachments of chats become files of messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from perdure.channels.services import listening
from perdure.channels.services.ingress import FILE_ATTEMPTS, Ingress
from perdure.channels.services.protocol import Update
from perdure.channels.services.telegram import Telegram
from perdure.errors import ProviderError, Unavailable
from perdure.runtime import Runtime
from perdure.sessions.reading import read_messages
from perdure.turns.outbox import DeliveryFailed
from tests.channels import slack_server
from tests.channels.chats.installation import AllServers, Installation
from tests.channels.chats.updates import said, slack_event, telegram_said
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.channels.telegram_server import CHAT, SECRET, TOKEN, TelegramServer
from tests.files.contents import BOMBS, pdf, png
from tests.turns.harness import until

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
    """A refusal is explained in the chat. After an outage, the update is repeated. No other host gets the token."""
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


def update_of_any(name: str, text: str = "", number: int = 1, url: str = "") -> Update:
    """An update of a service with the file `down`, which cannot be read, or of text only."""
    match name, text:
        case "telegram", "":
            return telegram_said(None, number, document={"file_id": "down", "file_unique_id": "down"})
        case "telegram", _:
            return telegram_said(text, number)
        case _, "":
            return update_of(name, f"{url}/down", "", number)
        case _:
            return said(text, number) if name == "discord" else slack_event(text, f"{number}.1")


@pytest.mark.parametrize("name", ["discord", "slack", "telegram"])
@pytest.mark.parametrize(
    "error", [None, ProviderError("The store is gone."), OSError(28, "No space left on device")], ids=str
)
def test_a_file_that_can_never_be_read_is_refused(
    three: Installation, every: AllServers, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception | None
) -> None:
    """After a few attempts, its sender learns of it. An update that the service sends again gets as many attempts."""

    def fails(*_: Any, **__: Any) -> None:
        raise error or DeliveryFailed("answered with status 503", 503)

    if error is None:
        monkeypatch.setattr(three.channels[name], "download", fails)
    else:
        monkeypatch.setattr(three.channels[name], "download", lambda _, write: write(b"hello"))
        monkeypatch.setattr(type(three.runtime.files), "put", fails)
    take = three.ingress(name).take
    for _ in range(2):
        for _ in range(FILE_ATTEMPTS - 1):
            with pytest.raises(Unavailable):
                take(update_of_any(name))
        take(update_of_any(name))
    assert every.texts()[0] == "I could not read the file. Please send it again."
    assert stored(three.runtime) == []


@pytest.mark.parametrize("name", ["discord", "slack", "telegram"])
def test_a_file_of_one_person_does_not_stop_the_channel(
    three: Installation, every: AllServers, file_server: FileServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The updates of a connection are handled one after another, so a file must not be retried without limit."""
    monkeypatch.setattr(listening, "_AGAIN_S", 0.01)
    every.telegram.fail("getFile", 500, times=99)
    updates = [update_of_any(name, text, number, file_server.url) for number, text in enumerate(["", "hello"], 1)]
    every.telegram.updates = [dict(each) for each in updates if name == "telegram"]
    with three.listening(name):
        if name == "discord":
            every.discord.until(lambda: every.discord.identified, "the bot identifies itself")
        elif name == "slack":
            every.slack.until(lambda: every.slack.connected, "the bot connects")
        for each in updates if name != "telegram" else ():
            if name == "discord":
                every.discord.dispatch(each["t"], each["d"])
            else:
                every.slack.dispatch("events_api", dict(each))
        until(lambda: [text for text, _ in stored(three.runtime)] == ["hello"], "the next message is accepted")
    assert every.texts() == ["I could not read the file. Please send it again."]


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


DOC = "https://docs.google.com/document/d/1/edit"


@pytest.mark.parametrize(
    ("text", "file", "expected"),
    [
        ("Look", {"mode": "external", "title": "Plan", "url_private": DOC}, f"Look\nPlan ({DOC})"),
        (f"Look at <{DOC}>", {"mode": "external", "title": "Plan", "url_private": DOC}, f"Look at {DOC}"),
        ("", {"is_external": True, "name": "plan", "external_url": DOC, "url_private": "x"}, f"plan ({DOC})"),
        ("Look", {"mode": "external", "url_private": "attachments/F1"}, "Look"),
        ("Look", {"file_access": "check_file_info"}, "[a file, which is not shown] Look"),
    ],
    ids=["attached", "pasted", "alone", "without a URL", "of another workspace"],
)
def test_a_document_of_another_service_is_a_link(
    installation: Installation, slack: SlackServer, text: str, file: dict[str, Any], expected: str
) -> None:
    """Slack names it among the files, but its bytes are not Slack's. The message is not refused because of it."""
    installation.ingress("slack").take(slack_event(text, subtype="file_share", files=[{"id": "F1", **file}]))
    assert stored(installation.runtime) == [(expected, [])]
    assert slack.sent == []
