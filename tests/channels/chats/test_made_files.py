"""Files that a line at the end of a reply names are sent to the chat."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.access.tenants import UserKey
from perdure.channels.services.buttons import Buttons
from perdure.channels.services.protocol import Attachment, Place
from perdure.channels.services.replies import ChatCarrier
from perdure.channels.services.telegram import Telegram
from perdure.errors import ProviderError
from perdure.files.results import describe_result, ending_files
from perdure.files.store import Owner
from perdure.turns.outbox import MAX_ATTEMPTS, DeliveryFailed
from tests.channels.chats.installation import AllServers, Installation
from tests.channels.chats.updates import said, slack_event, telegram_said
from tests.channels.discord_server import DiscordServer
from tests.channels.telegram_server import TOKEN, TelegramServer
from tests.files.contents import gif, png
from tests.turns.scripted import Scripted, says

IMAGE = png(640, 480)
USERS = {"discord": "discord:11", "slack": "slack:U1", "telegram": "telegram:11"}
UPDATES: dict[str, Any] = {"discord": said, "slack": slack_event, "telegram": telegram_said}
PATHS = {"discord": "/messages", "slack": "files.completeUploadExternal", "telegram": "sendPhoto"}
REFUSALS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "discord": [
        ("/messages", 413, {"body": {"code": 40005, "message": "Request entity too large"}}),
        ("/messages", 403, {"body": {"code": 50013, "message": "Missing Permissions"}}),
    ],
    "slack": [
        ("files.getUploadURLExternal", 200, {"error": "missing_scope"}),
        ("upload", 413, {}),
        ("upload", 403, {}),
    ],
    "telegram": [
        ("sendPhoto", 400, {}),
        ("sendPhoto", 400, {"description": "Bad Request: too many pixels"}),
        ("sendPhoto", 413, {"description": "Request Entity Too Large"}),
    ],
}
SERVICES = pytest.mark.parametrize("name", ["discord", "slack", "telegram"])


def line_of(installation: Installation, user: str, content: bytes = IMAGE) -> str:
    """Store a file of a user; returns the line that names it."""
    files = installation.runtime.files
    with files.spool() as spool:
        spool.write(content)
        stored = files.put(spool, Owner.of(UserKey(user)))
    return describe_result(files.rows([stored.file_id])[stored.file_id])


def reply(installation: Installation, name: str, text: str) -> None:
    """Accept a message on a service, and answer it with `text`. The delivery waits."""
    installation.use(Scripted(says(text)))
    installation.ingress(name).take(UPDATES[name]("Draw a circle."))
    installation.run_sessions()


def status(installation: Installation) -> list[tuple[str, int]]:
    """The status and the attempts of each delivery."""
    return [(row.status, row.attempts) for row in installation.sql("SELECT status, attempts FROM deliveries")]


def retry(installation: Installation) -> None:
    """Attempt the delivery again, as if the pause after a failed attempt were over."""
    with installation.runtime.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE perdure.deliveries SET due_at = perdure.perdure_now()")
    installation.work()


@SERVICES
@pytest.mark.parametrize("text", ["A circle.\n", ""])
def test_a_file_is_sent_in_place_of_its_line(three: Installation, every: AllServers, name: str, text: str) -> None:
    reply(three, name, f"{text}{line_of(three, USERS[name])}")
    three.work()
    assert [each for each in every.texts() if each] == ([text.strip()] if text else [])
    assert every.received() == [("image.png", IMAGE)]
    assert status(three) == [("delivered", 1)]


@SERVICES
def test_a_failed_upload_is_repeated_alone(three: Installation, every: AllServers, name: str) -> None:
    """The text before the file is not sent again."""
    reply(three, name, f"A circle.\n{line_of(three, USERS[name])}")
    send_file = three.channels[name].send_file

    def send_but_fail(*given: Any) -> None:
        three.channels[name].send_file = send_file  # type: ignore[method-assign]
        server: Any = getattr(every, name)
        server.fail(PATHS[name], 500)
        send_file(*given)

    three.channels[name].send_file = send_but_fail  # type: ignore[method-assign, assignment]
    three.work()
    assert every.received() == []
    retry(three)
    assert [each for each in every.texts() if each] == ["A circle."]
    assert every.received() == [("image.png", IMAGE)]
    assert status(three) == [("delivered", 2)]


@SERVICES
def test_the_line_is_sent_if_no_upload_is_confirmed(three: Installation, every: AllServers, name: str) -> None:
    """What follows the file arrives, too. An earlier attempt is enough for the text before the file."""
    lines = [line_of(three, USERS[name]), line_of(three, USERS[name], gif(2, 2))]
    reply(three, name, "\n".join(["A circle.", *lines]))
    channel, uploads = three.channels[name], list[str]()
    send_file = channel.send_file

    def fail_for_the_first(place: Place, file: Attachment, key: str) -> None:
        uploads.append(file.name)
        if file.media_type == "image/png":
            raise DeliveryFailed("no answer within 30 s")
        send_file(place, file, key)

    channel.send_file = fail_for_the_first  # type: ignore[method-assign]
    three.work()
    for _ in range(MAX_ATTEMPTS // 2 - 1):
        assert every.texts()[-1] == "A circle."
        retry(three)
    assert status(three) == [("pending", MAX_ATTEMPTS // 2)]
    retry(three)
    assert [each.replace("\\", "") for each in every.texts() if each] == ["A circle.", lines[0]]
    assert [each for each, _ in every.received()] == ["image.gif"]
    assert uploads == [*["image.png"] * (MAX_ATTEMPTS // 2), "image.gif"]
    assert status(three) == [("delivered", MAX_ATTEMPTS // 2 + 1)]


@SERVICES
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_line_is_sent_if_the_service_refuses_the_file(
    three: Installation, every: AllServers, name: str, number: int
) -> None:
    """The bot may lack a right, or the file may be too large. The reply is delivered all the same."""
    line = line_of(three, USERS[name])
    reply(three, name, line)
    server: Any = getattr(every, name)
    path, code, more = REFUSALS[name][number % len(REFUSALS[name])]
    server.fail(path, code, **more)
    if name == "telegram":
        server.fail("sendDocument", 400)
    three.work()
    assert every.received() == []
    assert [each.replace("\\", "") for each in every.texts()] == [line]
    assert status(three) == [("delivered", 1)]


@pytest.mark.parametrize("why", ["another user's", "deleted", "too large", "unreadable"])
def test_the_line_is_sent_if_the_file_cannot_be_read(
    three: Installation, every: AllServers, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A model may write any line. Only files of the turn's own user are sent."""
    line = line_of(three, "telegram:12" if why == "another user's" else USERS["telegram"])
    reply(three, "telegram", f"A circle.\n{line}")
    if why == "deleted":
        with three.runtime.database.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM perdure.files")
    if why == "too large":
        three.channels["telegram"].most_file_bytes = len(IMAGE) - 1
    if why == "unreadable":

        def fail(*_: Any) -> None:
            raise ProviderError("the bucket is down")

        monkeypatch.setattr(type(three.runtime.files), "read", fail)
    three.work()
    assert every.received() == []
    assert every.texts() == ["A circle.", line]
    assert status(three) == [("delivered", 1)]


def test_a_file_replaces_the_deferred_answer_of_a_command(three: Installation, discord: DiscordServer) -> None:
    """A reply that is only a file answers the interaction, which would else go on waiting."""
    made_ms = int(three.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    place = Place("21", message=str(made_ms << 22), token="900:tok")
    discord.acknowledge("tok")
    three.channels["discord"].send_file(place, Attachment(IMAGE, "image.png", "image/png"), "key")
    assert discord.received == [("tok", "image.png", IMAGE)]
    assert discord.sent == []


def test_an_unconfirmed_file_leaves_the_deferred_answer_to_its_line(
    three: Installation, discord: DiscordServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a reply that is only a file, nothing has answered the interaction before."""
    made_ms = int(three.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    target = {"channel": "discord", "place": {"chat": "21", "message": str(made_ms << 22), "token": "900:tok"}}
    line = line_of(three, USERS["discord"])
    body = json.dumps({"turn_id": str(UUID(int=1)), "reply": {"text": line}}).encode()

    def fail(*_: Any) -> None:
        raise DeliveryFailed("no answer within 30 s")

    monkeypatch.setattr(three.channels["discord"], "send_file", fail)
    discord.acknowledge("tok")
    read = Attachment(IMAGE, "image.png", "image/png")
    carrier = ChatCarrier(three.channels, Buttons([b""]), read_file=lambda *_: read)
    for _ in range(MAX_ATTEMPTS // 2):
        with pytest.raises(DeliveryFailed):
            carrier.carry(target, body, "one delivery")
    carrier.carry(target, body, "one delivery")
    assert ([each["content"] for each in discord.edited], discord.sent) == ([line], [])
    assert "discord has not confirmed a file in 6 attempts" in caplog.text


def test_a_repeated_file_is_dropped_by_discord(three: Installation, discord: DiscordServer) -> None:
    """Another worker uses the same nonce."""
    for _ in range(2):
        three.channels["discord"].send_file(Place("21"), Attachment(IMAGE, "image.png", "image/png"), "key")
    assert len(discord.sent) == 1


def test_a_file_of_slack_is_sent_to_its_thread(three: Installation, every: AllServers) -> None:
    three.channels["slack"].send_file(Place("C1", thread="1.1"), Attachment(IMAGE, "image.png", "image/png"), "key")
    assert [(each["channel_id"], each["thread_ts"]) for each in every.slack.shares] == [("C1", "1.1")]


@pytest.mark.parametrize(
    ("file", "methods"),
    [
        (Attachment(IMAGE, "image.png", "image/png"), ["sendPhoto"]),
        (Attachment(gif(2, 2), "image.gif", "image/gif"), ["sendDocument"]),
        (Attachment(png(640, 480, padding=10**7), "image.png", "image/png"), ["sendDocument"]),
        (Attachment(b"a,b", "table.csv", "text/csv"), ["sendDocument"]),
    ],
    ids=["a photo", "an animation", "a large image", "a table"],
)
def test_only_a_photo_is_sent_as_one_to_telegram(
    three: Installation, telegram: TelegramServer, file: Attachment, methods: list[str]
) -> None:
    three.channels["telegram"].send_file(Place("21"), file, "key")
    assert [each for each, _, _ in telegram.received] == methods


@pytest.mark.parametrize(
    "description", ["Bad Request: PHOTO_INVALID_DIMENSIONS", "Bad Request: message thread not found"]
)
def test_a_photo_that_telegram_refuses_is_sent_otherwise(
    three: Installation, telegram: TelegramServer, description: str
) -> None:
    """As a document; if the topic is gone, to the group."""
    telegram.fail("sendPhoto", 400, description=description)
    channel = three.channels["telegram"]
    assert isinstance(channel, Telegram)
    channel.send_file(replace(Place("21"), thread="5"), Attachment(IMAGE, "image.png", "image/png"), "key")
    [(method, _, _)] = telegram.received
    assert method == ("sendPhoto" if "thread" in description else "sendDocument")


def test_an_upload_that_takes_too_long_is_not_completed_later(
    three: Installation, telegram: TelegramServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the chat gets the file twice, because the delivery is attempted again."""
    monkeypatch.setattr("perdure.channels.services.telegram.UPLOAD_S", 2.0)
    telegram.reads.clear()
    content = bytes(2 * 10**7)  # more than the sockets' buffers take
    with pytest.raises(DeliveryFailed, match="no answer within 2 s"):
        three.channels["telegram"].send_file(Place("21"), Attachment(content, "a.bin", "application/zip"), "key")
    telegram.reads.set()
    assert telegram.cut.wait(30)
    assert telegram.received == []


def test_an_upload_may_be_answered_later_than_a_message(
    monkeypatch: pytest.MonkeyPatch, telegram: TelegramServer
) -> None:
    """Telegram answers when it has stored the file, which a repetition would show twice."""
    monkeypatch.setattr("perdure.channels.services.telegram.TIMEOUT_S", 0.2)
    channel = Telegram(TOKEN, None, telegram.url)
    telegram.reads.clear()
    answers = threading.Timer(1.0, telegram.reads.set)
    answers.start()
    channel.send_file(Place("21"), Attachment(IMAGE, "image.png", "image/png"), "key")
    answers.join()
    channel.close()
    assert [name for _, name, _ in telegram.received] == ["image.png"]


LINE = "[image: image/png, 68 bytes; file 01931e71-20c4-7a05-8f3b-5d0f6a1e9b42]"


@pytest.mark.parametrize(
    ("text", "rest", "count"),
    [
        ("A circle.", "A circle.", 0),
        (f"A circle.\n{LINE}", "A circle.", 1),
        (f"A circle.\n\n{LINE}\n{LINE}\n", "A circle.\n", 2),
        (f"{LINE}\nA circle.", f"{LINE}\nA circle.", 0),
        (f"```\n{LINE}\n```", f"```\n{LINE}\n```", 0),
        (f"See {LINE}", f"See {LINE}", 0),
        (LINE, "", 1),
        ("", "", 0),
        ("\n".join([LINE] * 30), "\n".join([LINE] * 10), 20),
    ],
    ids=range(9),
)
def test_the_lines_at_the_end_of_a_reply(text: str, rest: str, count: int) -> None:
    found, files = ending_files(text)
    assert (found, len(files)) == (rest, count)


@given(st.lists(st.sampled_from(["a", "", LINE, "\u2028", "\r"]), max_size=30))
def test_no_text_is_lost_beside_the_lines(lines: list[str]) -> None:
    text = "\n".join(lines)
    found, files = ending_files(text)
    assert "\n".join([found, *(line for _, line in files)]).strip() == text.strip()
