"""A message on Discord or Slack is accepted once and answered."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from perdure.access.tenants import UserKey
from perdure.channels.services import listening
from perdure.channels.services.discord import channel as discord_module
from perdure.channels.services.protocol import ChannelFailed
from perdure.errors import Unavailable
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.users.identities import mint_code
from tests.channels.chats.installation import Installation
from tests.channels.chats.updates import SLASH, discord_message, said, slack_event
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.turns.harness import until


def test_discord_is_answered(installation: Installation, discord: DiscordServer) -> None:
    """A private message through Discord's gateway is answered by a message that mentions no one."""
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        discord.dispatch("MESSAGE_CREATE", discord_message(1, "what is 12*7+5?"))
        until(lambda: installation.users() == ["discord:11"], "the message is accepted")
    installation.work()
    [sent] = discord.sent
    assert "89" in sent["content"]
    assert discord.typing == ["21"]
    assert (sent["channel"], sent["allowed_mentions"], sent["enforce_nonce"]) == ("21", {"parse": []}, True)


def test_discord_shows_typing_until_the_turn_is_settled(
    installation: Installation, discord: DiscordServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discord's typing indicator lasts ten seconds, so the bot repeats it until the turn is settled."""
    monkeypatch.setattr(discord_module.Discord, "typing_s", 0.05)
    installation.ingress("discord").take(said("what is 12*7+5?"))
    discord.until(lambda: len(discord.typing) >= 4, "the indicator is repeated")
    [row] = installation.sql("SELECT turn_id FROM turns")
    cancel(installation.runtime, row.turn_id)
    until(lambda: not any(each.name == "typing on discord" for each in threading.enumerate()), "the indicator stops")
    assert set(discord.typing) == {"21"}


@pytest.mark.long
def test_slack_is_answered(installation: Installation, slack: SlackServer) -> None:
    """A private message over Socket Mode is acknowledged after the message is committed. The user gets a reply."""
    with installation.listening("slack"):
        slack.until(lambda: slack.connected, "Socket Mode connects")
        envelope = slack.dispatch("events_api", slack_event("what is 12*7+5?"))
        slack.until(lambda: envelope in slack.acknowledged, "the event is acknowledged")
        assert installation.users() == ["slack:U1"]
    installation.work()
    [sent] = slack.sent
    assert "89" in sent["text"]
    assert (sent["channel"], sent["unfurl_links"]) == ("D1", False)


def test_a_person_continues_in_another_chat(
    installation: Installation, discord: DiscordServer, slack: SlackServer
) -> None:
    """After `/link` on Discord and Slack, both chats belong to one user with one session and one memory."""
    database = installation.runtime.database
    installation.ingress("discord").take(said(f"/link {mint_code(database, UserKey('ana')).code}"))
    installation.ingress("slack").take({"command": "/link", "text": mint_code(database, UserKey("ana")).code, **SLASH})
    assert "linked to ana" in discord.sent.pop()["content"]
    assert "linked to ana" in slack.sent.pop()["text"]

    installation.ingress("discord").take(said("my favourite colour is teal", 2))
    installation.work()
    installation.ingress("slack").take(slack_event("what is my favourite colour?"))
    installation.work()

    assert installation.users() == ["ana"]  # both chats, one user
    assert "teal" in slack.sent[-1]["text"]
    assert [row.channels for row in installation.sql("SELECT channels FROM sessions")] == [["discord", "slack"]]


@pytest.mark.long
def test_a_gateway_that_drops_the_connection_loses_no_message(
    installation: Installation, discord: DiscordServer
) -> None:
    """After a dropped connection the bot resumes its session, and Discord sends the missed events."""
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        discord.drop()
        discord.dispatch("MESSAGE_CREATE", discord_message(1, "hello"))
        discord.until(lambda: discord.resumed, "the bot resumes")
        until(lambda: installation.users() == ["discord:11"], "the missed message is accepted")
    assert len(discord.identified) == 1


@pytest.mark.long
def test_a_wrong_token_is_retried_later(installation: Installation, discord: DiscordServer) -> None:
    """After Discord refuses the token, the listener tries to connect again."""
    discord.fail("/gateway/bot", 401, {"message": "401: Unauthorized", "code": 0})
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the next attempt succeeds")


def test_a_service_that_keeps_failing_is_asked_ever_less_often(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pause doubles after each failed attempt to connect. Taking the channel's lock does not reset the pause."""
    monkeypatch.setattr(listening, "_AGAIN_S", 0.01)

    def fail(*_: Any) -> None:
        raise ChannelFailed("It is down.")

    monkeypatch.setattr(installation.channels["discord"], "listen", fail)
    with installation.listening("discord"):
        until(lambda: caplog.text.count("retrying in") >= 3, "three attempts fail")
    assert [text.split(" s")[0] for text in caplog.text.split("retrying in ")[1:4]] == ["0.01", "0.02", "0.04"]


@pytest.mark.long
def test_an_update_waits_for_the_database(
    installation: Installation, discord: DiscordServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the database is unavailable, the listener retries an event before it handles later events.

    Discord sends each event only once.
    """
    refused = threading.Event()

    def fail_once(*given: Any, **named: Any) -> Any:
        if not refused.is_set():
            refused.set()
            raise Unavailable("The database cannot be reached.")
        return accept(*given, **named)

    monkeypatch.setattr("perdure.channels.services.ingress.accept", fail_once)
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        for number, content in enumerate(["first", "second"], start=1):
            discord.dispatch("MESSAGE_CREATE", discord_message(number, content))
        until(lambda: len(installation.sql("SELECT FROM inbox")) == 2, "both are accepted")
    assert [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")] == ["first", "second"]
