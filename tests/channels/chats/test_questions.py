"""A question to the user in a chat: the person simply writes the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from perdure import Agent, agent_tool, ask_user
from tests.channels.chats.installation import Installation, Servers
from tests.channels.chats.updates import IN_CHANNEL, MENTION, said, slack_event
from tests.channels.slack_server import BOT_USER
from tests.turns.broker import Broker
from tests.turns.scripted import Scripted, calls, says

MILK = ask_user(Literal["oat", "cow"], name="ask_milk")


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_person_answers_a_question(installation: Installation, servers: Servers, name: str) -> None:
    """The chat shows the question, what did not fit, and the reply; the answers begin no turns."""
    installation.use(Scripted(calls(("ask_milk", {"question": "Which milk?"})), says("It is done.")), MILK)
    handle = installation.ingress(name).take
    for number, content in enumerate(("tea, please", "soy", "Oat"), start=1):
        handle(said(content, number) if name == "discord" else slack_event(content, f"{number}.1"))
        installation.work()
    shown = [str(each) for each in (*servers.discord.sent, *servers.slack.sent)]
    assert len(shown) == 3
    assert "Which milk?" in shown[0]
    assert "Please answer with one of: oat, cow." in shown[1]
    assert "Which milk?" in shown[1]
    assert "It is done." in shown[2]
    assert [row.status for row in installation.sql("SELECT status FROM turns")] == ["done"]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_person_answers_a_question_of_another_agent(installation: Installation, servers: Servers, name: str) -> None:
    """The chat shows it like one of its own agent's."""
    script = [("barista", {"task": "tea"}), ("ask_milk", {"question": "Which milk?"})]
    model = Scripted(*(calls(each) for each in script), says("Tea with oat milk."), says("It is done."))
    installation.use(model, agent_tool(Agent("barista", "You make tea.", [MILK])))
    installation.runtime = replace(installation.runtime, calls=Broker())
    handle = installation.ingress(name).take
    for number, content in enumerate(("tea, please", "soy", "Oat"), start=1):
        handle(said(content, number) if name == "discord" else slack_event(content, f"{number}.1"))
        installation.work()
    shown = [str(each) for each in (*servers.discord.sent, *servers.slack.sent)]
    assert [each for each in shown if "Which milk?" in each] == shown[:2]
    assert "Please answer with one of: oat, cow." in shown[1]
    assert "It is done." in shown[2]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_group_answers_a_question(installation: Installation, servers: Servers, name: str) -> None:
    """The author's name, which the agent reads before each message of a group, is no part of the answer."""
    installation.use(Scripted(calls(("ask_milk", {"question": "Which milk?"})), says("It is done.")), MILK)
    handle = installation.ingress(name).take
    for number, content in enumerate(("tea, please", "Oat"), start=1):
        if name == "discord":
            handle(said(content, number, guild_id="31", channel_id="22", **MENTION))
        else:
            thread = {} if number == 1 else {"thread_ts": "1.1"}
            handle(slack_event(f"<@{BOT_USER}> {content}", f"{number}.1", **IN_CHANNEL, **thread))
        installation.work()
    shown = [str(each) for each in (*servers.discord.sent, *servers.slack.sent)]
    assert len(shown) == 2
    assert "It is done." in shown[1]
    assert [row.result for row in installation.sql("SELECT result FROM tool_effects")] == [None]
    told = installation.sql("SELECT content FROM messages WHERE role = 'tool'")
    assert [row.content for row in told] == ["oat"]
