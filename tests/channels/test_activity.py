"""Typing and presence: channels record them in the user's Redis stream, which is layer 0 of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from starlette.testclient import TestClient

from perdure.access.tenants import UserKey, user_key
from perdure.channels.activity import PRESENCE, TYPING, note_activity
from perdure.channels.cli import Speaker, TerminalConversation
from perdure.channels.http.app import create_app
from perdure.channels.http.auth import Keys
from perdure.channels.services.discord.channel import Discord
from perdure.channels.services.ingress import Ingress
from perdure.clock import MovedClock
from perdure.memory.redis.memory import RedisMemory
from perdure.memory.redis.stream import NOTED_EVERY_S
from perdure.runtime import Runtime
from perdure.settings import MemorySettings, Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from tests.channels.conftest import ADMIN_KEY, BASE_URL, SERVICE_KEY
from tests.channels.discord_server import TOKEN, DiscordServer
from tests.channels.test_socket import SOCKET

KEYS = {"api_keys": SERVICE_KEY, "admin_keys": ADMIN_KEY, "secret_key": "the secret of these tests' tokens"}


@pytest.fixture
def remembering(runtime: Runtime, redis_url: str, clock: MovedClock) -> Iterator[Runtime]:
    """A runtime with Redis. The user `ann` and a person on Discord have each sent a message."""
    memory = RedisMemory.at(redis_url, MemorySettings(), clock)
    made = replace(runtime, redis_memory=memory)
    for user in ("ann", "discord:11"):
        accept(made, parse_incoming({"user_id": user, "text": "hello", "channel": "cli"}))
    yield made
    memory.close()


def noted(runtime: Runtime, user: str) -> list[tuple[str, str]]:
    """The kind and channel of each event in the user's stream."""
    assert runtime.redis_memory is not None
    return [(str(each.kind), each.channel) for each in runtime.redis_memory.stream.recent(UserKey(user), 100)]


def test_events_of_one_kind_are_bounded(remembering: Runtime, clock: MovedClock) -> None:
    """Events of one kind and channel are rate-limited, because a client may report every key press."""
    assert [note_activity(remembering, UserKey("ann"), "web", TYPING) for _ in range(5)] == [True] + [False] * 4
    assert note_activity(remembering, UserKey("ann"), "web", PRESENCE)
    assert note_activity(remembering, UserKey("ann"), "discord", TYPING)
    clock.advance(timedelta(seconds=NOTED_EVERY_S))
    assert note_activity(remembering, UserKey("ann"), "web", TYPING)


def test_nothing_is_noted_of_an_unknown_user(remembering: Runtime) -> None:
    """No activity is recorded for a person who has never sent a message, because no erasure would find the record."""
    assert not note_activity(remembering, UserKey("zoe"), "discord", TYPING)
    assert noted(remembering, "zoe") == []


def test_without_redis_nothing_is_noted(runtime: Runtime) -> None:
    """A process without Redis records no activity and does not fail."""
    assert not note_activity(runtime, UserKey("ann"), "web", TYPING)


def test_typing_on_discord_is_noted(remembering: Runtime) -> None:
    """Typing in a private chat on Discord is recorded. Typing in a group is not, because it may not concern the bot."""
    server = DiscordServer()
    channel = Discord(TOKEN, None, server.url, remembering.clock)
    ingress = Ingress(remembering, channel)
    try:
        ingress.take({"t": "TYPING_START", "d": {"channel_id": "21", "user_id": "11", "timestamp": 1}})
        ingress.take({"t": "TYPING_START", "d": {"channel_id": "22", "user_id": "11", "guild_id": "3", "timestamp": 1}})
    finally:
        ingress.close()
        channel.close()
        server.close()
    assert noted(remembering, "discord:11") == [("typing", "discord")]


def test_a_socket_notes_presence_and_typing(remembering: Runtime, clock: MovedClock) -> None:
    """A WebSocket's opening and closing are recorded, as is its user's typing. Typing as another user is refused."""
    settings = Settings(_env_file=None, **KEYS)  # type: ignore[arg-type]
    token = Keys(settings, clock).tokens.mint(user_key(None, "ann"), 600)[0]
    app = create_app(replace(remembering, settings=settings), lambda: True)
    with TestClient(app, base_url=BASE_URL) as client, client.websocket_connect(SOCKET) as socket:
        socket.send_json({"type": "auth", "token": token})
        assert socket.receive_json() == {"type": "ready", "user_id": "ann"}
        socket.send_json({"type": "typing", "ref": 1})
        assert socket.receive_json() == {"type": "ok", "ref": 1}
        socket.send_json({"type": "typing", "ref": 2, "user_id": "ben"})
        assert socket.receive_json()["code"] == "NOT_FOUND"
        clock.advance(timedelta(seconds=NOTED_EVERY_S))
    assert noted(remembering, "ann") == [("presence", "web"), ("typing", "web"), ("presence", "web")]


def test_the_command_line_notes_presence(remembering: Runtime) -> None:
    """`perdure chat` records presence."""
    conversation = TerminalConversation(remembering, Speaker("ann"), None, lambda _: None)
    conversation.note_presence()
    conversation.close()
    assert noted(remembering, "ann") == [("presence", "cli")]
