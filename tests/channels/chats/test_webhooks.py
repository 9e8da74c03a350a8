"""Signed requests from Discord and Slack. Forged, replayed and malformed requests change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from perdure import tool
from tests.channels import slack_server
from tests.channels.chats.installation import Installation
from tests.channels.chats.updates import ANA, interaction_of_kind, said, sign, slack_event
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.turns.scripted import Scripted, calls, says


def test_discords_interactions(installation: Installation, gateway: TestClient, discord: DiscordServer) -> None:
    """A PING gets a PONG. A slash command gets a deferred response, and the reply later replaces this response."""
    ping = json.dumps(interaction_of_kind(1)).encode()
    assert gateway.post("/v1/channels/discord", content=ping, headers=sign(ping)).json() == {"type": 1}
    made_ms = int((installation.runtime.clock.now().timestamp()) * 1000) - 1_420_070_400_000
    interaction = interaction_of_kind(
        2,
        id=str(made_ms << 22),
        channel_id="21",
        user=ANA,
        data={"name": "ask", "options": [{"name": "text", "type": 3, "value": "what is 12*7+5?"}]},
    )
    body = json.dumps(interaction).encode()
    for _ in range(2):  # Discord may send an interaction twice
        answer = gateway.post("/v1/channels/discord", content=body, headers=sign(body))
        assert answer.json() == {"type": 5}
    installation.work()
    [edited] = discord.edited
    assert edited["original"] == "tok"
    assert "89" in edited["content"]
    assert discord.sent == []


def _interaction(installation: Installation, kind: int, **more: Any) -> dict[str, Any]:
    """An interaction of Ana that began now."""
    made_ms = int(installation.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    return interaction_of_kind(kind, id=str(made_ms << 22), channel_id="21", user=ANA, **more)


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.mark.parametrize("way", ["webhook", "connection"])
@pytest.mark.parametrize("kind", ["a command", "a pressed button"])
def test_an_interaction_is_acknowledged_before_it_is_answered(
    installation: Installation, gateway: TestClient, discord: DiscordServer, way: str, kind: str
) -> None:
    """Discord refuses an earlier answer, which then would be a new message below one that stays pending."""
    if kind == "a command":
        given, expected = _interaction(installation, 2, data={"name": "help", "options": []}), "/link CODE"
    else:
        installation.use(Scripted(calls(("pay", {"amount": 5})), says("It is done.")), pay)
        installation.ingress("discord").take(said("pay 5"))
        installation.work()
        token = discord.sent[0]["components"][0]["components"][0]["custom_id"]
        given, expected = _interaction(installation, 3, message={"id": "5"}, data={"custom_id": token}), "Approved: pay"
    already = len(discord.sent)
    if way == "webhook":
        body = json.dumps(given).encode()
        assert gateway.post("/v1/channels/discord", content=body, headers=sign(body)).status_code == 200
    else:
        with installation.listening("discord"):
            discord.until(lambda: discord.identified, "the bot identifies itself")
            discord.dispatch("INTERACTION_CREATE", given)
            discord.until(lambda: discord.edited or discord.refused, "the answer")
    assert (discord.refused, len(discord.sent)) == ([], already)
    [edited] = discord.edited
    assert expected in edited["content"]


def test_an_expired_interaction_is_answered_in_the_channel(installation: Installation, discord: DiscordServer) -> None:
    """After an interaction's token has expired, the reply is sent as a message in the channel."""
    interaction = interaction_of_kind(2, channel_id="21", user=ANA, data={"name": "help", "options": []})
    installation.ingress("discord").take(
        {"t": "INTERACTION_CREATE", "d": interaction}
    )  # the id's timestamp is years old
    assert discord.edited == []
    assert "/link CODE" in discord.sent[0]["content"]


def test_slacks_webhook(installation: Installation, gateway: TestClient, slack: SlackServer) -> None:
    """The webhook answers Slack's URL challenge. An event that Slack repeats is accepted only once."""

    def post(payload: Any, **headers: str) -> Any:
        body = json.dumps(payload).encode()
        signed = slack_server.signed(body, time.time())
        return gateway.post("/v1/channels/slack", content=body, headers={**signed, **headers})

    assert post({"type": "url_verification", "challenge": "abc"}).json() == {"challenge": "abc"}
    event = slack_event("what is 12*7+5?")
    assert [post(event).status_code, post(event, **{"X-Slack-Retry-Num": "1"}).status_code] == [200, 200]
    assert len(installation.sql("SELECT FROM inbox")) == 1
    installation.work()
    assert len(slack.sent) == 1


def test_slacks_forms(installation: Installation, gateway: TestClient, slack: SlackServer) -> None:
    """A slash command, which Slack sends as form data, gets an answer."""
    body = b"command=%2Fhelp&text=&channel_id=D1&user_id=U1&user_name=ana&trigger_id=1.2&team_id=T1"
    headers = {**slack_server.signed(body, time.time()), "Content-Type": "application/x-www-form-urlencoded"}
    assert gateway.post("/v1/channels/slack", content=body, headers=headers).status_code == 200
    assert "/link CODE" in slack.sent[0]["text"]
    assert installation.users() == []


Forge = Callable[[bytes, dict[str, str]], tuple[bytes, dict[str, str]]]

FORGERIES: dict[str, Forge] = {
    "no signature": lambda body, _: (body, {}),
    "another body": lambda body, headers: (body + b" ", headers),
    "another time": lambda body, headers: (
        body,
        {name: value if "imestamp" not in name else str(int(value) + 1) for name, value in headers.items()},
    ),
    "no number": lambda body, headers: (
        body,
        {name: value if "imestamp" not in name else "soon" for name, value in headers.items()},
    ),
    "no digits": lambda body, headers: (
        body,
        {name: value if "imestamp" in name else "v0=zz" for name, value in headers.items()},
    ),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_forged_request_is_refused(installation: Installation, gateway: TestClient, name: str, forge: Forge) -> None:
    """A forged request gets 401 and changes nothing. A request to a channel that is not configured also gets 401."""
    update = interaction_of_kind(2, channel_id="21", user=ANA, data={"name": "ask", "options": [{"value": "hi"}]})
    body = json.dumps(update if name == "discord" else slack_event("hi")).encode()
    signed = sign(body) if name == "discord" else slack_server.signed(body, time.time())
    content, headers = forge(body, signed)
    assert gateway.post(f"/v1/channels/{name}", content=content, headers=headers).status_code == 401
    assert gateway.post("/v1/channels/telex", content=content, headers=headers).status_code == 401
    assert installation.users() == []


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_recorded_request_is_refused_later(installation: Installation, gateway: TestClient, name: str) -> None:
    """A signed request is refused five minutes after it was signed."""
    update = interaction_of_kind(2, channel_id="21", user=ANA, data={"name": "ask", "options": [{"value": "hi"}]})
    body = json.dumps(update if name == "discord" else slack_event("hi")).encode()
    for age_s, status in ((330, 401), (270, 200)):
        at = installation.runtime.clock.now().timestamp() - age_s
        headers = sign(body, at) if name == "discord" else slack_server.signed(body, at)
        assert gateway.post(f"/v1/channels/{name}", content=body, headers=headers).status_code == status


@pytest.mark.parametrize("name", ["discord", "slack"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"type": "x"}', b"[" * 5_000, b'{"type": {}}'])
def test_a_malformed_request_is_refused(gateway: TestClient, name: str, body: bytes) -> None:
    """A malformed request with a valid signature never causes a 500."""
    headers = sign(body) if name == "discord" else slack_server.signed(body, time.time())
    assert gateway.post(f"/v1/channels/{name}", content=body, headers=headers).status_code in {200, 400, 401}


def test_a_gigantic_request_is_refused(gateway: TestClient) -> None:
    """An oversized request is refused before its signature is computed."""
    assert gateway.post("/v1/channels/slack", content=b"x" * 2**21).status_code == 413


@pytest.mark.parametrize("name", ["discord", "slack"])
@pytest.mark.parametrize(
    "update",
    [
        {},
        {"t": "MESSAGE_CREATE"},
        {"t": "MESSAGE_CREATE", "d": {"author": {"id": "1"}}},
        {"t": "MESSAGE_CREATE", "d": None},
        {"t": "INTERACTION_CREATE", "d": {"type": 2, "id": "1"}},
        {"type": "event_callback"},
        {"type": "event_callback", "event": {"type": "message", "user": "U1"}},
        {"type": "event_callback", "event": []},
        {"type": "block_actions"},
        {"command": "/new"},
    ],
)
def test_a_malformed_update_is_dropped(installation: Installation, name: str, update: dict[str, Any]) -> None:
    """A malformed update is dropped without an exception, so that the listener handles later updates."""
    installation.ingress(name).take(update)
    assert installation.users() == []
