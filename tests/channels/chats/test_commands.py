"""Commands in a chat, and the conversations that they begin and open."""

from __future__ import annotations

import itertools
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
    say("a recipe for bread")
    say("and for cake")
    first_scope, second_scope = scopes()
    assert (first_scope, second_scope[: len(name) + 2]) == ("", f"/{name}-")
    listed = command("list")
    assert "\n* 1: a recipe for bread" in listed
    assert "- 0: the conversation of this chat" in listed
    assert "own conversation" in command("open", "0")
    say("by train")
    assert scopes() == [first_scope, second_scope]
    counts = installation.sql("SELECT scope, turn_count FROM sessions ORDER BY scope")
    assert [row.turn_count for row in counts] == [2, 2]
    for wrong in ("2", "-1", "x", "", "٣", "9" * 30):
        assert "/list shows the numbers" in command("open", wrong)
    assert "a recipe for bread" in command("open", "1")
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
