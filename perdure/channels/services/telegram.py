"""The channel `telegram`: Telegram's Bot API by webhook or long polling, through python-telegram-bot.

In a private chat, every message is for the agent. In a group, every message that the bot receives is for the agent.
Telegram reports no deletions to bots. Telegram has no idempotency key for sent messages. If an attempt to send a reply
is interrupted, the reply may therefore appear twice.

Markdown is sent as Telegram's HTML (see `telegram_markup`). If a group becomes a supergroup, which has another id, the
new one continues the conversation of the old one, and replies to the old one are sent to the new one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from threading import Event as Stop
from typing import Any, NoReturn
from urllib.parse import urlsplit

from telegram import Bot, InlineKeyboardButton, InlineKeyboardMarkup, LinkPreviewOptions
from telegram.constants import ChatAction, ParseMode
from telegram.error import BadRequest, ChatMigrated, Forbidden, NetworkError, RetryAfter, TelegramError
from telegram.request import HTTPXRequest

from perdure.channels.services.downloading import download
from perdure.channels.services.protocol import (
    FORWARDED,
    SOMEONE,
    UPLOAD_S,
    Attachment,
    Button,
    ChannelFailed,
    Commanded,
    Edited,
    Event,
    Moved,
    Place,
    Pressed,
    Quoted,
    Received,
    Said,
    Sender,
    Shared,
    Unsupported,
    Update,
)
from perdure.channels.services.splitting import units
from perdure.channels.services.telegram_markup import render, visible
from perdure.errors import InvalidRequest, Unauthorized, loggable
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

log = logging.getLogger(__name__)

TIMEOUT_S = 10
POLL_S = 5
_CONNECTIONS = 32
_PHOTOS = frozenset({"image/png", "image/jpeg", "image/webp"})
_PHOTO_BYTES = 10 * 10**6
"""The largest photo. A larger image is sent as a document."""

_DEADLINE_S = 60
_KINDS = ["message", "edited_message", "callback_query"]
_NO_PREVIEW = LinkPreviewOptions(is_disabled=True)
_UNREAD = (
    "photo",
    "voice",
    "audio",
    "video",
    "video_note",
    "animation",
    "document",
    "sticker",
    "location",
    "venue",
    "contact",
    "poll",
    "dice",
    "story",
    "game",
    "paid_media",
    "checklist",
)
"""The members of messages that people send. Other messages report joins, pins and the like."""

_REFUSED = "The request does not carry the secret token of PERDURE_TELEGRAM__WEBHOOK_SECRET."


def _names_no_bot(record: logging.LogRecord) -> bool:
    """Whether an HTTP client may log this line. The URLs of Telegram's API contain the bot's token."""
    return "/bot" not in record.getMessage()


for _client in ("httpx", "httpx2"):  # also in an application's process, whose log perdure does not configure
    logging.getLogger(_client).addFilter(_names_no_bot)


class Telegram:
    """The channel `telegram`. `api_url` is the Bot API's base URL; `None` stands for Telegram's own URL.

    Thread-safe.
    """

    name = "telegram"
    most_chars = 4_096
    most_file_bytes = 50 * 10**6
    typing_s = 5.0
    notes_a_second = 10.0
    reads_history = False

    def __init__(self, token: str, webhook_secret: str | None, api_url: str | None) -> None:
        base = "https://api.telegram.org" if api_url is None else api_url.rstrip("/")
        self.listens = webhook_secret is None
        self._secret = webhook_secret
        self._requests = [self._request(), self._request()]
        self._host = urlsplit(base).hostname or ""
        self._bot = Bot(
            token, f"{base}/bot", f"{base}/file/bot", request=self._requests[0], get_updates_request=self._requests[1]
        )
        self._bot_id = token.partition(":")[0]
        self._username: str | None = None
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @staticmethod
    def _request() -> HTTPXRequest:
        return HTTPXRequest(
            connection_pool_size=_CONNECTIONS, read_timeout=TIMEOUT_S, connect_timeout=TIMEOUT_S, pool_timeout=TIMEOUT_S
        )

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:  # noqa: ARG002 (Telegram signs no bodies)
        """Check the secret token of a webhook request. The names in `headers` are in lower case.

        Raises:
            Unauthorized: the token is missing or wrong, or no token is configured.
        """
        given = headers.get("x-telegram-bot-api-secret-token", "")
        if self._secret is None or not hmac.compare_digest(given.encode(errors="replace"), self._secret.encode()):
            raise Unauthorized(_REFUSED)

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:  # noqa: ARG002 (always JSON)
        """The update in a verified request.

        Raises:
            InvalidRequest: the body is not an update.
        """
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise InvalidRequest("The body is not JSON.") from None
        if not isinstance(given, dict):
            raise InvalidRequest("The body must be a JSON object.")
        return Received((given,))

    def parse(self, update: Update) -> list[Event]:
        """The events in an update; empty if the update does not concern the agent.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the update is malformed.
        """
        if "callback_query" in update:
            return _pressed(update["callback_query"])
        edited = "edited_message" in update
        message = update.get("edited_message") if edited else update.get("message")
        if message is not None and "migrate_to_chat_id" in message:
            return [Moved(_place(message), str(message["migrate_to_chat_id"]))]
        if message is None or not _is_from_person(message):
            return []
        if edited:
            return _edited(message, self._bot_id)
        written = _written(message, self._bot_id)
        return [each for each in written if not isinstance(each, Commanded) or self._is_for_this_bot(message)]

    def _is_for_this_bot(self, message: Update) -> bool:
        """Whether a message is no command of another bot, as `/new@other_bot` is in a group with several bots."""
        name = _command(message)[0].partition("@")[2]
        if name and self._username is None:
            try:
                self._username = str(self._call(self._bot.get_me).username)
            except DeliveryFailed as error:
                log.info("Telegram: the bot's name is unknown, so each command counts as its own: %s", loggable(error))
        return not name or self._username is None or name.lower() == self._username.lower()

    def length(self, text: str) -> int:
        """The UTF-16 code units that Telegram shows of a text, or those of the text itself, if there are more."""
        return max(units(text), units(visible(render(text))))

    def send(
        self,
        place: Place,
        text: str,
        buttons: Sequence[Button],
        key: str,  # noqa: ARG002 (no such key)
        *,
        plain: bool = False,
    ) -> None:
        """Send one message, whose `length` is at most `most_chars`.

        Raises:
            NotAsked: Telegram asks for a pause.
            Undeliverable: the chat no longer exists, the user has blocked the bot, or Telegram refuses the message.
            DeliveryFailed: Telegram did not confirm the message.
        """
        self._call(lambda: self._send(place, text, _keyboard(buttons), plain=plain))

    async def _send(self, place: Place, text: str, keyboard: InlineKeyboardMarkup | None, *, plain: bool) -> None:
        shown, mode = (text, None) if plain else (render(text), ParseMode.HTML)
        send = partial(
            self._bot.send_message,
            text=shown,
            parse_mode=mode,
            reply_markup=keyboard,
            link_preview_options=_NO_PREVIEW,
        )
        await _to_chat(send, place)

    def send_file(self, place: Place, file: Attachment, key: str) -> None:  # noqa: ARG002 (no such key)
        """Send a file as a photo, if Telegram takes it as one, or as a document.

        Raises:
            NotAsked: Telegram asks for a pause.
            Undeliverable: as in `send`, or Telegram refuses the file.
            DeliveryFailed: Telegram did not confirm the message.
        """
        self._call(lambda: self._send_file(place, file), UPLOAD_S)

    async def _send_file(self, place: Place, file: Attachment) -> None:
        named: dict[str, Any] = {"filename": file.name, "write_timeout": UPLOAD_S, "read_timeout": UPLOAD_S}
        if file.media_type in _PHOTOS and len(file.data) <= _PHOTO_BYTES:
            try:
                await _to_chat(partial(self._bot.send_photo, photo=file.data, **named), place)
            except BadRequest as error:  # it has too many pixels, for example
                log.info("Telegram: an image is sent as a document: %s", error.message)
            else:
                return
        await _to_chat(partial(self._bot.send_document, document=file.data, **named), place)

    def download(self, file: Shared, write: Callable[[bytes], None]) -> None:
        """Pass the content of a file to `write`. Telegram gives bots files of up to 20 MB.

        Raises:
            Undeliverable: Telegram refuses the file, such as one that is too big.
            DeliveryFailed: Telegram cannot be reached.
        """
        found = self._call(lambda: self._bot.get_file(file.ref))
        download(str(found.file_path), {self._host}, write, {})

    def mark(self, place: Place, text: str) -> None:
        """Replace the message that contains the pressed button with `text`, and end the button's progress indicator.

        Raises:
            DeliveryFailed: as in `send`.
        """
        self._call(lambda: self._mark(place, text))

    def acknowledge(self, place: Place) -> None:
        """End the progress indicator of a pressed button.

        Raises:
            DeliveryFailed: as in `send`.
        """
        self._call(lambda: self._acknowledge(place))

    async def _acknowledge(self, place: Place) -> None:
        if place.token is None:
            return
        try:
            await self._bot.answer_callback_query(place.token)
        except BadRequest as error:  # the button was pressed too long ago
            log.info("Telegram: the press of a button was not acknowledged: %s", error.message)

    async def _mark(self, place: Place, text: str) -> None:
        await self._acknowledge(place)
        if place.message is not None:
            await self._bot.edit_message_text(text, place.chat, int(place.message), link_preview_options=_NO_PREVIEW)

    def typing(self, place: Place) -> None:
        """Show the bot's typing indicator for five seconds.

        Raises:
            DeliveryFailed: as in `send`.
        """
        thread = None if place.thread is None else int(place.thread)
        self._call(lambda: self._bot.send_chat_action(place.chat, ChatAction.TYPING, message_thread_id=thread))

    def show_note(self, place: Place, text: str, note_id: str | None) -> str:
        """Show a note, as plain text, or change the text of the message `note_id`.

        Raises:
            NotAsked: Telegram asks for a pause.
            Undeliverable: Telegram refuses the note, or the person has deleted it.
            DeliveryFailed: Telegram did not confirm the note.
        """
        return str(self._call(lambda: self._note(place, text, note_id)))

    async def _note(self, place: Place, text: str, note_id: str | None) -> int | str:
        thread = None if place.thread is None else int(place.thread)
        if note_id is None:
            send = partial(self._bot.send_message, disable_notification=True, link_preview_options=_NO_PREVIEW)
            sent = await _to_topic(partial(send, place.chat, text), thread)
            return int(sent.message_id)
        try:
            await self._bot.edit_message_text(text, place.chat, int(note_id), link_preview_options=_NO_PREVIEW)
        except BadRequest as error:
            if "not modified" not in error.message.lower():  # the answer to an earlier attempt was lost
                raise
        return note_id

    def remove_note(self, place: Place, note_id: str) -> None:
        """Delete the message `note_id`.

        Raises:
            DeliveryFailed: as in `show_note`.
        """
        self._call(lambda: self._bot.delete_message(place.chat, int(note_id)))

    def listen(self, on_update: Callable[[Update], None], stop: Stop) -> None:
        """Poll for updates and pass them to `on_update`, in their order, until `stop` is set.

        A poll acknowledges only the updates that `on_update` has handled. Telegram repeats all other updates.

        Raises:
            ChannelFailed: Telegram cannot be reached or refuses the token, or another process polls.
        """
        offset: int | None = None
        while not stop.is_set():
            try:
                updates = self._run(partial(self._bot.get_updates, offset, timeout=POLL_S, allowed_updates=_KINDS))
            except (TelegramError, OSError) as error:
                raise ChannelFailed(f"Telegram's updates cannot be read: {type(error).__name__}.") from error
            for each in updates:
                on_update(each.to_dict())
                offset = each.update_id + 1

    def missed(self, chat: str, after: str) -> Sequence[Update]:  # noqa: ARG002 (the protocol's)
        """Always empty: Telegram keeps unacknowledged updates for a day and repeats them."""
        return ()

    def close(self) -> None:
        """Close the connections and end the thread that makes the calls."""
        with self._lock:
            if self._closed:
                return
            self._closed, thread = True, self._thread
        if thread is not None:
            for request in self._requests:
                asyncio.run_coroutine_threadsafe(request.shutdown(), self._loop).result(TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(TIMEOUT_S)
        self._loop.close()

    def _run(self, work: Callable[[], Coroutine[Any, Any, Any]], within_s: float = _DEADLINE_S) -> Any:
        """Run `work` on the event loop. After `within_s` seconds it is cancelled, so that nothing is sent later."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop.run_forever, name="telegram", daemon=True)
                self._thread.start()
        bounded = asyncio.wait_for(work(), within_s)
        return asyncio.run_coroutine_threadsafe(bounded, self._loop).result(within_s + TIMEOUT_S)

    def _call(self, work: Callable[[], Coroutine[Any, Any, Any]], within_s: float = _DEADLINE_S) -> Any:
        try:
            return self._run(work, within_s)
        except TelegramError as error:
            _refuse(error)
        except TimeoutError as error:
            raise DeliveryFailed(f"no answer within {within_s:g} s") from error


async def _to_chat(send: Callable[..., Coroutine[Any, Any, Any]], place: Place) -> None:
    """Send a message to the topic of `place`, or to the supergroup that the group has become."""
    thread = None if place.thread is None else int(place.thread)
    try:
        await _to_topic(partial(send, place.chat), thread)
    except ChatMigrated as moved:
        await send(moved.new_chat_id)


async def _to_topic(send: Callable[..., Coroutine[Any, Any, Any]], thread: int | None) -> Any:
    """Send a message to a topic of a forum. If the topic is gone, to the group, where the person can still read it."""
    try:
        return await send(message_thread_id=thread)
    except BadRequest as error:
        if thread is None or "thread not found" not in error.message.lower():
            raise
        log.info("Telegram: a topic is gone, so its message is sent to the group")
        return await send()


def _place(message: Update) -> Place:
    thread = message.get("message_thread_id") if message.get("is_topic_message") else None
    return Place(
        chat=str(message["chat"]["id"]),
        thread=None if thread is None else str(thread),
        message=str(message["message_id"]),
        group=message["chat"]["type"] != "private",
    )


def _is_from_person(message: Update) -> bool:
    """Whether a person wrote a message: not a bot, and not Telegram, which copies a channel's posts to its group."""
    if message.get("is_automatic_forward"):
        return False
    return "sender_chat" in message or ("from" in message and not message["from"].get("is_bot"))


def _author(message: Update) -> Sender:
    """The author of a message.

    Of an anonymous administrator, the group; of a member who writes as a channel, the channel. In both cases, `from` is
    a bot of Telegram, which is the same for all of them.
    """
    if "sender_chat" in message:
        chat = message["sender_chat"]
        return Sender(str(chat["id"]), chat.get("title") or chat.get("username"))
    return _sender(message["from"])


def _sender(user: Update) -> Sender:
    return Sender(str(user["id"]), user.get("first_name") or user.get("username"))


def _message_id(place: Place) -> str:
    return f"{place.chat}:{place.message}"


def _written(message: Update, bot: str) -> list[Event]:
    place, sender = _place(message), _author(message)
    text = message.get("text", message.get("caption"))
    is_forwarded = _is_forwarded(message, sender)
    command, argument = _command(message)
    if command and not is_forwarded:
        return [Commanded(place, sender, _message_id(place), command.partition("@")[0].lower(), argument)]
    shared = _shared(message)
    what = None if shared is not None else _unread(message)
    if text is None and shared is None:
        return [] if what is None else [Unsupported(place, sender, _message_id(place), what)]
    words, quoted = _with_remark(what, text or ""), _replied(message, bot)
    if words and is_forwarded:
        words, quoted = FORWARDED, (Quoted(words, _name_of(message["forward_origin"], bot), is_forward=True),)
    files, is_album = () if shared is None else (shared,), shared is not None and "media_group_id" in message
    return [Said(place, sender, _message_id(place), words, files=files, is_album=is_album, quoted=quoted)]


def _with_remark(what: str | None, text: str) -> str:
    """A text with a remark about the content of its message that is not shown, such as `a voice`."""
    return text if what is None else f"[{what}, which is not shown] {text}"


def _unread(message: Update) -> str | None:
    """What a message has other than text, such as `a voice`."""
    named = next((each.replace("_", " ") for each in _UNREAD if each in message), None)
    return named and f"{'an' if named[0] in 'aeiou' else 'a'} {named}"


def _is_forwarded(message: Update, sender: Sender) -> bool:
    """Whether a message has the text of another author. People forward their own messages, too."""
    origin = message.get("forward_origin")
    return origin is not None and str((origin.get("sender_user") or {}).get("id")) != sender.external_id


def _replied(message: Update, bot: str) -> tuple[Quoted, ...]:
    """The message that a message replies to, in this chat or in another one, or the part of it that is quoted.

    The first message of a topic, which each message of the topic replies to, has no text.
    """
    replied, elsewhere = message.get("reply_to_message"), message.get("external_reply") or {}
    found = replied or elsewhere
    text = str((message.get("quote") or {}).get("text") or found.get("text") or found.get("caption") or "")
    if not message.get("quote") and (what := _unread(found)) is not None:
        text = _with_remark(what, text).strip()
    return (Quoted(text, _name_of(replied or elsewhere.get("origin") or {}, bot)),) if text.strip() else ()


def _name_of(source: Update, bot: str) -> str | None:
    """The name of the author of a message, or of the message of a `MessageOrigin`; `None`: the bot is the author."""
    chat = source.get("sender_chat") or source.get("chat" if "type" in source else "") or {}
    user = source.get("sender_user") or source.get("from") or {}
    if not chat and str(user.get("id")) == bot:
        return None
    named = (chat.get("title"), chat.get("username"), source.get("sender_user_name"))
    return str(next(filter(None, (*named, user.get("first_name"), user.get("username"))), SOMEONE))


def _command(message: Update) -> tuple[str, str]:
    """The command that a text or a caption begins with, such as `new` or `new@my_bot`, and what follows."""
    text = message.get("text", message.get("caption"))
    entities = message.get("entities" if "text" in message else "caption_entities") or ()
    if text is None or not any(each["type"] == "bot_command" and each["offset"] == 0 for each in entities):
        return "", ""
    command, *rest = text.split(maxsplit=1)
    return command.removeprefix("/"), "".join(rest).strip()


def _shared(message: Update) -> Shared | None:
    """The photo, in its largest size, or the document of a message."""
    if message.get("photo"):
        largest = max(message["photo"], key=lambda size: int(size["width"]) * int(size["height"]))
        return Shared(str(largest["file_id"]))
    if "document" in message:
        document = message["document"]
        return Shared(str(document["file_id"]), document.get("file_name"), document.get("mime_type"))
    return None


def _edited(message: Update, bot: str) -> list[Event]:
    place = _place(message)
    text = message.get("text", message.get("caption"))
    if text is None:
        return []
    words = _with_remark(_unread(message) if _shared(message) is None else None, text)
    return [Edited(place, _author(message), _message_id(place), words, _replied(message, bot))]


def _pressed(query: Update) -> list[Event]:
    message = query["message"]
    place = Place(
        chat=str(message["chat"]["id"]),
        message=str(message["message_id"]),
        group=message["chat"]["type"] != "private",
        token=str(query["id"]),
    )
    return [Pressed(place, _sender(query["from"]), str(query["data"]))]


def _keyboard(buttons: Sequence[Button]) -> InlineKeyboardMarkup | None:
    if not buttons:
        return None
    return InlineKeyboardMarkup([[InlineKeyboardButton(each.label, callback_data=each.token) for each in buttons]])


def _refuse(error: TelegramError) -> NoReturn:
    match error:
        case RetryAfter():
            pause_s = error._retry_after.total_seconds()  # noqa: SLF001 (the public one warns that its type will change)
            raise NotAsked("Telegram asks for a pause", pause_s) from error
        case Forbidden():
            raise Undeliverable("refused: the bot is blocked or not a member", 403) from error
        case BadRequest() if "chat not found" in error.message.lower():
            raise Undeliverable("refused: the chat does not exist", HTTPStatus.NOT_FOUND) from error
        case BadRequest():
            raise Undeliverable(f"refused: {error.message[:100]}", 400) from error
        case NetworkError() if "too large" in error.message.lower():  # status 413
            raise Undeliverable("refused: too large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from error
        case _:
            raise DeliveryFailed(type(error).__name__) from error
