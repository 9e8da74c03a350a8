"""Reads from Discord's REST API the messages that people wrote in a channel while no process listened.

Reads at most `MOST_READ` messages of each channel, none of them older than `LONGEST_AGO`. The caller may have handled
some of these messages already. Message ids deduplicate them.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import hikari
from hikari.api import RESTClient
from hikari.messages import MessageSnapshot

LONGEST_AGO = timedelta(days=1)
MOST_READ = 300
"""The most messages per channel. They take three requests; Discord allows five requests in five seconds per channel."""
HISTORY_S = 60.0
"""Seconds within which one channel's history must be read."""


async def read_history(rest: RESTClient, chat: str, after: str, now: datetime) -> list[dict[str, Any]]:
    """The messages of a channel after the message with the id `after`, oldest first, as gateway events."""
    channel = await rest.fetch_channel(int(chat))
    oldest = max(hikari.Snowflake(after), hikari.Snowflake.from_datetime(now - LONGEST_AGO))
    found = rest.fetch_messages(int(chat), after=oldest).limit(MOST_READ)
    return [{"t": "MESSAGE_CREATE", "d": _as_event(message, channel)} async for message in found]


def _as_event(message: hikari.Message, channel: hikari.PartialChannel) -> dict[str, Any]:
    """A message as a gateway event, with the fields for server and thread, which the REST API omits."""
    event: dict[str, Any] = {
        **_content(message),
        "id": str(message.id),
        "channel_id": str(message.channel_id),
        "type": int(message.type),
        "author": _user(message.author),
        "referenced_message": None if message.referenced_message is None else _replied(message.referenced_message),
    }
    if message.webhook_id is not None:
        event["webhook_id"] = str(message.webhook_id)
    if isinstance(channel, hikari.GuildChannel):
        event["guild_id"] = str(channel.guild_id)
    if isinstance(channel, hikari.GuildThreadChannel):
        event["position"] = 0
    return event


def _replied(message: hikari.PartialMessage) -> dict[str, Any]:
    return {**_content(message), **({"author": _user(message.author)} if message.author else {})}


def _content(message: hikari.PartialMessage | MessageSnapshot) -> dict[str, Any]:
    content: dict[str, Any] = {
        "content": message.content or "",
        "mentions": [_user(each) for each in (message.user_mentions or {}).values()],
        "attachments": [
            {"url": each.url, "filename": each.filename, "content_type": each.media_type}
            for each in message.attachments or ()
        ],
        "sticker_items": [str(each.id) for each in message.stickers or ()],
    }
    if isinstance(message, hikari.PartialMessage):
        content["message_snapshots"] = [{"message": _content(each)} for each in message.message_snapshots or ()]
    return content


def _user(user: hikari.User) -> dict[str, Any]:
    return {"id": str(user.id), "username": user.username, "global_name": user.global_name, "bot": user.is_bot}
