"""Runs the channel test suite of `perdure.testing` against the Discord and Slack channels."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perdure.channels.services.discord.channel import Discord
from perdure.channels.services.protocol import Channel, Place, Update
from perdure.channels.services.slack import Slack
from perdure.clock import SystemClock
from perdure.testing.suites.channels import ChannelSuite
from tests.channels import discord_server, slack_server
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ANA = {"id": "11", "username": "ana"}


class DiscordHarness:
    """The Discord channel, and the loopback server that imitates Discord."""

    place = Place("21")

    def __init__(self, server: DiscordServer) -> None:
        self.server = server
        public_key = KEY.public_key().public_bytes_raw().hex()
        self.channel: Channel = Discord(discord_server.TOKEN, public_key, server.url, SystemClock())

    def said(self, text: str) -> Update:
        message = {"id": self.server.new_id(), "channel_id": "21", "author": ANA, "content": text, "type": 0}
        return {"t": "MESSAGE_CREATE", "d": message}

    def sent(self) -> list[str]:
        return [each["content"] for each in self.server.sent]

    def received(self) -> list[tuple[str, bytes]]:
        return [(name, content) for _, name, content in self.server.received]

    def shown(self) -> list[str]:
        return list(self.server.shown.values())

    def fail(self) -> None:
        self.server.fail("/messages", 500)

    def pause(self, seconds: int) -> None:
        self.server.fail("/messages", 429, {"message": "slow down", "retry_after": seconds, "global": False}, times=9)

    def signed(self, text: str) -> tuple[Mapping[str, str], bytes]:
        data = {"name": "ask", "options": [{"name": "text", "type": 3, "value": text}]}
        given = {
            "id": "1",
            "application_id": "2",
            "token": "t",
            "type": 2,
            "channel_id": "21",
            "user": ANA,
            "data": data,
        }
        body, stamp = json.dumps(given).encode(), str(int(time.time()))
        signature = KEY.sign(stamp.encode() + body).hex()
        return {"x-signature-timestamp": stamp, "x-signature-ed25519": signature}, body


class SlackHarness:
    """The Slack channel, and the loopback server that imitates Slack."""

    place = Place("D1")

    def __init__(self, server: SlackServer) -> None:
        self.server = server
        self._numbers = itertools.count(1)
        self.channel: Channel = Slack(
            slack_server.TOKEN, slack_server.SIGNING_SECRET, slack_server.APP_TOKEN, server.url, SystemClock()
        )

    def said(self, text: str) -> Update:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        event: dict[str, Any] = {"type": "message", "channel": "D1", "channel_type": "im", "user": "U1"}
        return {"type": "event_callback", "event": {**event, "text": escaped, "ts": f"1.{next(self._numbers)}"}}

    def sent(self) -> list[str]:
        return [each["text"] for each in self.server.sent]

    def received(self) -> list[tuple[str, bytes]]:
        return [(name, content) for _, name, content in self.server.received]

    def shown(self) -> list[str]:
        return list(self.server.shown.values())

    def fail(self) -> None:
        self.server.fail("chat.postMessage", 500)

    def pause(self, seconds: int) -> None:
        self.server.fail("chat.postMessage", 429, "ratelimited", times=9, Retry_After=str(seconds))

    def signed(self, text: str) -> tuple[Mapping[str, str], bytes]:
        body = json.dumps(self.said(text)).encode()
        return {name.lower(): value for name, value in slack_server.signed(body, time.time()).items()}, body


class TestDiscord(ChannelSuite):
    @pytest.fixture
    def harness(self) -> Iterator[DiscordHarness]:
        """The channel and its server."""
        made = DiscordHarness(DiscordServer())
        yield made
        made.channel.close()
        made.server.close()


class TestSlack(ChannelSuite):
    @pytest.fixture
    def harness(self) -> Iterator[SlackHarness]:
        """The channel and its server."""
        made = SlackHarness(SlackServer())
        yield made
        made.channel.close()
        made.server.close()
