"""Fixtures: imitations of Discord and Slack, an installation that uses both, and its gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.channels.services.telegram import Telegram
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels import discord_server, slack_server, telegram_server
from tests.channels.chats.installation import AllServers, Installation, Servers
from tests.channels.chats.updates import KEY
from tests.channels.conftest import BASE_URL
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.channels.telegram_server import TelegramServer
from tests.conftest import RecordingWaker


@pytest.fixture
def discord() -> Iterator[DiscordServer]:
    """A server that imitates Discord."""
    made = DiscordServer()
    yield made
    made.close()


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    """A server that imitates Slack."""
    made = SlackServer()
    yield made
    made.close()


@pytest.fixture
def servers(discord: DiscordServer, slack: SlackServer) -> Servers:
    """The servers that imitate Discord and Slack."""
    return Servers(discord, slack)


@pytest.fixture
def installation(
    runtime: Runtime, waker: RecordingWaker, discord: DiscordServer, slack: SlackServer
) -> Iterator[Installation]:
    """An installation whose channels use the servers that imitate Discord and Slack."""
    settings = Settings(
        _env_file=None,
        secret_key="the secret of these tests, long enough",  # type: ignore[arg-type]
        discord={  # type: ignore[arg-type]
            "token": discord_server.TOKEN,
            "public_key": KEY.public_key().public_bytes_raw().hex(),
            "api_url": discord.url,
        },
        slack={  # type: ignore[arg-type]
            "token": slack_server.TOKEN,
            "app_token": slack_server.APP_TOKEN,
            "signing_secret": slack_server.SIGNING_SECRET,
            "api_url": slack.url,
        },
    )
    made = Installation(replace(runtime, settings=settings), waker)
    yield made
    made.close()


@pytest.fixture
def telegram() -> Iterator[TelegramServer]:
    """A server that imitates Telegram."""
    made = TelegramServer()
    yield made
    made.close()


@pytest.fixture
def every(discord: DiscordServer, slack: SlackServer, telegram: TelegramServer) -> AllServers:
    """The servers that imitate all services."""
    return AllServers(discord, slack, telegram)


@pytest.fixture
def three(installation: Installation, telegram: TelegramServer) -> Installation:
    """The installation, which has a channel for Telegram, too."""
    installation.channels["telegram"] = Telegram(telegram_server.TOKEN, None, telegram.url)
    return installation


@pytest.fixture
def gateway(installation: Installation, discord: DiscordServer) -> Iterator[TestClient]:
    """A gateway of the installation. The imitation of Discord learns when a response has been sent completely."""
    app = create_app(installation.runtime, lambda: True)

    async def observed(scope: Any, receive: Any, send: Any) -> None:
        content, status = b"", 0

        async def receive_and_keep() -> Any:
            nonlocal content
            message = await receive()
            content += message.get("body", b"")
            return message

        async def send_and_tell(message: Any) -> None:
            nonlocal status
            await send(message)
            status = message.get("status", status)
            is_over = message["type"] == "http.response.body" and not message.get("more_body")
            if is_over and status == HTTPStatus.OK and scope["path"] == "/v1/channels/discord":
                discord.acknowledge(json.loads(content)["token"])

        await app(scope, receive_and_keep, send_and_tell)

    with TestClient(observed, base_url=BASE_URL) as client:
        yield client
