"""Messages in groups, edits, deletions and messages without text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from perdure.settings import OnBusy
from tests.channels import discord_server, slack_server
from tests.channels.chats.installation import AllServers, Installation
from tests.channels.chats.updates import (
    ANA,
    BO,
    IN_CHANNEL,
    MENTION,
    changed,
    deleted,
    discord_message,
    first,
    said,
    slack_event,
    telegram_said,
)
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.turns.harness import until


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_group_is_answered_only_if_it_is_addressed(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """In a group the bot answers only mentions, replies to its messages, and messages in its threads.

    The stored text names the author.
    """
    handle = installation.ingress(name).take
    if name == "discord":
        handle(said("hello all", 1, guild_id="31"))
        handle(said("in a thread of others", 2, guild_id="31", channel_id="22", position=3))
        assert installation.users() == []
        handle(
            said(
                f"<@{discord_server.BOT_ID}> what is 12*7+5?", 3, guild_id="31", channel_id="22", position=4, **MENTION
            )
        )
        handle(said("and 2+2?", 4, guild_id="31", channel_id="22", position=5, author=BO))
        handle(said("and 3+3?", 5, guild_id="31"))
        replied = {"referenced_message": {"author": discord_server.BOT}}
        handle(said("thanks", 6, guild_id="31", **replied))
        users, lines = ["discord:group:22", "discord:group:21"], ["Ana: what is 12*7+5?", "bo: and 2+2?", "Ana: thanks"]
    else:
        handle(slack_event("hello all", "1.1", **IN_CHANNEL))
        handle(slack_event("in a thread of others", "1.2", thread_ts="1.0", **IN_CHANNEL))
        assert installation.users() == []
        mention = slack_event(f"<@{slack_server.BOT_USER}> what is 12*7+5?", "1.3", **IN_CHANNEL)
        handle({**mention, "event": {**mention["event"], "type": "app_mention"}})
        handle(mention)  # Slack sends a mention as both events
        handle(slack_event("and 2+2?", "1.4", user="U2", thread_ts="1.3", **IN_CHANNEL))
        handle(slack_event("and 3+3?", "1.5", **IN_CHANNEL))
        users, lines = ["slack:group:C1"], ["Ana: what is 12*7+5?", "Bo: and 2+2?"]
    assert installation.users() == users
    assert [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")] == lines
    installation.work()
    if name == "slack":
        assert {each["thread_ts"] for each in slack.sent} == {"1.3"}
    assert len(discord.sent) + len(slack.sent) == len(lines)


def test_nothing_of_a_person_is_recalled_in_a_group(installation: Installation, discord: DiscordServer) -> None:
    """Memories of a private chat are not recalled in a group, because the group counts as a separate user."""
    installation.ingress("discord").take(said("my favourite colour is teal"))
    installation.work()
    question = said("what is my favourite colour?", 2, guild_id="31", channel_id="22", **MENTION)
    installation.ingress("discord").take(question)
    installation.work()
    assert len(discord.sent) == 2
    assert "teal" not in discord.sent[-1]["content"]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_an_edit_changes_a_message_that_has_not_begun(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """An edit changes a message only before its turn begins. A repeated event with the original text is a duplicate."""
    handle = installation.ingress(name).take
    handle(first(name, "what is 1+1?"))
    handle(changed(name, "what is 12*7+5?"))
    installation.work()
    handle(changed(name, "what is 2+2?"))
    handle(first(name, "what is 1+1?"))
    installation.work()
    [sent] = [*discord.sent, *slack.sent]
    assert "89" in str(sent.get("content") or sent.get("text"))


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_deletion_cancels_a_message_that_has_not_begun(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """A deleted message whose turn has not begun gets no reply. A repeated deletion changes nothing."""
    handle = installation.ingress(name).take
    handle(first(name, "what is 1+1?"))
    handle(deleted(name))
    installation.work()
    assert [row.status for row in installation.sql("SELECT status FROM turns")] == ["cancelled"]
    assert [*discord.sent, *slack.sent] == []
    handle(deleted(name))


def test_discord_names_the_author_of_a_deleted_private_message(
    installation: Installation, discord: DiscordServer
) -> None:
    """A private message can be deleted although Discord's deletion event names only the channel, not the author."""
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        discord.dispatch("MESSAGE_CREATE", discord_message(1, "hello"))
        discord.dispatch("MESSAGE_DELETE", {"id": "1000001", "channel_id": "21"})
        until(
            lambda: [row.status for row in installation.sql("SELECT status FROM turns")] == ["cancelled"],
            "the turn is cancelled",
        )


def test_others_cannot_edit_or_delete_a_message(installation: Installation) -> None:
    """Only a message's author can edit or delete it."""
    handle = installation.ingress("discord").take
    handle(said("what is 12*7+5?"))
    edited = {"edited_timestamp": "2026-11-23T09:00:00+00:00"}
    handle({"t": "MESSAGE_UPDATE", "d": discord_message(1, "mine now", author=BO, **edited)})
    handle({"t": "MESSAGE_DELETE", "d": {"id": "1000001", "channel_id": "21", "author": {"id": "12"}}})
    assert [row.text for row in installation.sql("SELECT text FROM inbox")] == ["what is 12*7+5?"]
    assert [row.status for row in installation.sql("SELECT status FROM turns")] == ["accepted"]


def test_messages_of_bots_and_system_messages_are_ignored(installation: Installation) -> None:
    """System messages and messages from bots are ignored. Otherwise two bots could answer each other for ever."""
    for more in ({"author": {**ANA, "bot": True}}, {"webhook_id": "5"}, {"type": 6}):
        installation.ingress("discord").take(said("hello", **more))
    installation.ingress("discord").take({"t": "MESSAGE_UPDATE", "d": discord_message(1, "hello")})
    for more in ({"bot_id": "B1"}, {"subtype": "channel_join"}, {"subtype": "bot_message"}):
        installation.ingress("slack").take(slack_event("hello", **more))
    assert installation.users() == []


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_message_without_text_gets_an_explanation(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """A message without text, such as a photo, gets an explanation and starts no turn."""
    more: dict[str, Any] = {"attachments": [{"id": "1"}]} if name == "discord" else {"files": [{"id": "F1"}]}
    update = said("", **more) if name == "discord" else slack_event("", subtype="file_share", **more)
    installation.ingress(name).take(update)
    [sent] = [*discord.sent, *slack.sent]
    assert "I can only read text" in str(sent)
    assert installation.users() == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("discord", {"poll": {"question": {"text": "Tea?"}}}),
        ("discord", {"message_reference": {"type": 1}, "message_snapshots": [{"message": {"content": ""}}]}),
        ("discord", {}),
        ("slack", {"attachments": [{"text": "a preview", "from_url": "https://a.example"}]}),
        ("slack", {}),
    ],
)
def test_whatever_cannot_be_read_gets_an_explanation(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str, more: dict[str, Any]
) -> None:
    """No message of a person vanishes. In the threads of others, the bot says nothing."""
    handle = installation.ingress(name).take
    if name == "discord":
        handle(said("", **more))
        handle(said("", 2, guild_id="31", channel_id="22", position=3, **more))
    else:
        handle(slack_event("", **more))
        handle(slack_event("", "1.2", thread_ts="1.0", **IN_CHANNEL, **more))
    [sent] = [*discord.sent, *slack.sent]
    assert "I can only read text" in str(sent)
    assert installation.users() == []


def test_a_mention_without_text_is_answered_once(installation: Installation, slack: SlackServer) -> None:
    """Slack sends a mention as two events."""
    handle = installation.ingress("slack").take
    mention = slack_event(f"<@{slack_server.BOT_USER}>", **IN_CHANNEL)
    handle(mention)
    handle({**mention, "event": {**mention["event"], "type": "app_mention"}})
    [sent] = slack.sent
    assert "I can only read text" in sent["text"]


@pytest.mark.parametrize("name", ["discord", "slack", "telegram"])
def test_a_message_that_a_busy_session_rejects_is_answered(three: Installation, every: AllServers, name: str) -> None:
    """With `PERDURE_TURN__ON_BUSY=reject`, the person learns that the message was not accepted, once.

    A repeated event of a message that was accepted, and edited since, gets no answer.
    """
    settings = three.runtime.settings
    rejecting = settings.model_copy(update={"turn": settings.turn.model_copy(update={"on_busy": OnBusy.REJECT})})
    three.runtime = replace(three.runtime, settings=rejecting)
    handle = three.ingress(name).take
    updates = {
        "discord": [said("first", 1), said("second", 2)],
        "slack": [slack_event("first", "1.1"), slack_event("second", "1.2")],
        "telegram": [telegram_said("first", 1), telegram_said("second", 2)],
    }[name]
    handle(updates[0])
    handle(updates[1])
    handle(updates[1])
    assert every.texts() == ["The session is busy with an earlier message."]
    with three.runtime.database.engine.begin() as connection:
        connection.execute(text("UPDATE inbox SET text = 'edited'"))
    handle(updates[0])
    assert [row.text for row in three.sql("SELECT text FROM inbox")] == ["edited"]
    assert len(every.sent()) == 1


def test_an_anonymous_author_of_telegram_is_answered(three: Installation) -> None:
    """An anonymous administrator and a member who writes as a channel are persons. Telegram itself is not."""
    handle = three.ingress("telegram").take
    group, channel = (
        {"id": -100, "type": "supergroup", "title": "Friends"},
        {"id": -9, "type": "channel", "title": "News"},
    )
    bot, telegram_itself = {"id": 1087968824, "is_bot": True}, {"id": 777000, "is_bot": False, "first_name": "Telegram"}
    handle(telegram_said("one", 1, chat=group, **{"from": bot}, sender_chat=group))
    handle(telegram_said("two", 2, chat=group, **{"from": bot}, sender_chat=channel))
    handle(
        telegram_said(
            "a post", 3, chat=group, **{"from": telegram_itself}, sender_chat=channel, is_automatic_forward=True
        )
    )
    handle(telegram_said("of a bot", 4, chat=group, **{"from": bot}))
    edited = telegram_said("three", 2, chat=group, **{"from": bot}, sender_chat=channel)
    handle({"update_id": 5, "edited_message": edited["message"]})
    found = [row.text for row in three.sql("SELECT text FROM inbox ORDER BY accepted_at")]
    assert found == ["Friends: one", "News: three"]
