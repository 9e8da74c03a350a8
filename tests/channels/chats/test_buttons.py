"""Buttons with which a user approves or denies a tool call."""

from __future__ import annotations

from uuid import uuid4

import pytest

from perdure import tool
from perdure.channels.services.buttons import Buttons, Chat
from tests.channels.chats.installation import Installation, Servers
from tests.channels.chats.updates import first, pressed
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
