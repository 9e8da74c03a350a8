"""Runs the channel test suite of `perdure.testing` against Telegram, and tests behaviour specific to Telegram."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from perdure.channels.services.buttons import Buttons
from perdure.channels.services.ingress import Ingress
from perdure.channels.services.protocol import Channel, Commanded, Edited, Place, Pressed, Said, Unsupported, Update
from perdure.channels.services.replies import ChatCarrier
from perdure.channels.services.telegram import Telegram
from perdure.channels.services.telegram_markup import render
from perdure.errors import Unauthorized
from perdure.runtime import Runtime
from perdure.testing.suites.channels import ChannelSuite
from perdure.turns.outbox import Undeliverable
from tests.channels.telegram_server import CHAT, SECRET, TOKEN, TelegramServer

ANA = {"id": 11, "is_bot": False, "first_name": "Ana"}


class TelegramHarness:
    """The Telegram channel, and the loopback server that imitates Telegram."""

    place = Place("21")

    def __init__(self, server: TelegramServer) -> None:
        self.server = server
        self._numbers = itertools.count(1)
        self.channel: Channel = Telegram(TOKEN, SECRET, server.url)

    def said(self, text: str) -> Update:
        number = next(self._numbers)
        message = {"message_id": number, "date": 1, "chat": CHAT, "from": ANA, "text": text}
        return {"update_id": number, "message": message}

    def sent(self) -> list[str]:
        return [each["text"] for each in self.server.given("sendMessage")]

    def received(self) -> list[tuple[str, bytes]]:
        return [(name, content) for _, name, content in self.server.received]

    def shown(self) -> list[str]:
        return list(self.server.shown.values())

    def fail(self) -> None:
        self.server.fail("sendMessage", 500)

    def pause(self, seconds: int) -> None:
        self.server.fail("sendMessage", 429, times=9, parameters={"retry_after": seconds})

    def signed(self, text: str) -> tuple[Mapping[str, str], bytes]:
        return {"x-telegram-bot-api-secret-token": SECRET}, json.dumps(self.said(text)).encode()


@pytest.fixture
def harness() -> Iterator[TelegramHarness]:
    """The channel and its server."""
    made = TelegramHarness(TelegramServer())
    yield made
    made.channel.close()
    made.server.close()


class TestTelegram(ChannelSuite):
    def test_a_signed_request_is_its_services(self, harness: TelegramHarness) -> None:  # type: ignore[override]
        """Telegram sends no signature, so the secret token in a header authenticates a request."""
        headers, body = harness.signed("hello")
        harness.channel.verify(headers, body)
        assert harness.channel.receive(headers, body).updates
        for given in ({}, {"x-telegram-bot-api-secret-token": SECRET[:-1]}, {"x-telegram-bot-api-secret-token": "é"}):
            with pytest.raises(Unauthorized):
                harness.channel.verify(given, body)


def test_without_a_secret_every_request_is_refused() -> None:
    """If no secret is configured, every request is refused. An unset secret must not match an empty header."""
    channel = Telegram(TOKEN, None, None)
    with pytest.raises(Unauthorized):
        channel.verify({"x-telegram-bot-api-secret-token": ""}, b"{}")
    channel.close()


def test_reads_commands_edits_buttons_and_photos(harness: TelegramHarness) -> None:
    """Commands, edits, photos and button presses become events of different types.

    An edit has the id of the edited message.
    """
    message: dict[str, Any] = dict(harness.said("/new@my_bot now")["message"])
    command = {**message, "entities": [{"type": "bot_command", "offset": 0, "length": 8}]}
    photo = {name: value for name, value in message.items() if name != "text"} | {"photo": []}
    query = {"id": "7", "from": ANA, "message": message, "data": "t"}
    events = [
        event
        for update in (
            {"message": command}, {"edited_message": message}, {"message": photo}, {"callback_query": query}
        )
        for event in harness.channel.parse(update)
    ]  # fmt: skip
    commanded, edited, unsupported, pressed = events
    assert isinstance(commanded, Commanded)
    assert (commanded.command, commanded.argument) == ("new", "now")
    assert isinstance(edited, Edited)
    assert edited.message_id == commanded.message_id
    assert isinstance(unsupported, Unsupported)
    assert unsupported.what == "a photo"
    assert isinstance(pressed, Pressed)
    assert (pressed.token, pressed.place.token) == ("t", "7")


def test_a_command_of_another_bot_is_ignored(harness: TelegramHarness) -> None:
    """A bot that is an administrator of a group is sent the commands of the group's other bots, too."""
    given = [
        {**harness.said(text)["message"], "entities": [{"type": "bot_command", "offset": 0, "length": len(text)}]}
        for text in ("/end@other_bot", "/end@My_Bot", "/end")
    ]
    found = [event for each in given for event in harness.channel.parse({"message": each})]
    assert [event.message_id for event in found if isinstance(event, Commanded)] == ["21:2", "21:3"]
    assert len(found) == 2
    assert len(harness.server.given("getMe")) == 1, "the name is read once"


def test_a_command_is_taken_if_the_bots_name_is_unknown(harness: TelegramHarness) -> None:
    """An outage of Telegram loses no command."""
    harness.server.fail("getMe", 500)
    message = {
        **harness.said("/end@my_bot")["message"],
        "entities": [{"type": "bot_command", "offset": 0, "length": 4}],
    }
    assert len(harness.channel.parse({"message": message})) == 1
    assert harness.server.given("getMe") == []


@pytest.mark.parametrize("kind", ["a reply", "a note"])
def test_a_message_to_a_topic_that_is_gone_goes_to_the_group(harness: TelegramHarness, kind: str) -> None:
    """Telegram refuses messages to a topic that was deleted, or whose group has no topics any more."""
    harness.server.fail("sendMessage", 400, description="Bad Request: message thread not found")
    place = replace(harness.place, thread="5")
    if kind == "a reply":
        harness.channel.send(place, "hello", (), "key")
    else:
        harness.channel.show_note(place, "hello", None)
    [sent] = harness.server.given("sendMessage")
    assert (sent["text"], sent["chat_id"]) == ("hello", "21")
    assert "message_thread_id" not in sent


def test_a_chat_that_does_not_exist_is_not_tried_in_another_form(
    harness: TelegramHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The reply is undeliverable, and nothing is logged about its form."""
    harness.server.fail("sendMessage", 400, times=9, description="Bad Request: chat not found")
    with pytest.raises(Undeliverable, match="the chat does not exist"):
        _carry(harness, "hello")
    assert len(harness.server.failures) == 8
    assert "form" not in caplog.text


def _carry(harness: TelegramHarness, text: str) -> None:
    body = json.dumps({"reply": {"text": text}}).encode()
    place = {"chat": harness.place.chat, "thread": harness.place.thread}
    ChatCarrier({"telegram": harness.channel}, Buttons([b""])).carry(
        {"channel": "telegram", "place": place}, body, "key"
    )


def test_refused_markup_is_sent_as_plain_text(harness: TelegramHarness) -> None:
    """If Telegram refuses the markup, the reply is sent as plain text."""
    harness.server.fail("sendMessage", 400, description="Bad Request: can't parse entities: no end tag")
    _carry(harness, "**a** <b>")
    sent = harness.server.given("sendMessage")[-1]
    assert sent["text"] == "**a** <b>"
    assert "parse_mode" not in sent


def test_a_user_who_blocked_the_bot_is_not_tried_again(harness: TelegramHarness) -> None:
    """If the user has blocked the bot, the delivery ends without further attempts."""
    harness.server.fail("sendMessage", 403, description="Forbidden: bot was blocked by the user")
    with pytest.raises(Undeliverable):
        harness.channel.send(harness.place, "hello", (), "key")


def test_markup_is_escaped() -> None:
    """Markup in a model's text is escaped, inside and outside code."""
    assert render("<i> `<b>`\n```py\n<u>```") == (
        '&lt;i&gt; <code>&lt;b&gt;</code>\n\n<pre><code class="language-py">&lt;u&gt;</code></pre>'
    )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"voice": {}}, "a voice"),
        ({"audio": {}}, "an audio"),
        ({"video_note": {}}, "a video note"),
        ({"location": {}}, "a location"),
        ({"contact": {}}, "a contact"),
        ({"poll": {}}, "a poll"),
        ({"sticker": {}}, "a sticker"),
        ({"new_chat_members": []}, None),
    ],
)
def test_what_cannot_be_read_gets_an_answer(harness: TelegramHarness, given: dict[str, Any], what: str | None) -> None:
    """A person who sends it learns that the agent cannot read it. Reports of the service are no messages."""
    message = {name: value for name, value in harness.said("")["message"].items() if name != "text"} | given
    events = harness.channel.parse({"message": message})
    assert [each.what for each in events if isinstance(each, Unsupported)] == ([] if what is None else [what])
    assert len(events) == (what is not None)


def test_captions_are_text(harness: TelegramHarness) -> None:
    """Of a document, of what cannot be read, edited, and as a command."""
    message = {name: value for name, value in harness.said("")["message"].items() if name != "text"}
    document = {**message, "document": {"file_id": "f", "file_name": "a.txt"}, "caption": "read this"}
    [said] = harness.channel.parse({"message": document})
    assert isinstance(said, Said)
    assert (said.text, [each.name for each in said.files]) == ("read this", ["a.txt"])
    [said] = harness.channel.parse({"message": {**message, "video": {}, "caption": "what is it?"}})
    assert isinstance(said, Said)
    assert said.text == "[a video, which is not shown] what is it?"
    [edited] = harness.channel.parse({"edited_message": {**document, "caption": "read that"}})
    assert isinstance(edited, Edited)
    assert edited.text == "read that"
    [edited] = harness.channel.parse({"edited_message": {**message, "video": {}, "caption": "and this?"}})
    assert isinstance(edited, Edited)
    assert edited.text == "[a video, which is not shown] and this?"
    entities = [{"type": "bot_command", "offset": 0, "length": 4}]
    [command] = harness.channel.parse({"message": {**document, "caption": "/new", "caption_entities": entities}})
    assert isinstance(command, Commanded)
    assert command.command == "new"


def test_a_group_that_became_a_supergroup_continues(harness: TelegramHarness, runtime: Runtime) -> None:
    """The new group has another id. Its messages are in the conversation and have the memories of the old one."""
    ingress = Ingress(runtime, harness.channel)
    old, new = {"id": -9, "type": "group"}, {"id": -1009, "type": "supergroup"}

    def update(chat: dict[str, Any], **given: Any) -> Update:
        made = harness.said("hello")
        return {**made, "message": {**made["message"], "chat": chat, **given}}

    ingress.take(update(old))
    ingress.take(update(old, migrate_to_chat_id=-1009))
    ingress.take(update(new, migrate_from_chat_id=-9, text="and now?"))
    with runtime.database.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT DISTINCT user_id, session_id FROM turns").all()
        texts = connection.exec_driver_sql("SELECT text FROM inbox ORDER BY accepted_at").scalars().all()
    assert len(rows) == 1
    assert texts == ["Ana: hello", "Ana: and now?"]


def test_a_title_of_a_group_has_no_author(harness: TelegramHarness, runtime: Runtime) -> None:
    """The agent reads who says something in a group. The title is what was said."""
    ingress = Ingress(runtime, harness.channel)
    group = {"id": -9, "type": "group"}
    command = [{"type": "bot_command", "offset": 0, "length": 4}]
    for text, entities in (("hello", []), ("/new", command), ("Plan a trip.", [])):
        made = harness.said(text)
        ingress.take({**made, "message": {**made["message"], "chat": group, "entities": entities}})
    with runtime.database.engine.connect() as connection:
        titles = connection.exec_driver_sql("SELECT title FROM conversations").scalars().all()
        texts = connection.exec_driver_sql("SELECT text FROM inbox ORDER BY accepted_at").scalars().all()
    assert (titles, texts) == (["Plan a trip."], ["Ana: hello", "Ana: Plan a trip."])


def test_an_update_is_acknowledged_only_after_it_was_taken(harness: TelegramHarness) -> None:
    """An update is acknowledged only after it is accepted, so that a crash loses no message."""
    harness.server.updates = [dict(harness.said("one")), dict(harness.said("two"))]
    taken: list[int] = []

    def failing(update: Update) -> None:
        taken.append(update["update_id"])
        if taken == [1, 2]:
            raise RuntimeError("the process dies")

    with pytest.raises(RuntimeError):
        harness.channel.listen(failing, threading.Event())
    assert [each.get("offset") for each in harness.server.given("getUpdates")] == [None]


def test_a_reply_full_of_emoji_is_within_telegrams_own_count(harness: TelegramHarness) -> None:
    """A reply is split by its length in UTF-16 units, because Telegram counts an emoji as two.

    No text is lost.
    """
    text = " ".join(["😀" * 9] * 350)
    assert len(text) <= harness.channel.most_chars
    _carry(harness, text)
    sent = harness.server.given("sendMessage")
    assert "".join(each["text"] for each in sent).replace(" ", "") == text.replace(" ", "")
    assert all(len(each["text"].encode("utf-16-le")) // 2 <= harness.channel.most_chars for each in sent)


def test_an_expired_button_is_still_marked(harness: TelegramHarness) -> None:
    """If Telegram refuses the answer to an old button press, the channel still writes the decision in the message."""
    harness.server.fail("answerCallbackQuery", 400, description="Bad Request: query is too old")
    harness.channel.mark(replace(harness.place, message="7", token="9"), "Approved: pay")
    [edited] = harness.server.given("editMessageText")
    assert edited["text"] == "Approved: pay"
