"""Discord and Slack from message to reply, with the real libraries over loopback."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import hypothesis
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.channels.chat import configured
from perdure.channels.chat import slack as slack_module
from perdure.channels.chat.buttons import Buttons, Chat
from perdure.channels.chat.discord import channel as discord_module
from perdure.channels.chat.ingress import Ingress
from perdure.channels.chat.listening import Listening
from perdure.channels.chat.protocol import Channel, Place, Said
from perdure.channels.chat.replies import ChatCarrier
from perdure.channels.chat.splitting import split
from perdure.channels.http.app import create_app
from perdure.clock import MovedClock
from perdure.errors import Unavailable
from perdure.models.protocol import Model
from perdure.resilience.registry import Breakers
from perdure.runtime import Runtime
from perdure.settings import BreakerSettings, Settings
from perdure.snapshots.codec import dump, parse
from perdure.snapshots.exchange import read
from perdure.tools.registry import Tool
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable, deliver
from perdure.turns.restore_snapshot import restore
from perdure.turns.run.runner import Runner
from perdure.users.identities import mint_code
from tests.channels import discord_server, slack_server
from tests.channels.conftest import BASE_URL
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.conftest import RecordingWaker
from tests.turns.harness import until
from tests.turns.scripted import Scripted, calls, says

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.fixture
def discord() -> Iterator[DiscordServer]:
    """A server that imitates Discord."""
    made = DiscordServer()
    yield made
    made.close()


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    """A server that imitates Slack."""
    made = SlackServer()
    yield made
    made.close()


@dataclass(frozen=True)
class Servers:
    """The servers of both services."""

    discord: DiscordServer
    slack: SlackServer


@pytest.fixture
def servers(discord: DiscordServer, slack: SlackServer) -> Servers:
    """Both servers."""
    return Servers(discord, slack)


class Installation:
    """A runtime with both channels. The test itself runs the turns and the deliveries."""

    def __init__(self, runtime: Runtime, waker: RecordingWaker) -> None:
        self.runtime = runtime
        self.channels = configured.channels(runtime.settings, runtime.clock)
        self._carriers = {"channel": ChatCarrier(self.channels, Buttons(runtime.settings.signing_key()))}
        self._ingresses: list[Ingress] = []
        self._waker = waker
        self._runner = Runner(runtime, owner="test")

    def ingress(self, name: str) -> Ingress:
        """The handler of a channel's updates."""
        made = Ingress(self.runtime, self.channels[name])
        self._ingresses.append(made)
        return made

    def use(self, model: Model, *tools: Tool) -> None:
        """Replace the model, and replace the agent by one with these tools."""
        self._runner.close()
        agents = Agents([Agent("assistant", "You help.", tools)])
        self.runtime = replace(self.runtime, agents=agents, models=lambda _: model)
        self._runner = Runner(self.runtime, owner="test")

    def work(self) -> None:
        """Run the sessions that have wake-ups, then send the pending deliveries."""
        while self._waker.sessions:
            self._runner.run(self._waker.sessions.pop(0))
        for row in self.sql("SELECT delivery_id FROM deliveries WHERE status = 'pending' ORDER BY created_at"):
            deliver(self.runtime.database, self._carriers, row.delivery_id)

    def sql(self, statement: str, **given: Any) -> list[Any]:
        """Run a query; returns its rows."""
        with self.runtime.database.engine.connect() as connection:
            return list(connection.execute(text(statement), given))

    def users(self) -> list[str]:
        """The users with a session, in the order of their first message."""
        return [row.user_id for row in self.sql("SELECT user_id FROM sessions ORDER BY created_at")]

    def close(self) -> None:
        """Close the ingresses and channels."""
        self._runner.close()
        for ingress in self._ingresses:
            ingress.close()
        for channel in self.channels.values():
            channel.close()

    @contextmanager
    def listening(self, *names: str) -> Iterator[None]:
        """Listen on these channels for the duration of the block."""
        channels: list[tuple[Channel, Ingress]] = [(self.channels[name], self.ingress(name)) for name in names]
        made = Listening(self.runtime.database, channels)
        made.start()
        yield
        assert made.stop(10)


@pytest.fixture
def installation(
    runtime: Runtime, waker: RecordingWaker, discord: DiscordServer, slack: SlackServer
) -> Iterator[Installation]:
    """An installation whose channels use both servers."""
    settings = Settings(
        _env_file=None,
        secret_key="the secret of these tests, long enough",  # type: ignore[arg-type]
        discord={  # type: ignore[arg-type]
            "token": discord_server.TOKEN,
            "public_key": KEY.public_key().public_bytes_raw().hex(),
            "api_url": discord.url,
        },
        slack={  # type: ignore[arg-type]
            "token": slack_server.TOKEN,
            "app_token": slack_server.APP_TOKEN,
            "signing_secret": slack_server.SIGNING_SECRET,
            "api_url": slack.url,
        },
    )
    made = Installation(replace(runtime, settings=settings), waker)
    yield made
    made.close()


@pytest.fixture
def gateway(installation: Installation) -> Iterator[TestClient]:
    """A gateway of the installation."""
    with TestClient(create_app(installation.runtime, lambda: True), base_url=BASE_URL) as client:
        yield client


ANA = {"id": "11", "username": "ana", "global_name": "Ana", "discriminator": "0", "avatar": None}
BO = {"id": "12", "username": "bo", "global_name": None, "discriminator": "0", "avatar": None}


def discord_message(number: int, content: str, author: dict[str, Any] = ANA, **more: Any) -> dict[str, Any]:
    """A message as Discord's gateway sends it."""
    return {
        "id": str(1_000_000 + number),
        "channel_id": "21",
        "author": author,
        "content": content,
        "type": 0,
        "mentions": [],
        "attachments": [],
        **more,
    }


MENTION = {"mentions": [{**discord_server.BOT}]}


def said(content: str, number: int = 1, **more: Any) -> dict[str, Any]:
    """An update with a new message on Discord."""
    return {"t": "MESSAGE_CREATE", "d": discord_message(number, content, **more)}


def slack_event(content: str, ts: str = "1.1", user: str = "U1", **more: Any) -> dict[str, Any]:
    """A payload of the Events API."""
    event = {"type": "message", "channel": "D1", "channel_type": "im", "user": user, "text": content, "ts": ts, **more}
    authorizations = [{"user_id": slack_server.BOT_USER, "is_bot": True}]
    return {"type": "event_callback", "event_id": f"Ev{ts}", "event": event, "authorizations": authorizations}


IN_CHANNEL = {"channel": "C1", "channel_type": "channel"}


# --- from the message to the reply


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


def test_slack_is_answered(installation: Installation, slack: SlackServer) -> None:
    """A private message over Socket Mode is acknowledged after the commit and answered."""
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
    installation.ingress("discord").take(said(f"/link {mint_code(database, 'ana').code}"))
    installation.ingress("slack").take({"command": "/link", "text": mint_code(database, "ana").code, **SLASH})
    assert "linked to ana" in discord.sent.pop()["content"]
    assert "linked to ana" in slack.sent.pop()["text"]

    installation.ingress("discord").take(said("my favourite colour is teal", 2))
    installation.work()
    installation.ingress("slack").take(slack_event("what is my favourite colour?"))
    installation.work()

    assert installation.users() == ["ana"]  # both chats, one user
    assert "teal" in slack.sent[-1]["text"]
    assert [row.channels for row in installation.sql("SELECT channels FROM sessions")] == [["discord", "slack"]]


SLASH = {"channel_id": "D1", "user_id": "U1", "user_name": "ana", "team_id": "T1", "trigger_id": "1.2.3"}


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


def test_a_wrong_token_is_retried_later(installation: Installation, discord: DiscordServer) -> None:
    """After Discord refuses the token, the listener tries to connect again."""
    discord.fail("/gateway/bot", 401, {"message": "401: Unauthorized", "code": 0})
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the next attempt succeeds")


def test_an_update_waits_for_the_database(
    installation: Installation, discord: DiscordServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discord sends an event once. If the database is unavailable, the listener retries it before later events."""
    refused = threading.Event()

    def fail_once(*given: Any, **named: Any) -> Any:
        if not refused.is_set():
            refused.set()
            raise Unavailable("The database cannot be reached.")
        return accept(*given, **named)

    monkeypatch.setattr("perdure.channels.chat.ingress.accept", fail_once)
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        for number, content in enumerate(["first", "second"], start=1):
            discord.dispatch("MESSAGE_CREATE", discord_message(number, content))
        until(lambda: len(installation.sql("SELECT FROM inbox")) == 2, "both are accepted")
    assert [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")] == ["first", "second"]


# --- webhooks


def _interaction(kind: int, **more: Any) -> dict[str, Any]:
    return {"id": "1500000000000000000", "application_id": "900", "token": "tok", "type": kind, **more}


def _sign(body: bytes, at: float | None = None) -> dict[str, str]:
    stamp = str(int(time.time() if at is None else at))
    return {"X-Signature-Timestamp": stamp, "X-Signature-Ed25519": KEY.sign(stamp.encode() + body).hex()}


def test_discords_interactions(installation: Installation, gateway: TestClient, discord: DiscordServer) -> None:
    """A PING is answered by a PONG. A slash command is answered by a deferred response, which the reply replaces."""
    ping = json.dumps(_interaction(1)).encode()
    assert gateway.post("/v1/channels/discord", content=ping, headers=_sign(ping)).json() == {"type": 1}
    made_ms = int((installation.runtime.clock.now().timestamp()) * 1000) - 1_420_070_400_000
    interaction = _interaction(
        2,
        id=str(made_ms << 22),
        channel_id="21",
        user=ANA,
        data={"name": "ask", "options": [{"name": "text", "type": 3, "value": "what is 12*7+5?"}]},
    )
    body = json.dumps(interaction).encode()
    for _ in range(2):  # Discord may send an interaction twice
        answer = gateway.post("/v1/channels/discord", content=body, headers=_sign(body))
        assert answer.json() == {"type": 5}
    installation.work()
    [edited] = discord.edited
    assert edited["original"] == "tok"
    assert "89" in edited["content"]
    assert discord.sent == []


def test_an_expired_interaction_is_answered_in_the_channel(installation: Installation, discord: DiscordServer) -> None:
    """An interaction's token expires after fifteen minutes. A later reply is a message in the channel."""
    interaction = _interaction(2, channel_id="21", user=ANA, data={"name": "help", "options": []})
    installation.ingress("discord").take(
        {"t": "INTERACTION_CREATE", "d": interaction}
    )  # the id's timestamp is years old
    assert discord.edited == []
    assert "/link CODE" in discord.sent[0]["content"]


def test_slacks_webhook(installation: Installation, gateway: TestClient, slack: SlackServer) -> None:
    """The webhook answers the challenge. An event that Slack repeats is accepted only once."""

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
    """A slash command, which arrives as a form, is handled."""
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
    """A forged request gets 401 and changes nothing. A request to a channel that is not configured gets 401, too."""
    update = _interaction(2, channel_id="21", user=ANA, data={"name": "ask", "options": [{"value": "hi"}]})
    body = json.dumps(update if name == "discord" else slack_event("hi")).encode()
    signed = _sign(body) if name == "discord" else slack_server.signed(body, time.time())
    content, headers = forge(body, signed)
    assert gateway.post(f"/v1/channels/{name}", content=content, headers=headers).status_code == 401
    assert gateway.post("/v1/channels/telex", content=content, headers=headers).status_code == 401
    assert installation.users() == []


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_recorded_request_is_refused_later(installation: Installation, gateway: TestClient, name: str) -> None:
    """A signed request is refused five minutes after it was signed."""
    update = _interaction(2, channel_id="21", user=ANA, data={"name": "ask", "options": [{"value": "hi"}]})
    body = json.dumps(update if name == "discord" else slack_event("hi")).encode()
    for age_s, status in ((330, 401), (270, 200)):
        at = installation.runtime.clock.now().timestamp() - age_s
        headers = _sign(body, at) if name == "discord" else slack_server.signed(body, at)
        assert gateway.post(f"/v1/channels/{name}", content=body, headers=headers).status_code == status


@pytest.mark.parametrize("name", ["discord", "slack"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"type": "x"}', b"[" * 5_000, b'{"type": {}}'])
def test_a_malformed_request_is_refused(gateway: TestClient, name: str, body: bytes) -> None:
    """A malformed request with a valid signature never causes a 500."""
    headers = _sign(body) if name == "discord" else slack_server.signed(body, time.time())
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
    """A malformed update is dropped without an exception, so that the listener handles later ones."""
    installation.ingress(name).take(update)
    assert installation.users() == []


# --- groups, edits, deletions, commands, buttons


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
        handle(mention)  # Slack sends both
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
    """Memories of a private chat are not recalled in a group, because a group is a user of its own."""
    installation.ingress("discord").take(said("my favourite colour is teal"))
    installation.work()
    question = said("what is my favourite colour?", 2, guild_id="31", channel_id="22", **MENTION)
    installation.ingress("discord").take(question)
    installation.work()
    assert len(discord.sent) == 2
    assert "teal" not in discord.sent[-1]["content"]


def changed(name: str, content: str) -> dict[str, Any]:
    """An update that edits the first message."""
    if name == "discord":
        return {"t": "MESSAGE_UPDATE", "d": discord_message(1, content, edited_timestamp="2026-11-23T09:00:00+00:00")}
    message = {"user": "U1", "text": content, "ts": "1.1"}
    event: dict[str, Any] = {
        "subtype": "message_changed",
        "message": message,
        "previous_message": {**message, "text": "before"},
    }
    return slack_event("", "1.9", **event)


def deleted(name: str) -> dict[str, Any]:
    """An update that deletes the first message."""
    if name == "discord":
        return {"t": "MESSAGE_DELETE", "d": {"id": "1000001", "channel_id": "21", "author": {"id": "11"}}}
    before = {"user": "U1", "text": "before", "ts": "1.1"}
    return slack_event("", "1.9", subtype="message_deleted", deleted_ts="1.1", previous_message=before)


def first(name: str, content: str) -> dict[str, Any]:
    """An update with the first message."""
    return said(content) if name == "discord" else slack_event(content)


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_an_edit_changes_a_message_that_has_not_begun(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """An edit changes a message only before its turn begins. The original text, if repeated, is a duplicate."""
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
    """A deleted message whose turn has not begun gets no reply. A later deletion changes nothing."""
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
    """Messages of bots, webhooks and Discord are ignored. Otherwise two bots could answer each other for ever."""
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


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_commands(installation: Installation, discord: DiscordServer, slack: SlackServer, name: str) -> None:
    """`/cancel`, `/end`, `/new`, `/help` and unknown commands get an answer. A group cannot redeem a code."""

    def command(command: str, argument: str = "", *, group: bool = False) -> str:
        if name == "discord":
            where = {"guild_id": "31", "channel_id": "22", "member": {"user": ANA}} if group else {"channel_id": "21"}
            data = {"name": command, "options": [{"value": argument}] if argument else []}
            given = _interaction(2, id=discord.new_id(), user=ANA, data=data, **where)
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
    code = mint_code(installation.runtime.database, "ana").code
    assert "private chat" in command("link", code, group=True)
    assert "wrong" in command("link", "0000-0000-0000")
    assert "linked to ana" in command("link", code)
    assert [row.status for row in installation.sql("SELECT status FROM turns")] == ["cancelled"]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_new_begins_a_conversation_that_stays(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """Messages after `/new` go to the new conversation until the user opens another.

    `/list` and `/open` switch between conversations. `/end` ends the open one.
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
    """`/new` changes its sender's conversation only. After `/link`, the chat has the linked user's conversation."""
    take = installation.ingress("discord").take
    take(said("hello", 1))
    take(said("/new", 2))
    take(said("hello from Bo", 3, author=BO, channel_id="22"))
    take(said(f"/link {mint_code(installation.runtime.database, 'zoe').code}", 4))
    take(said("hello from Zoe", 5))
    rows = installation.sql("SELECT user_id, scope FROM sessions ORDER BY created_at")
    assert [(row.user_id, row.scope) for row in rows] == [("discord:11", ""), ("discord:12", ""), ("zoe", "")]


def _now_id(installation: Installation, number: int) -> str:
    """The id of a Discord message that was sent now."""
    made_ms = int(installation.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    return str((made_ms << 22) + number)


def test_messages_sent_while_no_process_listened_are_read(installation: Installation, discord: DiscordServer) -> None:
    """When the bot connects, it reads the messages after the last handled one. Each is accepted once, in order."""
    ids = [_now_id(installation, number) for number in range(150)]
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        discord.dispatch("MESSAGE_CREATE", {**discord_message(0, "before"), "id": ids[0]})
        until(
            lambda: installation.sql("SELECT FROM chat_places WHERE last_message_id IS NOT NULL"),
            "the message is handled",
        )
    before = [discord_message(0, "before"), discord_message(0, "said by the bot", author=discord_server.BOT)]
    missed = [discord_message(0, f"missed {number}") for number in range(148)]
    discord.written = [{**each, "id": id_} for each, id_ in zip([*before, *missed], ids, strict=True)]
    with installation.listening("discord"):
        discord.until(lambda: len(discord.identified) == 2, "the bot identifies itself again")
        discord.dispatch("MESSAGE_CREATE", {**discord_message(0, "after"), "id": _now_id(installation, 900_000)})
        until(lambda: len(installation.sql("SELECT FROM inbox")) >= 150, "all are accepted")
    found = [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")]
    assert found == ["before", *(f"missed {number}" for number in range(148)), "after"]


def test_a_history_that_fails_is_read_again(installation: Installation, discord: DiscordServer) -> None:
    """If reading the history fails, the `READY` event fails. The retry of the event reads the history again.

    A deleted chat is skipped.
    """
    take = installation.ingress("discord").take
    take({"t": "MESSAGE_CREATE", "d": {**discord_message(0, "before"), "id": _now_id(installation, 1)}})
    take({"t": "MESSAGE_CREATE", "d": {**discord_message(0, "gone", channel_id="29"), "id": _now_id(installation, 2)}})
    discord.written = [{**discord_message(0, "missed"), "id": _now_id(installation, 3)}]
    discord.fail("/channels/29", 404, {"code": 10003, "message": "Unknown Channel"}, times=50)
    discord.fail("/channels/21", 503)
    with pytest.raises(Unavailable):
        take({"t": "READY", "d": {}})
    take({"t": "READY", "d": {}})
    found = [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")]
    assert found == ["before", "gone", "missed"]
    assert discord.failures[0].times == 49, "the deleted chat is requested once"


# --- sending


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_long_reply_is_sent_in_parts_once(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """If the second part of a reply fails, the next attempt does not repeat the first part."""
    channel = installation.channels[name]
    carrier = ChatCarrier({name: channel}, Buttons(b""))
    words = " ".join(str(number) for number in range(2_000))
    body = json.dumps({"reply": {"text": words}}).encode()
    target = {"channel": name, "place": {"chat": "21" if name == "discord" else "D1"}}
    server: Any = discord if name == "discord" else slack
    carrier_calls = 0
    send = channel.send

    def send_but_fail_at_the_second(*given: Any) -> None:
        nonlocal carrier_calls
        carrier_calls += 1
        if carrier_calls == 2:
            server.fail("/messages" if name == "discord" else "chat.postMessage", 500)
        send(*given)

    channel.send = send_but_fail_at_the_second  # type: ignore[method-assign, assignment]
    with pytest.raises(DeliveryFailed, match="500"):
        carrier.carry(target, body, "one delivery")
    carrier.carry(target, body, "one delivery")
    texts = [each["content" if name == "discord" else "text"] for each in server.sent]
    assert all(len(each) <= channel.most_chars for each in texts)
    assert " ".join(texts) == words


def test_discord_deduplicates_for_another_worker(installation: Installation, discord: DiscordServer) -> None:
    """A second worker that repeats a delivery uses the same nonce, so Discord drops the duplicate."""
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    for _ in range(2):
        carrier = ChatCarrier(installation.channels, Buttons(b""))
        carrier.carry({"channel": "discord", "place": {"chat": "21"}}, body, "one delivery")
    assert len(discord.sent) == 1


FAILURES = [
    ("discord", 429, {"message": "slow down", "retry_after": 7.5, "global": False}, NotAsked),
    ("discord", 403, {"code": 50007, "message": "Cannot send messages to this user"}, Undeliverable),
    ("discord", 404, {"code": 10003, "message": "Unknown Channel"}, Undeliverable),
    ("discord", 400, {"code": 50035, "message": "Invalid Form Body"}, Undeliverable),
    ("discord", 401, {"code": 0, "message": "401: Unauthorized"}, DeliveryFailed),
    ("discord", 500, {}, DeliveryFailed),
    ("slack", 429, {"error": "ratelimited"}, NotAsked),
    ("slack", 200, {"error": "channel_not_found"}, Undeliverable),
    ("slack", 200, {"error": "is_archived"}, Undeliverable),
    ("slack", 200, {"error": "invalid_auth"}, DeliveryFailed),
    ("slack", 500, {}, DeliveryFailed),
]


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_refusals_have_distinct_errors(
    installation: Installation, servers: Servers, case: tuple[str, int, dict[str, Any], type[Exception]]
) -> None:
    """A rate limit raises `NotAsked`, a permanent refusal `Undeliverable`, and any other failure `DeliveryFailed`."""
    name, status, body, error = case
    if name == "discord":
        servers.discord.fail("/messages", status, body, times=9)
    else:
        servers.slack.fail("chat.postMessage", status, body.get("error", ""), times=9, Retry_After="7")
    with pytest.raises(error) as refused:
        installation.channels[name].send(Place("21"), "hello", (), "key")
    assert type(refused.value) is error
    if isinstance(refused.value, NotAsked):
        assert refused.value.retry_s == {"discord": 7.5, "slack": 7.0}[name]


def test_a_short_rate_limit_is_waited_out(installation: Installation, slack: SlackServer) -> None:
    """Slack's library repeats the call once after a short pause."""
    slack.fail("chat.postMessage", 429, "ratelimited", Retry_After="0")
    installation.channels["slack"].send(Place("D1"), "hello", (), "key")
    assert len(slack.sent) == 1


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_an_unreachable_service_is_a_failed_attempt(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """A failed connection is a failed attempt, which is retried."""
    dead = "http://127.0.0.1:9/api"
    given = {name: {**installation.runtime.settings.model_dump()[name], "api_url": dead}}
    settings = installation.runtime.settings.model_copy(
        update={name: type(getattr(installation.runtime.settings, name))(**given[name])}
    )
    channel = configured.channels(settings, installation.runtime.clock)[name]
    with pytest.raises(DeliveryFailed):
        channel.send(Place("21"), "hello", (), "key")
    channel.close()


HOSTILE = "<@1> <@&2> <#3> </x:4> <t:5> <:e:6> @everyone **bold** `<@1>` <!channel> <http://evil|bank> &lt; a<b"


def test_discord_shows_mentions_as_text() -> None:
    """Mentions are escaped, except in code, where Discord shows plain text. `allowed_mentions` stops notifications."""
    shown = discord_module.render(HOSTILE)
    assert shown.startswith("\\<@1> \\<@&2> \\<#3> \\</x:4> \\<t:5> \\<:e:6> @everyone **bold** `<@1>`")
    assert shown.endswith("a<b")


def test_slack_escapes_its_three_characters() -> None:
    """A model's text cannot mention anyone or hide a link on Slack. Its Markdown becomes mrkdwn."""
    shown = slack_module.render(HOSTILE)
    assert "<" not in shown
    assert shown.endswith("&amp;lt; a&lt;b")
    assert "*bold*" in shown
    links = "[here](https://example.com/?a=1&b=2) *it* ~~no~~ `**code**`\n# Title"
    rendered = slack_module.render(links)
    assert rendered == "<https://example.com/?a=1&amp;b=2|here> _it_ ~no~ `**code**`\n*Title*"
    assert slack_module.render("[x](javascript:alert(1))") == "[x](javascript:alert(1))"


def test_slacks_markup_is_resolved(installation: Installation) -> None:
    """Slack's ids become names, links show their addresses, and escapes are resolved."""
    given = "<@U0BOT> ask <@U2|bo> in <#C1|general> <!here> see <https://a.example|this> &lt;b&gt; &amp;amp;"
    [event] = installation.channels["slack"].parse(slack_event(given))
    assert isinstance(event, Said)
    assert event.text == "ask @bo in #general @here see this (https://a.example) <b> &amp;"


# --- splitting


@hypothesis.given(st.text(alphabet=st.sampled_from("ab `\n*"), max_size=2_000), st.integers(100, 400))
def test_parts_are_short_and_lose_no_word(text_: str, most: int) -> None:
    """The parts of any text are within the limit. Together the parts keep all but blanks and fences."""
    parts = split(text_, most)
    assert all(0 < len(part) <= most for part in parts)
    kept = "".join("".join(parts).split()).replace("`", "")
    assert kept == "".join(text_.split()).replace("`", "")


def test_a_code_block_is_closed_and_opened_again() -> None:
    """A code block that is split is closed and reopened with its language, so that each part shows as code."""
    code = "\n".join(f"line {number}" for number in range(60))
    parts = split(f"Look:\n```python\n{code}\n```\nDone.", 200)
    assert len(parts) > 2
    assert all(part.count("```") % 2 == 0 for part in parts)
    assert all(part.startswith("```python\n") for part in parts[1:-1])
    assert parts[-1].endswith("Done.")


# --- buttons


def test_a_button_is_for_one_call_chat_and_person() -> None:
    """A button is valid for one call, chat and person. A changed token is refused."""
    buttons, turn_id = Buttons(b"secret"), uuid4()
    chat = Chat("discord", "21", "11")
    token = buttons.token("approve", turn_id, "call-1", chat)
    assert len(token) <= 64
    assert buttons.turn_of(token) == ("approve", turn_id)
    assert buttons.is_for(token, "call-1", chat)
    for other in (Chat("slack", "21", "11"), Chat("discord", "2", "111"), Chat("discord", "21", "12")):
        assert not buttons.is_for(token, "call-1", other)
    assert not buttons.is_for(token, "call-2", chat)
    assert not buttons.is_for(f"d{token[1:]}", "call-1", chat)
    assert not Buttons(b"another").is_for(token, "call-1", chat)
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


def pressed(name: str, token: str, person: str, chat: str) -> dict[str, Any]:
    """The update for a pressed button. `person` and `chat` are Discord ids; Slack's update has matching ids."""
    if name == "discord":
        message = {"id": "5"}
        given = _interaction(3, channel_id=chat, user={**ANA, "id": person}, message=message, data={"custom_id": token})
        return {"t": "INTERACTION_CREATE", "d": given}
    return {
        "type": "block_actions",
        "user": {"id": {"11": "U1"}.get(person, "U2"), "name": "ana"},
        "channel": {"id": {"21": "D1"}.get(chat, "D9")},
        "message": {"ts": "1.1"},
        "actions": [{"type": "button", "action_id": "button-0", "value": token}],
    }


def test_a_restored_message_is_answered_in_its_chat(installation: Installation, servers: Servers) -> None:
    """An exported pending message keeps its chat when it is imported, and is accepted once."""
    installation.ingress("discord").take(said("what is 12*7+5?"))
    [row] = installation.sql("SELECT session_id FROM sessions")
    snapshot = parse(dump(read(installation.runtime.database, row.session_id)))
    assert restore(installation.runtime, snapshot).known == 1
    with installation.runtime.database.engine.connect() as connection:
        connection.execute(text("TRUNCATE turns, inbox CASCADE"))
        connection.execute(text("UPDATE sessions SET unsettled = 0, last_turn_seq = 0"))
    assert restore(installation.runtime, snapshot).accepted == 1
    installation.work()
    assert "89" in servers.discord.sent[0]["content"]


def test_a_malformed_place_is_a_dead_letter(installation: Installation) -> None:
    """A malformed target, from an import or another release, fails permanently, since no attempt can succeed."""
    carrier = ChatCarrier(installation.channels, Buttons(b""))
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    for target in ({"channel": "telex"}, {"channel": "discord"}, {"channel": "discord", "place": {"where": "here"}}):
        with pytest.raises(Undeliverable):
            carrier.carry(target, body, "one delivery")


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_failing_service_opens_its_breaker(installation: Installation, servers: Servers, name: str) -> None:
    """Repeated failures of the service open its breaker, which stops attempts. Refusals by a chat do not count."""
    clock = MovedClock()
    breakers = Breakers(BreakerSettings(failure_threshold=2, cooldown_s=60), clock)
    carrier = ChatCarrier(installation.channels, Buttons(b""), breakers)
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    target = {"channel": name, "place": {"chat": "21"}}
    server: Any = servers.discord if name == "discord" else servers.slack
    path = "/messages" if name == "discord" else "chat.postMessage"

    if name == "discord":
        server.fail(path, 403, {"code": 50007, "message": "Cannot send messages to this user"}, times=5)
    else:
        server.fail(path, 200, "channel_not_found", times=5)
    for number in range(5):
        with pytest.raises(Undeliverable):
            carrier.carry(target, body, f"refused {number}")
    server.fail(path, 500, times=2)
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match="500"):
            carrier.carry(target, body, "one delivery")
    with pytest.raises(NotAsked):
        carrier.carry(target, body, "one delivery")
    assert server.sent == []
    clock.advance(timedelta(seconds=61))
    carrier.carry(target, body, "one delivery")
    assert len(server.sent) == 1
