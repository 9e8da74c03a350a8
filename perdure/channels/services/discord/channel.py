"""The channel `discord`, through hikari: Discord's gateway, its webhook for interactions, and its REST API.

In a private chat, every message is for the agent. In a server's channel, a message is for the agent if it mentions the
bot or replies to the bot. After the first such message in a thread, every message in that thread is for the agent.

Slash commands and button presses are interactions. Discord sends interactions to the application's endpoint URL (the
webhook) if the application has one, otherwise over the gateway. Discord requires an answer to an interaction within
three seconds. This module first sends a deferred answer, and the first part of the reply later replaces that answer.

Each sent message has a nonce that is derived from the delivery. An attempt that is repeated within a few minutes
therefore sends no duplicate. Text is sent as Discord's Markdown. No message notifies anyone (`allowed_mentions` is
empty), and text that looks like a mention is shown as plain text.

A new session of Discord's gateway does not repeat earlier events. For each recently active chat, `history` therefore
reads the messages after the last handled message.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Event as Stop
from typing import Any
from urllib.parse import urlsplit

import hikari
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hikari.api import CacheComponents, RESTClient
from hikari.impl import CacheSettings

from perdure.channels.services.code_spans import outside_code
from perdure.channels.services.discord.history import HISTORY_S, read_history
from perdure.channels.services.discord.rest import HTTP, Rest
from perdure.channels.services.downloading import download
from perdure.channels.services.protocol import (
    COMMANDS,
    FORWARDED,
    NO_TEXT,
    SOMEONE,
    UPLOAD_S,
    Attachment,
    Button,
    ChannelFailed,
    Commanded,
    Connected,
    Deleted,
    Edited,
    Event,
    Place,
    Pressed,
    Quoted,
    Received,
    Said,
    Sender,
    Shared,
    Typed,
    Unsupported,
    Update,
)
from perdure.channels.services.splitting import units
from perdure.clock import Clock
from perdure.errors import InvalidRequest, SettingsError, Unauthorized, loggable
from perdure.text.patterns import Match, compiled
from perdure.turns.outbox import Undeliverable

log = logging.getLogger(__name__)

STALE_S = 300
_TYPING_S = 2.0
_INTERACTION_S = 840
"""Seconds for which an interaction's token is used. Discord accepts the token for 900 seconds."""

_PING, _COMMAND, _COMPONENT = 1, 2, 3
_PONG, _DEFERRED, _DEFERRED_UPDATE = {"type": 1}, {"type": 5}, {"type": 6}
_SAID = frozenset({0, 19})
"""Types of messages that a person wrote: a plain message and a reply. Other types report joins, pins and the like."""

_UNREAD = {"sticker_items": "a sticker", "attachments": "a file", "poll": "a poll"}
"""What a message may have that is no text, by its member."""

_UNSIGNED = "The request is not signed by Discord."
_INTERACTION = "INTERACTION_CREATE"
_EVENTS = frozenset({"READY", "MESSAGE_CREATE", "MESSAGE_UPDATE", "MESSAGE_DELETE", "TYPING_START", _INTERACTION})
_INTENTS = (
    hikari.Intents.GUILD_MESSAGES
    | hikari.Intents.DM_MESSAGES
    | hikari.Intents.DM_MESSAGE_TYPING
    | hikari.Intents.MESSAGE_CONTENT
)
_SILENT: dict[str, Any] = {"mentions_everyone": False, "user_mentions": False, "role_mentions": False}

_NO_PREVIEW = hikari.MessageFlag.SUPPRESS_EMBEDS
"""A preview would make Discord request a URL that an injected instruction may have put into a reply."""

ASK = "ask"
"""The slash command whose text is a message for the agent."""

_CDN = frozenset({"cdn.discordapp.com", "media.discordapp.net"})
"""The hosts of attachments."""

_NONCE_CHARS = 25
_LOOK_S = 0.25
_MOST_RECIPIENTS = 10_000
_BUTTONS_A_ROW = 5
_MARKUP = compiled(r"[\\*_~`|<>\[\]#@:-]")
_TEXT = compiled(r"<(?:@|#|:|/|a:|t:|id:)|https?://[^\s<]+|[A-Za-z0-9_*]+")
"""What `_plain` changes or must keep: a mention, a URL, and a word in which asterisks and underscores may be text."""

_ASTERISKS = compiled(r"\*+")
_NAMED = compiled(r"<@!?([0-9]{1,20})>")


class Discord:
    """The channel `discord`. `api_url` is the base URL of the REST API; `None` stands for Discord's own URL.

    Thread-safe.
    """

    name = "discord"
    most_chars = 2_000
    most_file_bytes = 10 * 2**20  # without boosts of a server
    typing_s = 10.0
    notes_a_second = 10.0
    reads_history = True
    listens = True

    def __init__(self, token: str, public_key: str | None, api_url: str | None, clock: Clock) -> None:
        self._token = token
        self._url = api_url
        self._clock = clock
        self._key = None if public_key is None else _public_key(public_key)
        self._bot_id = _bot_id(token)
        self._rest = Rest(token, api_url)
        self._recipients: dict[str, str] = {}

    def close(self) -> None:
        self._rest.close()

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Check the signature of a webhook request. The names in `headers` are in lower case.

        Raises:
            Unauthorized: the signature is invalid, the request is older than `STALE_S` seconds, or no public key is
                configured.
        """
        stamp = headers.get("x-signature-timestamp", "")
        if self._key is None or not stamp.isascii() or not stamp.isdigit():
            raise Unauthorized(_UNSIGNED)
        try:
            self._key.verify(bytes.fromhex(headers.get("x-signature-ed25519", "")), stamp.encode() + body)
        except (InvalidSignature, ValueError):
            raise Unauthorized(_UNSIGNED) from None
        if abs(self._clock.now().timestamp() - float(stamp)) > STALE_S:
            raise Unauthorized("The request's timestamp is too old.")

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:  # noqa: ARG002 (the protocol's)
        """The interaction in a verified webhook request, and the response to the request.

        Raises:
            InvalidRequest: the body is not an interaction.
        """
        try:
            given = json.loads(body)
            kind = int(given["type"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise InvalidRequest("The body is not a Discord interaction (a JSON object with a `type`).") from None
        if kind == _PING:
            return Received((), _PONG)
        if kind not in {_COMMAND, _COMPONENT}:
            raise InvalidRequest(f"type: {kind} is not supported; accepted: 1, 2, 3.")
        answer = _DEFERRED if kind == _COMMAND else _DEFERRED_UPDATE
        return Received(({"t": _INTERACTION, "d": given},), answer)

    def parse(self, update: Update) -> list[Event]:
        """Translate an event of Discord's gateway, `{"t": name, "d": data}`, into events of the channel protocol.

        Raises:
            KeyError, TypeError, ValueError: the event is malformed.
        """
        data = update["d"]
        events: list[Event] = []
        match update["t"]:
            case "MESSAGE_CREATE":
                events = self._said(data)
            case "MESSAGE_UPDATE" if data.get("edited_timestamp") and _is_from_person(data):
                events = [Edited(_place(data), _sender(data), data["id"], self._text(data), self._quoted(data))]
            case "MESSAGE_DELETE":
                events = [Deleted(_place(data), _sender(data) if "author" in data else None, data["id"])]
            case "INTERACTION_CREATE":
                events = _interaction(data)
            case "TYPING_START" if "guild_id" not in data:
                events = [Typed(Place(chat=data["channel_id"]), Sender(data["user_id"]))]
            case "READY":
                events = [Connected()]
            case _:
                pass
        return events

    def _said(self, data: Update) -> list[Event]:
        thread, private = "position" in data, "guild_id" not in data
        if not _is_from_person(data) or not (private or thread or self._is_addressed(data)):
            return []
        quoted, place, sender = self._quoted(data), _place(data), _sender(data)
        text = self._text(data) or _in_place_of_text(data, quoted)
        known = thread and not self._is_addressed(data)
        files = tuple(_shared(each) for part in (data, *_forwarded(data)) for each in _attached(part))
        if not text and not files:
            return [Unsupported(place, sender, data["id"], _content_of(data), if_known=known)]
        command, _, argument = text.partition(" ")
        if _is_command(command, argument):
            return [Commanded(place, sender, data["id"], command[1:].lower(), argument.strip())]
        return [Said(place, sender, data["id"], text, if_known=known, files=files, quoted=quoted)]

    def download(self, file: Shared, write: Callable[[bytes], None]) -> None:
        """Pass the content of an attachment to `write`.

        Raises:
            Undeliverable: Discord refuses the file.
            DeliveryFailed: Discord cannot be reached.
        """
        hosts = _CDN if self._url is None else {urlsplit(self._url).hostname or ""}
        download(file.ref, hosts, write, {})

    def _is_addressed(self, data: Update) -> bool:
        replied = data.get("referenced_message") or {}
        named = [*data.get("mentions", ()), replied.get("author") or {}]
        return any(each.get("id") == self._bot_id for each in named)

    def _text(self, data: Update) -> str:
        """The text of the message `data`, with mentions shown as names and mentions of the bot removed."""
        names = {each["id"]: f"@{each.get('global_name') or each['username']}" for each in data.get("mentions", ())}
        names[self._bot_id] = ""
        return _NAMED.sub(lambda found: names.get(found[1], "@someone"), data.get("content", "")).strip()

    def _quoted(self, data: Update) -> tuple[Quoted, ...]:
        """The messages that `data` forwards, whose authors Discord does not name, or the message it replies to."""
        if forwarded := _forwarded(data):
            texts = [self._text(each) for each in forwarded]
            return tuple(Quoted(text, SOMEONE, is_forward=True) for text in texts if text)
        replied = data.get("referenced_message") or {}
        remark = next((what for name, what in _UNREAD.items() if replied.get(name)), None)
        original = [self._text(each) for each in (replied, *_forwarded(replied))]
        text = "\n".join([*([f"[{remark}, which is not shown]"] if remark else []), *filter(None, original)])
        author = replied.get("author") or {}
        name = author.get("global_name") or author.get("username") or SOMEONE
        return (Quoted(text, None if author.get("id") == self._bot_id else name),) if text else ()

    def length(self, text: str) -> int:
        """The UTF-16 code units of the text, with escapes."""
        return units(render(text))

    def send(self, place: Place, text: str, buttons: Sequence[Button], key: str, *, plain: bool = False) -> None:
        """Send one message, whose `length` is at most `most_chars`.

        Each message has its own `key`. Repeated attempts to send a message use the same `key`.

        Raises:
            NotAsked: Discord asks for a pause.
            Undeliverable: the channel no longer exists, or the bot may not write in the channel.
            DeliveryFailed: Discord did not confirm the message.
        """

        async def work(rest: RESTClient) -> None:
            shown = _without_markup(text) if plain else render(text)
            content = {"content": shown, "components": _rows(rest, buttons), **_SILENT}
            if not (self._is_answerable(place) and await _answered(rest, place, content)):
                await rest.create_message(int(place.chat), nonce=_nonce(key), flags=_NO_PREVIEW, **content)

        self._rest.run(work)

    def send_file(self, place: Place, file: Attachment, key: str) -> None:
        """Send a file as an attachment. `key` is as in `send`.

        Raises:
            NotAsked: Discord asks for a pause.
            Undeliverable: as in `send`, or Discord refuses the file.
            DeliveryFailed: Discord did not confirm the message.
        """

        async def work(rest: RESTClient) -> None:
            content = {"attachment": hikari.Bytes(file.data, file.name), **_SILENT}
            if not (self._is_answerable(place) and await _answered(rest, place, content)):
                await rest.create_message(int(place.chat), nonce=_nonce(key), **content)

        self._rest.run(work, UPLOAD_S)

    def mark(self, place: Place, text: str) -> None:
        """Replace the message that contains the pressed button with `text`, and remove the buttons.

        Sends `text` as a new message instead if `place` has no valid interaction token.

        Raises:
            DeliveryFailed: as in `send`.
        """

        async def work(rest: RESTClient) -> None:
            content = {"content": render(text), "components": [], **_SILENT}
            if not (self._is_answerable(place) and await _answered(rest, place, content)):
                await rest.create_message(int(place.chat), flags=_NO_PREVIEW, **content)

        self._rest.run(work)

    def acknowledge(self, place: Place) -> None:
        """Do nothing: the response to Discord's request is the confirmation."""

    def typing(self, place: Place) -> None:
        """Show the bot's typing indicator for ten seconds.

        Raises:
            DeliveryFailed: as in `send`.
        """

        async def work(rest: RESTClient) -> None:
            await rest.trigger_typing(int(place.chat))

        self._rest.run(work, _TYPING_S)

    def show_note(self, place: Place, text: str, note_id: str | None) -> str:
        """Show a note, or change the text of the message `note_id`.

        A note is a message of its own even in a place that answers an interaction, so that a change that comes late
        cannot replace the reply.

        Raises:
            NotAsked: Discord asks for a pause.
            Undeliverable: Discord refuses the note, or the person has deleted it.
            DeliveryFailed: Discord did not confirm the note.
        """

        async def work(rest: RESTClient) -> str:
            content = {"content": render(text), **_SILENT}
            if note_id is not None:
                await rest.edit_message(int(place.chat), int(note_id), **content)
                return note_id
            flags = hikari.MessageFlag.SUPPRESS_NOTIFICATIONS | hikari.MessageFlag.SUPPRESS_EMBEDS
            return str((await rest.create_message(int(place.chat), flags=flags, **content)).id)

        return self._rest.run(work)

    def remove_note(self, place: Place, note_id: str) -> None:
        """Delete the message `note_id`.

        Raises:
            DeliveryFailed: as in `show_note`.
        """

        async def work(rest: RESTClient) -> None:
            await rest.delete_message(int(place.chat), int(note_id))

        self._rest.run(work)

    def missed(self, chat: str, after: str) -> Sequence[Update]:
        """The messages after the message with the id `after` in the channel `chat`, oldest first, as gateway events.

        `history` limits the number and the age of the messages. Empty if the channel no longer exists, or the bot may
        not read the channel.

        Raises:
            DeliveryFailed: the request to Discord failed.
        """
        try:
            return self._rest.run(partial(read_history, chat=chat, after=after, now=self._clock.now()), HISTORY_S)
        except Undeliverable as error:
            log.info("Discord: the missed messages of a channel cannot be read: status %s", error.status_code)
            return ()

    def listen(self, on_update: Callable[[Update], None], stop: Stop) -> None:
        """Pass the gateway's events to `on_update`, one after another, until `stop` is set.

        Raises:
            ChannelFailed: the gateway cannot be reached, or refuses the token.
        """
        try:
            asyncio.run(self._listen(on_update, stop))
        except (hikari.HikariError, OSError, TimeoutError) as error:
            raise ChannelFailed(f"Discord's gateway cannot be used ({type(error).__name__}).") from error

    async def _listen(self, on_update: Callable[[Update], None], stop: Stop) -> None:
        bot = self._bot()
        arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def receive(event: hikari.ShardPayloadEvent) -> None:
            try:
                if event.name == _INTERACTION:  # Discord accepts no answer before the deferred one
                    await _defer(bot.rest, event.payload)
            finally:
                if event.name in _EVENTS:
                    arrived.put_nowait({"t": event.name, "d": dict(event.payload)})

        bot.subscribe(hikari.ShardPayloadEvent, receive)
        try:
            await bot.start(check_for_updates=False)
            over = asyncio.ensure_future(bot.join())
            while not stop.is_set() and not over.done():
                with suppress(TimeoutError):
                    update = await asyncio.wait_for(arrived.get(), _LOOK_S)
                    await self._name_author(bot.rest, update)
                    await asyncio.to_thread(on_update, update)
            if over.done():
                over.result()
            over.cancel()
        finally:
            if bot.is_alive:
                await bot.close()

    def _bot(self) -> hikari.GatewayBot:
        return hikari.GatewayBot(
            self._token,
            rest_url=self._url,
            intents=_INTENTS,
            cache_settings=CacheSettings(components=CacheComponents.NONE),
            http_settings=HTTP,
            auto_chunk_members=False,
            max_rate_limit=0,
            max_retries=0,
            banner=None,
            logs=None,
            suppress_optimization_warning=True,
        )

    async def _name_author(self, rest: RESTClient, update: dict[str, Any]) -> None:
        """Add the author to the event of a deleted private message, because Discord's event names only the channel.

        Stores the author of each message that a person sends in a private chat, for up to `_MOST_RECIPIENTS` chats. If
        no author is stored for the chat of a deleted message, asks Discord who the person in the chat is.
        """
        data = update["d"]
        if "guild_id" in data or update["t"] not in {"MESSAGE_CREATE", "MESSAGE_DELETE"}:
            return
        if update["t"] == "MESSAGE_CREATE" and _is_from_person(data):
            self._recipients.pop(data["channel_id"], None)
            self._recipients[data["channel_id"]] = data["author"]["id"]
            if len(self._recipients) > _MOST_RECIPIENTS:
                del self._recipients[next(iter(self._recipients))]
        elif update["t"] == "MESSAGE_DELETE":
            recipient = self._recipients.get(data["channel_id"]) or await _recipient(rest, data["channel_id"])
            if recipient is not None:
                data["author"] = {"id": recipient}

    def _is_answerable(self, place: Place) -> bool:
        """Whether `place` has an interaction token that is still valid."""
        if place.token is None or place.message is None:
            return False
        sent_s = hikari.Snowflake(place.message).created_at.timestamp()
        return self._clock.now().timestamp() - sent_s < _INTERACTION_S


def _nonce(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:_NONCE_CHARS]


def render(text: str) -> str:
    """Escape text that Discord would show as a mention, a channel link, a time or an emoji. Code is unchanged.

    Asterisks of a power (`2**3`) and underscores of a name (`__init__`), which Discord drops, are escaped, too.
    """
    return outside_code(text, _plain)


def _without_markup(text: str) -> str:
    """The text with all its markup escaped, where that fits into a message."""
    escaped = _MARKUP.sub(lambda found: f"\\{found[0]}", text)
    return escaped if units(escaped) <= Discord.most_chars else render(text)


def _plain(text: str) -> str:
    return _TEXT.sub(lambda found: _escaped(found[0]), text)


def _escaped(text: str) -> str:
    """What `_TEXT` found, with the asterisks of `2**3` and the underscores of `__init__` escaped."""
    if text.startswith("<"):
        return f"\\{text}"
    if "://" in text:
        return text

    def shown(found: Match) -> str:
        before, after = text[max(found.start() - 1, 0) : found.start()], text[found.end() : found.end() + 1]
        is_text = before.isalnum() and after.isalnum() and (before.isdigit() or after.isdigit())
        return (r"\*" if is_text else "*") * (found.end() - found.start())

    if "__" in text.strip("_") or text.count("__") > 1:
        text = text.replace("_", r"\_")
    return _ASTERISKS.sub(shown, text)


def _is_from_person(data: Update) -> bool:
    author = data.get("author") or {}
    return data.get("type", 0) in _SAID and "id" in author and not author.get("bot") and "webhook_id" not in data


def _is_command(word: str, argument: str) -> bool:
    """Whether a text that begins with `word` is a command, and not, for example, a question about the path `/etc`."""
    if not word.startswith("/"):
        return False
    return word[1:].lower() in COMMANDS or (word[1:].isalpha() and not argument.strip())


def _content_of(data: Update) -> str:
    """What a message without text and files has, such as `a poll`."""
    named = {**_UNREAD, "message_snapshots": "a forward"}
    return next((what for name, what in named.items() if data.get(name)), "a message without text")


def _in_place_of_text(data: Update, quoted: Sequence[Quoted]) -> str:
    """The text of a message that has no text but quotes another message; empty if it has something unreadable, too."""
    if not quoted or any(data.get(name) for name in _UNREAD):
        return ""
    return FORWARDED if quoted[0].is_forward else NO_TEXT


def _forwarded(data: Update) -> list[Update]:
    """The messages that a message forwards, as Discord copies them: without their authors."""
    return [each["message"] for each in data.get("message_snapshots") or ()]


def _attached(data: Update) -> list[Update]:
    return [each for each in data.get("attachments") or () if each.get("url")]


def _shared(file: Update) -> Shared:
    return Shared(str(file["url"]), file.get("filename"), file.get("content_type"))


def _place(data: Update) -> Place:
    return Place(chat=data["channel_id"], message=data["id"], group="guild_id" in data)


def _sender(data: Update) -> Sender:
    author, member = data["author"], data.get("member") or {}
    name = member.get("nick") or author.get("global_name") or author.get("username")
    return Sender(author["id"], name)


def _interaction(data: Update) -> list[Event]:
    member = data.get("member") or {}
    user = member.get("user") or data["user"]
    sender = _sender({"author": user, "member": member})
    token = f"{data['application_id']}:{data['token']}"
    place = Place(chat=data["channel_id"], message=data["id"], group="guild_id" in data, token=token)
    given = data["data"]
    if data["type"] == _COMPONENT:
        return [Pressed(place, sender, given["custom_id"])]
    if data["type"] != _COMMAND:
        return []
    argument = " ".join(str(each.get("value", "")) for each in given.get("options", ())).strip()
    if given["name"] == ASK:
        return [
            Said(place, sender, data["id"], argument)
            if argument
            else Unsupported(place, sender, data["id"], "a question without text")
        ]
    return [Commanded(place, sender, data["id"], given["name"], argument)]


async def _defer(rest: RESTClient, interaction: Update) -> None:
    """Send a deferred answer to an interaction, because Discord requires an answer within three seconds."""
    kinds = {
        _COMMAND: hikari.ResponseType.DEFERRED_MESSAGE_CREATE,
        _COMPONENT: hikari.ResponseType.DEFERRED_MESSAGE_UPDATE,
    }
    kind = kinds.get(interaction["type"])
    if kind is None:
        return
    try:
        await rest.create_interaction_response(int(interaction["id"]), interaction["token"], kind)
    except hikari.HikariError as error:
        log.warning("Discord: an interaction was not acknowledged, so its answer may be lost: %s", loggable(error))


async def _answered(rest: RESTClient, place: Place, content: dict[str, Any]) -> bool:
    """Replace an interaction's deferred answer; returns `False` if Discord no longer accepts the token."""
    application, _, token = (place.token or "").partition(":")
    try:
        await rest.edit_interaction_response(int(application), token, **content)
    except (hikari.NotFoundError, hikari.UnauthorizedError):
        return False
    return True


async def _recipient(rest: RESTClient, channel_id: str) -> str | None:
    """The id of the person in a private chat; `None` if the chat cannot be read or is not private."""
    try:
        channel = await rest.fetch_channel(int(channel_id))
    except hikari.HikariError as error:
        log.warning("Discord: the author of a deleted message cannot be read: %s", loggable(error))
        return None
    return str(channel.recipient.id) if isinstance(channel, hikari.DMChannel) else None


def _rows(rest: RESTClient, buttons: Sequence[Button]) -> list[Any]:
    rows = []
    for at in range(0, len(buttons), _BUTTONS_A_ROW):
        row = rest.build_message_action_row()
        for button in buttons[at : at + _BUTTONS_A_ROW]:
            row.add_interactive_button(hikari.ButtonStyle.SECONDARY, button.token, label=button.label)
        rows.append(row)
    return rows


def _public_key(text: str) -> Ed25519PublicKey:
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError:
        raise SettingsError(
            "PERDURE_DISCORD__PUBLIC_KEY is malformed: it must be the 64 hexadecimal digits of the application's page"
        ) from None


def _bot_id(token: str) -> str:
    try:
        return str(hikari.applications.get_token_id(token))
    except ValueError:
        raise SettingsError("PERDURE_DISCORD__TOKEN is malformed: it must be the token of a bot") from None
