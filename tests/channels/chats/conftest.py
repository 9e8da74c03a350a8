"""Fixtures: imitations of Discord and Slack, an installation that uses both, and its gateway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.runtime import Runtime
from perdure.settings import Settings
from tests.channels import discord_server, slack_server
from tests.channels.chats.installation import Installation, Servers
from tests.channels.chats.updates import KEY
from tests.channels.conftest import BASE_URL
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
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
def gateway(installation: Installation) -> Iterator[TestClient]:
    """A gateway of the installation."""
    with TestClient(create_app(installation.runtime, lambda: True), base_url=BASE_URL) as client:
        yield client
