"""Commands in a chat, and the conversations that they begin and open."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from perdure.access.tenants import UserKey
from perdure.users.identities import mint_code
from tests.channels.chats.installation import Installation
from tests.channels.chats.updates import ANA, BO, SLASH, first, interaction_of_kind, said, slack_event
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_commands(installation: Installation, discord: DiscordServer, slack: SlackServer, name: str) -> None:
    """`/cancel`, `/end`, `/new`, `/help` and unknown commands get an answer. `/link` is refused in a group."""

    def command(command: str, argument: str = "", *, group: bool = False) -> str:
        if name == "discord":
            where = {"guild_id": "31", "channel_id": "22", "member": {"user": ANA}} if group else {"channel_id": "21"}
            data = {"name": command, "options": [{"value": argument}] if argument else []}
            given = interaction_of_kind(2, id=discord.new_id(), user=ANA, data=data, **where)
            update: dict[str, Any] = {"t": "INTERACTION_CREATE", "d": given}
        else:
            update = {**SLASH, "command": "/perdure", "text": f"{command} {argument}"}
            update["channel_id"] = "C1" if group else "D1"
        installation.ingress(name).take(update)
        return str([*discord.sent, *slack.sent].pop())

    assert "nothing to cancel" in command("cancel")
    assert "no conversation to end" in command("end")
    installation.ingress(name).take(first(name, "what is 1+1?"))
    assert "Cancelled." in command("cancel")
    assert "has ended" in command("end")
    assert "new conversation" in command("new")
    assert "/link CODE" in command("help")
    assert "/link CODE" in command("dance")
    code = mint_code(installation.runtime.database, UserKey("ana")).code
    assert "private chat" in command("link", code, group=True)
    assert "wrong" in command("link", "0000-0000-0000")
    assert "linked to ana" in command("link", code)
    assert [row.status for row in installation.sql("SELECT status FROM turns")] == ["cancelled"]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_new_begins_a_conversation_that_stays(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """Messages after `/new` go to the new conversation until the user opens another.

    `/list` shows the conversations, and `/open` opens one of them. `/end` ends the open conversation.
    """

    def command(command: str, argument: str = "") -> str:
        if name == "discord":
            update: dict[str, Any] = said(f"/{command} {argument}", next(numbers))
        else:
            update = {**SLASH, "command": f"/{command}", "text": argument}
        installation.ingress(name).take(update)
        return str([*discord.sent, *slack.sent][-1].get("content") or slack.sent[-1]["text"])

    def say(content: str) -> None:
        number = next(numbers)
        installation.ingress(name).take(
            said(content, number) if name == "discord" else slack_event(content, f"{number}.1")
        )
        installation.work()

    def scopes() -> list[str]:
        return [row.scope for row in installation.sql("SELECT scope FROM sessions ORDER BY created_at")]

    numbers = itertools.count(1)
    say("I plan a trip")
    assert "one conversation" in command("list")
    assert "new conversation" in command("new")
    say("a *recipe* for _bread_")
    say("and for cake")
    first_scope, second_scope = scopes()
    assert (first_scope, second_scope[: len(name) + 2]) == ("", f"/{name}-")
    shown = (lambda title: re.sub(r"([*_:])", r"\\\1", title)) if name == "discord" else str
    listed = command("list")
    assert listed.splitlines() == [
        shown("• 0: the conversation of this chat"),
        shown("→ 1: a *recipe* for _bread_"),
        "/open NUMBER continues one.",
    ]
    assert "own conversation" in command("open", "0")
    say("by train")
    assert scopes() == [first_scope, second_scope]
    counts = installation.sql("SELECT scope, turn_count FROM sessions ORDER BY scope")
    assert [row.turn_count for row in counts] == [2, 2]
    for wrong in ("2", "-1", "x", "", "٣", "9" * 30):
        assert "/list shows the numbers" in command("open", wrong)
    assert shown("a *recipe* for _bread_") in command("open", "1")
    if name == "slack":
        assert not slack.sent[-1]["mrkdwn"], "the title is shown as it is written"
    assert "has ended" in command("end")
    ended = installation.sql("SELECT scope FROM sessions WHERE end_requested_at IS NOT NULL")
    assert [row.scope for row in ended] == [second_scope]


def test_another_persons_chat_is_not_changed_by_new(installation: Installation, discord: DiscordServer) -> None:
    """`/new` changes only its sender's conversation. After `/link`, messages go to the linked user's conversation."""
    take = installation.ingress("discord").take
    take(said("hello", 1))
    take(said("/new", 2))
    take(said("hello from Bo", 3, author=BO, channel_id="22"))
    take(said(f"/link {mint_code(installation.runtime.database, UserKey('zoe')).code}", 4))
    take(said("hello from Zoe", 5))
    rows = installation.sql("SELECT user_id, scope FROM sessions ORDER BY created_at")
    assert [(row.user_id, row.scope) for row in rows] == [("discord:11", ""), ("discord:12", ""), ("zoe", "")]


@pytest.mark.parametrize("response", ["accepted", "expired", "of another host"])
def test_a_command_of_slack_is_answered_where_the_bot_is_no_member(
    installation: Installation, slack: SlackServer, response: str
) -> None:
    """Slack sends a URL for the answer with each command. The bot posts the answer if that URL cannot be used."""
    url = slack.response_url if response != "of another host" else slack.response_url.replace("127.0.0.1", "localhost")
    if response == "accepted":
        slack.fail("chat.postMessage", 200, "not_in_channel", times=9)
    elif response == "expired":
        url = url.replace("/response/", "/expired/")
    update = {**SLASH, "command": "/perdure", "text": "help", "channel_id": "C9", "response_url": url}
    installation.ingress("slack").take(update)
    [answer] = slack.responses if response == "accepted" else slack.sent
    assert "/link CODE" in answer["text"]
    assert answer["mrkdwn"] is False
    assert len(slack.responses) + len(slack.sent) == 1


@pytest.mark.parametrize(
    ("content", "is_command"),
    [
        ("/etc/hosts: what does it do?", False),
        ("/var is full, why?", False),
        ("/ is the root", False),
        ("/24 is a small network", False),
        ("/help", True),
        ("/HELP me", True),
        ("/dance", True),
    ],
)
def test_a_path_is_no_command(
    installation: Installation, discord: DiscordServer, content: str, *, is_command: bool
) -> None:
    """On Discord, a text that begins with a slash is a command only if it has the form of one."""
    installation.ingress("discord").take(said(content))
    assert [row.text for row in installation.sql("SELECT text FROM inbox")] == ([] if is_command else [content])
    assert len(discord.sent) == is_command


def test_ask_without_a_question_is_answered(installation: Installation, discord: DiscordServer) -> None:
    """Otherwise Discord would show for a quarter of an hour that the answer is pending."""
    data = {"name": "ask", "options": []}
    made_ms = int(installation.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    given = interaction_of_kind(2, id=str(made_ms << 22), channel_id="21", user=ANA, data=data)
    discord.acknowledge(given["token"])
    installation.ingress("discord").take({"t": "INTERACTION_CREATE", "d": given})
    [edited] = discord.edited
    assert "write what you need" in edited["content"]
