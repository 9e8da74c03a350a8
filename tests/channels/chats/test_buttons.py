"""Buttons with which a user approves or denies a tool call."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from perdure import tool
from perdure.channels.services.buttons import Buttons, Chat
from tests.channels.chats.installation import AllServers, Installation, Servers
from tests.channels.chats.updates import first, pressed, pressed_in_group, said_in_group, telegram_said
from tests.turns.scripted import Scripted, calls, says


def test_a_button_is_for_one_call_chat_and_person() -> None:
    """A button is valid for one call, chat and person. A changed token is refused."""
    buttons, turn_id = Buttons([b"secret"]), uuid4()
    chat = Chat("discord", "21", "11")
    token = buttons.token("approve", turn_id, "call-1", chat)
    assert len(token) <= 64
    assert buttons.turn_of(token) == ("approve", turn_id)
    assert buttons.is_for(token, "call-1", chat)
    for other in (Chat("slack", "21", "11"), Chat("discord", "2", "111"), Chat("discord", "21", "12")):
        assert not buttons.is_for(token, "call-1", other)
    assert not buttons.is_for(token, "call-2", chat)
    assert not buttons.is_for(f"d{token[1:]}", "call-1", chat)
    assert not Buttons([b"another"]).is_for(token, "call-1", chat)
    assert Buttons([b"another", b"secret"]).is_for(token, "call-1", chat), "while a key is replaced"
    for odd in ("", "a", token[:-1], f"{token}x", "é" * 45, "x" * 45):
        assert buttons.turn_of(odd) is None


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.mark.parametrize("name", ["discord", "slack"])
@pytest.mark.parametrize("decision", ["Approve", "Deny"])
def test_a_call_is_approved_by_a_button(installation: Installation, servers: Servers, name: str, decision: str) -> None:
    """The button works only for the user whose message led to the call, and only in the chat of that message."""
    installation.use(Scripted(calls(("pay", {"amount": 5})), says("It is done.")), pay)
    handle = installation.ingress(name).take
    handle(first(name, "pay 5"))
    installation.work()

    [request] = [*servers.discord.sent, *servers.slack.sent]
    assert "needs your approval" in str(request)
    buttons = (
        {each["label"]: each["custom_id"] for each in request["components"][0]["components"]}
        if name == "discord"
        else {each["text"]["text"]: each["value"] for each in request["blocks"][-1]["elements"]}
    )
    token = buttons[decision]
    for person, chat in (("12", "21"), ("11", "99")):
        handle(pressed(name, token, person, chat))
    handle(pressed(name, f"{token[:-1]}{'A' if token[-1] != 'A' else 'B'}", "11", "21"))
    assert [row.status for row in installation.sql("SELECT status FROM tool_effects")] == ["asked"]
    handle(pressed(name, token, "11", "21"))
    handle(pressed(name, token, "11", "21"))
    installation.work()
    expected = {"Approve": "done", "Deny": "denied"}[decision]
    assert [row.status for row in installation.sql("SELECT status FROM tool_effects")] == [expected]
    last = [*servers.discord.sent, *servers.slack.sent][-1]
    assert "It is done." in str(last)


@tool(requires_approval=True, approver="staff")
def refund(amount: int) -> str:
    """Refund an amount."""
    return f"refunded {amount}"


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_call_that_staff_approves_has_no_buttons(installation: Installation, servers: Servers, name: str) -> None:
    """The chat says whose approval is missing. A button that another release made for such a call decides nothing."""
    installation.use(Scripted(calls(("refund", {"amount": 5})), says("It is done.")), refund)
    handle = installation.ingress(name).take
    handle(first(name, "refund 5"))
    installation.work()

    [request] = [*servers.discord.sent, *servers.slack.sent]
    assert "needs the approval of staff" in str(request)
    assert "Approve" not in str(request)
    [row] = installation.sql("SELECT turn_id, reply_to FROM turns")
    chat = Chat(name, row.reply_to["place"]["chat"], row.reply_to["asker"])
    token = Buttons(installation.runtime.settings.signing_keys()).token("approve", row.turn_id, "call_0", chat)
    handle(pressed(name, token, "11", "21"))
    assert [row.status for row in installation.sql("SELECT status FROM tool_effects")] == ["asked"]


def _replaced(every: AllServers) -> list[str]:
    """The texts that have replaced messages with buttons. Discord shows them as new messages: its token has expired."""
    edited = [*every.discord.edited, *every.discord.sent[1:], *every.slack.edited]
    return [
        str(each.get("content") or each.get("text")) for each in [*edited, *every.telegram.given("editMessageText")]
    ]


def _tokens(name: str, request: dict[str, Any]) -> dict[str, str]:
    """The tokens of the buttons under a message, by label."""
    match name:
        case "discord":
            return {each["label"]: each["custom_id"] for each in request["components"][0]["components"]}
        case "slack":
            return {each["text"]["text"]: each["value"] for each in request["blocks"][-1]["elements"]}
        case _:
            [row] = json.loads(request["reply_markup"])["inline_keyboard"]
            return {each["text"]: each["callback_data"] for each in row}


@pytest.mark.parametrize("name", ["discord", "slack", "telegram"])
@pytest.mark.parametrize("label", ["Approve", "Deny"])
def test_another_members_press_leaves_the_request_as_it_is(
    three: Installation, every: AllServers, name: str, label: str
) -> None:
    """In a group, all members see the buttons, which stay until the person whom they ask has pressed one."""
    three.use(Scripted(calls(("pay", {"amount": 5})), says("It is done.")), pay)
    handle = three.ingress(name).take
    handle(said_in_group(name, "pay 5"))
    three.work()
    [request] = every.sent()
    [row] = three.sql("SELECT turn_id, reply_to FROM turns")
    chat = Chat(name, row.reply_to["place"]["chat"], row.reply_to["asker"])
    retired = Buttons([b"a key that is no longer used"]).token("approve", row.turn_id, "call_0", chat)
    handle(pressed_in_group(name, _tokens(name, request)[label], "12"))
    handle(pressed_in_group(name, retired, "11"))
    handle(pressed_in_group(name, "nonsense", "11"))
    assert _replaced(every) == []
    assert [row.status for row in three.sql("SELECT status FROM tool_effects")] == ["asked"]
    assert len(every.telegram.given("answerCallbackQuery")) == (3 if name == "telegram" else 0), (
        "no press stays pending"
    )

    handle(pressed_in_group(name, _tokens(name, request)[label], "11"))
    expected = {"Approve": ("Approved: pay", "approved"), "Deny": ("Denied: pay", "denied")}[label]
    assert (_replaced(every), [row.status for row in three.sql("SELECT status FROM tool_effects")]) == (
        [expected[0]],
        [expected[1]],
    )
    handle(pressed_in_group(name, _tokens(name, request)["Deny"], "11"))
    assert "already decided" in _replaced(every)[-1]


@pytest.mark.parametrize("person", ["11", "12"])
def test_a_request_that_a_moved_group_shows_can_be_decided(three: Installation, every: AllServers, person: str) -> None:
    """The buttons were made for the id that the group had as a basic group, and for one person."""
    three.use(Scripted(calls(("pay", {"amount": 5})), says("It is done.")), pay)
    handle = three.ingress("telegram").take
    old, new = {"id": -5, "type": "group", "title": "Friends"}, {"id": -1005, "type": "supergroup", "title": "Friends"}
    handle(telegram_said("pay 5", chat=old))
    three.work()
    handle(telegram_said(None, 2, chat=old, migrate_to_chat_id=-1005))
    [request] = every.sent()
    token = _tokens("telegram", request)["Approve"]
    other = {"id": -1006, "type": "supergroup", "title": "Strangers"}
    handle(pressed_in_group("telegram", token, person, other))
    assert [row.status for row in three.sql("SELECT status FROM tool_effects")] == ["asked"]
    handle(pressed_in_group("telegram", token, person, new))
    expected = "approved" if person == "11" else "asked"
    assert [row.status for row in three.sql("SELECT status FROM tool_effects")] == [expected]
