"""Updates as Discord and Slack send them."""

from __future__ import annotations

import time
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.channels import discord_server, slack_server

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))

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
    """A payload of Slack's Events API with a message."""
    event = {"type": "message", "channel": "D1", "channel_type": "im", "user": user, "text": content, "ts": ts, **more}
    authorizations = [{"user_id": slack_server.BOT_USER, "is_bot": True}]
    return {"type": "event_callback", "event_id": f"Ev{ts}", "event": event, "authorizations": authorizations}


IN_CHANNEL = {"channel": "C1", "channel_type": "channel"}


def interaction_of_kind(kind: int, **more: Any) -> dict[str, Any]:
    """An interaction on Discord: a PING (1), a slash command (2) or a pressed button (3)."""
    return {"id": "1500000000000000000", "application_id": "900", "token": "tok", "type": kind, **more}


def sign(body: bytes, at: float | None = None) -> dict[str, str]:
    """The headers of a request that Discord signs at the time `at`, by default now."""
    stamp = str(int(time.time() if at is None else at))
    return {"X-Signature-Timestamp": stamp, "X-Signature-Ed25519": KEY.sign(stamp.encode() + body).hex()}


SLASH = {"channel_id": "D1", "user_id": "U1", "user_name": "ana", "team_id": "T1", "trigger_id": "1.2.3"}


def changed(name: str, content: str) -> dict[str, Any]:
    """An update that edits the first message, which the function `first` creates."""
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
    """An update that deletes the first message, which the function `first` creates."""
    if name == "discord":
        return {"t": "MESSAGE_DELETE", "d": {"id": "1000001", "channel_id": "21", "author": {"id": "11"}}}
    before = {"user": "U1", "text": "before", "ts": "1.1"}
    return slack_event("", "1.9", subtype="message_deleted", deleted_ts="1.1", previous_message=before)


def first(name: str, content: str) -> dict[str, Any]:
    """An update with the first message."""
    return said(content) if name == "discord" else slack_event(content)


def pressed(name: str, token: str, person: str, chat: str) -> dict[str, Any]:
    """An update for a pressed button. `person` and `chat` are Discord ids. For Slack, they are mapped to Slack ids."""
    if name == "discord":
        message = {"id": "5"}
        given = interaction_of_kind(
            3, channel_id=chat, user={**ANA, "id": person}, message=message, data={"custom_id": token}
        )
        return {"t": "INTERACTION_CREATE", "d": given}
    return {
        "type": "block_actions",
        "user": {"id": {"11": "U1"}.get(person, "U2"), "name": "ana"},
        "channel": {"id": {"21": "D1"}.get(chat, "D9")},
        "message": {"ts": "1.1"},
        "actions": [{"type": "button", "action_id": "button-0", "value": token}],
    }


TELEGRAM_ANA = {"id": 11, "is_bot": False, "first_name": "Ana"}
TELEGRAM_GROUP = {"id": -100, "type": "supergroup", "title": "Friends"}


def telegram_said(content: str | None, number: int = 1, **more: Any) -> dict[str, Any]:
    """An update with a new message of Ana in a private chat of Telegram; `more` replaces fields of the message."""
    chat = {"id": 11, "type": "private"}
    message = {"message_id": number, "date": 1, "chat": chat, "from": TELEGRAM_ANA, "text": content, **more}
    return {"update_id": number, "message": {name: value for name, value in message.items() if value is not None}}


def said_in_group(name: str, content: str, number: int = 1) -> dict[str, Any]:
    """An update with a message of Ana to the bot, in a group of the service."""
    if name == "discord":
        return said(content, number, guild_id="31", **MENTION)
    if name == "slack":
        return slack_event(f"<@{slack_server.BOT_USER}> {content}", f"1.{number}", **IN_CHANNEL)
    return telegram_said(content, number, chat=TELEGRAM_GROUP)


def pressed_in_group(name: str, token: str, person: str, chat: Any = None) -> dict[str, Any]:
    """An update for a button that Ana ("11") or another member pressed in the group of `said_in_group`."""
    if name == "discord":
        user = {**ANA, "id": person}
        more = {"channel_id": "21", "guild_id": "31", "member": {"user": user}}
        given = interaction_of_kind(3, **more, message={"id": "5"}, data={"custom_id": token})
        return {"t": "INTERACTION_CREATE", "d": given}
    if name == "slack":
        update = pressed(name, token, person, "21")
        return {**update, "channel": {"id": "C1"}, "message": {"ts": "1.2", "thread_ts": "1.1"}}
    message = {"message_id": 5, "date": 1, "chat": chat or TELEGRAM_GROUP}
    sender = {"id": int(person), "is_bot": False, "first_name": "Someone"}
    return {"update_id": 9, "callback_query": {"id": "77", "from": sender, "message": message, "data": token}}
