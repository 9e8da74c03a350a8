"""`perdure channels` accepts messages until it gets a signal, and reports missing settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.channels import discord_server, telegram_server
from tests.channels.discord_server import DiscordServer
from tests.channels.telegram_server import TelegramServer
from tests.cli.conftest import Environment, Perdure
from tests.processes.faults import wait_until


@pytest.fixture
def discord() -> Iterator[DiscordServer]:
    """A server that imitates Discord."""
    made = DiscordServer()
    yield made
    made.close()


@pytest.mark.long
def test_a_message_is_answered_by_the_processes(
    perdure: Perdure, environment: Environment, discord: DiscordServer
) -> None:
    """`perdure channels` accepts a message and a worker answers it. SIGTERM ends both processes with status 0."""
    given = {"PERDURE_DISCORD__TOKEN": discord_server.TOKEN, "PERDURE_DISCORD__API_URL": discord.url}
    commands = (("channels",), ("worker", "--concurrency", "4"))
    processes = [perdure.start(*each, env={**environment, **given}) for each in commands]
    try:
        discord.until(lambda: discord.identified, "the bot identifies itself")
        author = {"id": "11", "username": "ana"}
        message = {"id": "5", "channel_id": "21", "author": author, "content": "what is 12*7+5?", "type": 0}
        discord.dispatch("MESSAGE_CREATE", message)
        discord.until(lambda: any("89" in each["content"] for each in discord.sent), "the reply")
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.long
def test_telegram_is_answered_by_the_processes(perdure: Perdure, environment: Environment) -> None:
    """`perdure channels` receives a message by long polling. The user gets a typing indicator and one reply."""
    telegram = TelegramServer()
    given = {"PERDURE_TELEGRAM__TOKEN": telegram_server.TOKEN, "PERDURE_TELEGRAM__API_URL": telegram.url}
    commands = (("channels",), ("worker", "--concurrency", "4"))
    processes = [perdure.start(*each, env={**environment, **given}) for each in commands]
    try:
        sender = {"id": 11, "is_bot": False, "first_name": "Ana"}
        text = {"message_id": 5, "date": 1, "chat": telegram_server.CHAT, "from": sender, "text": "what is 12*7+5?"}
        telegram.updates.append({"update_id": 1, "message": text})
        wait_until(lambda: any("89" in each["text"] for each in telegram.given("sendMessage")), "the reply", 60)
        assert telegram.given("sendChatAction")
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
        telegram.close()
    assert len([each for each in telegram.given("sendMessage") if "89" in each["text"]]) == 1


def test_without_a_channel_it_says_which_settings_it_needs(perdure: Perdure) -> None:
    """If no channel is configured, the command names the required settings.

    It exits with 2, so that supervisors do not restart it.
    """
    done = perdure("channels")
    assert (done.returncode, "PERDURE_DISCORD__TOKEN" in done.stderr) == (2, True)


@pytest.mark.long
def test_a_malformed_token_is_a_wrong_setting(perdure: Perdure, environment: Environment) -> None:
    """The message about a malformed token names the variable, not its value."""
    done = perdure("channels", env={**environment, "PERDURE_DISCORD__TOKEN": "not-a-token"})
    assert (done.returncode, "PERDURE_DISCORD__TOKEN" in done.stderr) == (2, True)
    assert "not-a-token" not in done.stderr
    key = {"PERDURE_DISCORD__TOKEN": discord_server.TOKEN, "PERDURE_DISCORD__PUBLIC_KEY": "xyz"}
    done = perdure("channels", env={**environment, **key})
    assert (done.returncode, "PERDURE_DISCORD__PUBLIC_KEY" in done.stderr) == (2, True)
