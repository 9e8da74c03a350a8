"""`perdure channels`: listens until it is told to stop, and says what is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text

from tests.channels import discord_server
from tests.channels.discord_server import DiscordServer
from tests.cli.conftest import Environment, Perdure
from tests.turns.harness import until


@pytest.fixture
def discord() -> Iterator[DiscordServer]:
    """Discord."""
    made = DiscordServer()
    yield made
    made.close()


def test_it_listens_until_a_signal(perdure: Perdure, environment: Environment, discord: DiscordServer) -> None:
    """A message that Discord sends is accepted by this process; SIGTERM ends it with status 0."""
    given = {"PERDURE_DISCORD__TOKEN": discord_server.TOKEN, "PERDURE_DISCORD__API_URL": discord.url}
    process = perdure.start("channels", env={**environment, **given})
    engine = create_engine(environment["PERDURE_DATABASE_URL"])
    try:
        discord.until(lambda: discord.identified, "the bot identifies itself")
        author = {"id": "11", "username": "ana"}
        message = {"id": "5", "channel_id": "21", "author": author, "content": "hello", "type": 0}
        discord.dispatch("MESSAGE_CREATE", message)

        def accepted() -> bool:
            with engine.connect() as connection:
                return connection.execute(text("SELECT user_id FROM inbox")).scalars().all() == ["discord:11"]

        until(accepted, "the message is accepted")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        engine.dispose()


def test_without_a_channel_it_says_which_settings_it_needs(perdure: Perdure) -> None:
    """Status 2: a supervisor does not start it again."""
    done = perdure("channels")
    assert (done.returncode, "PERDURE_DISCORD__TOKEN" in done.stderr) == (2, True)


def test_a_malformed_token_is_a_wrong_setting(perdure: Perdure, environment: Environment) -> None:
    """The message names the variable, not its value."""
    done = perdure("channels", env={**environment, "PERDURE_DISCORD__TOKEN": "not-a-token"})
    assert (done.returncode, "PERDURE_DISCORD__TOKEN" in done.stderr) == (2, True)
    assert "not-a-token" not in done.stderr
    key = {"PERDURE_DISCORD__TOKEN": discord_server.TOKEN, "PERDURE_DISCORD__PUBLIC_KEY": "xyz"}
    done = perdure("channels", env={**environment, **key})
    assert (done.returncode, "PERDURE_DISCORD__PUBLIC_KEY" in done.stderr) == (2, True)
