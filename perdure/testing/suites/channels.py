"""`ChannelSuite`: behavioural tests that every channel must pass."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from perdure.channels.services.protocol import MOST_NOTE_CHARS, Attachment, Button, Channel, Place, Said, Update
from perdure.errors import InvalidRequest, Unauthorized
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

TEXTS = [
    "hello",
    "/ is no command",
    "**bold** _it_ `code` [x](https://example.com) <b>&amp;</b> @everyone",
    "<@1> <!channel> <#2>",
    "```python\nprint('<&>')\n```",
    "저는 커피를 좋아합니다 👩‍👩‍👧‍👦",
    "a * b * c _ d `` e ` f [ g ( h ~ i | j > k # l + m - n = o { p } q . r !",
]
"""Texts with commands, markup, mentions, code, emoji and special characters."""

MALFORMED: list[Any] = [{}, {"type": None}, {"t": "MESSAGE_CREATE", "d": None}, {"event": []}, {"message": "text"}]

_MALFORMED_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_LONGEST_TOKEN = 64


class ChannelHarness(Protocol):
    """A channel that is connected to a simulated chat service, and methods that control the service."""

    channel: Channel

    place: Place
    """A private chat of the simulated service."""

    def said(self, text: str) -> Update:
        """An update of the service that reports a person's new message in a private chat."""
        ...

    def sent(self) -> list[str]:
        """The texts of the messages that the service has accepted, oldest first."""
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """The names and contents of the files that the service has accepted, oldest first."""
        ...

    def shown(self) -> list[str]:
        """The texts of the messages that the chat shows: as edited, and without the deleted ones. Oldest first."""
        ...

    def fail(self) -> None:
        """Make the service answer the next message with an internal error."""
        ...

    def pause(self, seconds: int) -> None:
        """Make the service refuse all messages and request a pause of `seconds`."""
        ...

    def signed(self, text: str) -> tuple[Mapping[str, str], bytes]:
        """The headers and body of a signed webhook request that reports a person's message with the text `text`.

        The signature's time is the present time. Header names are in lower case.
        """
        ...


class ChannelSuite:
    """Tests of a channel. Subclass it and define a fixture `harness` that returns a `ChannelHarness`."""

    @pytest.mark.parametrize("text", [each for each in TEXTS if not each.startswith(("/", "<"))])
    def test_reads_a_message(self, harness: ChannelHarness, text: str) -> None:
        """The event has the message's text and sender. A repeated update gives an equal event."""
        update = harness.said(text)
        [event] = harness.channel.parse(update)
        assert isinstance(event, Said)
        assert event.text == text
        assert event.sender.external_id
        assert not event.place.group
        assert harness.channel.parse(update) == [event]

    def test_gives_each_message_its_own_id(self, harness: ChannelHarness) -> None:
        """Messages with the same text are separate messages, not repetitions."""
        events = [event for _ in range(3) for event in harness.channel.parse(harness.said("ok"))]
        assert len({event.message_id for event in events if isinstance(event, Said)}) == 3

    @pytest.mark.parametrize("update", MALFORMED, ids=str)
    def test_refuses_a_malformed_update(self, harness: ChannelHarness, update: Any) -> None:
        """A malformed update yields no event, or raises one of the errors that the channel's caller handles."""
        try:
            events = harness.channel.parse(update)
        except _MALFORMED_ERRORS:
            return
        assert events == []

    @pytest.mark.parametrize("text", TEXTS)
    def test_sends_any_text(self, harness: ChannelHarness, text: str) -> None:
        """The service must not refuse a reply because of markup in its text."""
        harness.channel.send(harness.place, text, (), f"key of {text}")
        assert len(harness.sent()) == 1

    def test_sends_its_longest_text(self, harness: ChannelHarness) -> None:
        """A text of the maximum length is sent, even if escaping makes it longer."""
        for number, text in enumerate(("x" * harness.channel.most_chars, "&" * harness.channel.most_chars)):
            harness.channel.send(harness.place, text, (), f"key {number}")
        assert len(harness.sent()) == 2

    def test_sends_buttons(self, harness: ChannelHarness) -> None:
        """Buttons with tokens of the maximum length are sent."""
        buttons = [Button(label, label[0] * _LONGEST_TOKEN) for label in ("Approve", "Deny")]
        harness.channel.send(harness.place, "Really?", buttons, "key")
        assert len(harness.sent()) == 1

    @pytest.mark.parametrize(
        "file",
        [
            Attachment(b"\x89PNG\r\n\x1a\n" + bytes(2**16), "image.png", "image/png"),
            Attachment(b"a,b\r\n1,2", 'très "long" 图.csv', "text/csv"),
        ],
        ids=["an image", "a table"],
    )
    def test_sends_a_file(self, harness: ChannelHarness, file: Attachment) -> None:
        """The content arrives as it is, under a name with the same ending."""
        harness.channel.send_file(harness.place, file, "key")
        [(name, content)] = harness.received()
        assert content == file.data
        assert name.endswith(file.name[-4:])

    def test_a_failed_send_can_be_retried(self, harness: ChannelHarness) -> None:
        """If the service has an internal error, `send` raises an error after which the outbox tries again."""
        harness.fail()
        with pytest.raises(DeliveryFailed) as failed:
            harness.channel.send(harness.place, "hello", (), "key")
        assert not isinstance(failed.value, Undeliverable)
        harness.channel.send(harness.place, "hello", (), "key")
        assert len(harness.sent()) == 1

    def test_a_pause_is_reported(self, harness: ChannelHarness) -> None:
        """`send` raises an error with the length of the requested pause, so that the outbox waits that long."""
        harness.pause(30)
        with pytest.raises(NotAsked) as refused:
            harness.channel.send(harness.place, "hello", (), "key")
        assert refused.value.retry_s >= 30

    def test_a_note_changes_in_place(self, harness: ChannelHarness) -> None:
        """A note is one message, however often it changes. After its removal, the chat has the reply only."""
        channel, place = harness.channel, harness.place
        note = channel.show_note(place, "1 of 2", None)
        assert channel.show_note(place, "2 of 2", note) == note
        assert harness.shown() == ["2 of 2"]
        channel.send(place, "hello", (), "key")
        channel.remove_note(place, note)
        assert harness.shown() == ["hello"]

    @pytest.mark.parametrize("text", [*TEXTS, "&" * MOST_NOTE_CHARS, "<@" * (MOST_NOTE_CHARS // 2)])
    def test_a_note_has_any_text(self, harness: ChannelHarness, text: str) -> None:
        """The text is a tool's: the service must not refuse it because of markup or its length."""
        note = harness.channel.show_note(harness.place, text, None)
        harness.channel.show_note(harness.place, f"{text[:-1]}…", note)
        assert len(harness.shown()) == 1

    def test_a_note_waits_for_no_pause(self, harness: ChannelHarness) -> None:
        """If the service asks for a pause, `show_note` reports its length at once: a note is not urgent."""
        harness.pause(3)
        began = time.monotonic()
        with pytest.raises(NotAsked) as refused:
            harness.channel.show_note(harness.place, "1 of 2", None)
        assert refused.value.retry_s >= 3
        assert time.monotonic() - began < 2

    def test_a_deleted_note_is_undeliverable(self, harness: ChannelHarness) -> None:
        """A note that a person has deleted can be neither changed nor removed, whatever the number of attempts."""
        note = harness.channel.show_note(harness.place, "1 of 2", None)
        harness.channel.remove_note(harness.place, note)
        with pytest.raises(Undeliverable):
            harness.channel.show_note(harness.place, "2 of 2", note)
        with pytest.raises(Undeliverable):
            harness.channel.remove_note(harness.place, note)

    def test_threads_may_share_a_channel(self, harness: ChannelHarness) -> None:
        """One channel object serves all deliveries of a worker."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: harness.channel.send(harness.place, f"text {n}", (), f"key {n}"), range(24)))
        assert sorted(harness.sent()) == sorted(f"text {number}" for number in range(24))

    def test_a_signed_request_is_its_services(self, harness: ChannelHarness) -> None:
        """A signed request is accepted. A request with a changed body or without its signature is refused."""
        headers, body = harness.signed("hello")
        harness.channel.verify(headers, body)
        assert harness.channel.receive(headers, body).updates
        plain = {name: value for name, value in headers.items() if "signature" not in name}
        for given, content in ((headers, body + b" "), (plain, body), ({}, body), ({}, b"")):
            with pytest.raises(Unauthorized):
                harness.channel.verify(given, content)

    @pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[]", b"null", b"[" * 10_000, b"payload=%7B"])
    def test_a_malformed_request_is_refused(self, harness: ChannelHarness, body: bytes) -> None:
        """A malformed request raises an error that the gateway answers with 400."""
        with pytest.raises(InvalidRequest):
            harness.channel.receive({}, body)

    def test_close_may_be_called_twice(self, harness: ChannelHarness) -> None:
        """Closing a channel a second time, or before its first use, raises no error."""
        harness.channel.close()
        harness.channel.close()
