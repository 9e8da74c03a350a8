"""The channel `slack`: Slack's Events API by webhook or Socket Mode, and its Web API, through slack-sdk.

In a private chat, every message is for the agent. In a channel, a message is for the agent if it mentions the bot. The
reply begins a thread. Later messages in that thread are for the agent even without a mention. Slash commands and
button presses arrive the same way as messages. The commands are `/new`, `/list`, `/open`, `/end`, `/cancel`,
`/link` and `/help`, or `/perdure new` and so on.

Slack repeats an event that was not acknowledged within three seconds. Slack reports a mention twice, as `message` and
as `app_mention`. The message's `ts` is the same in all these events and deduplicates them. Slack has no idempotency key
for posted messages. If an attempt to send a reply is interrupted, the reply may therefore appear twice.

Text is sent as mrkdwn: `&`, `<` and `>` are escaped, so a model's text cannot mention anyone. Only a Markdown link to
an http or https URL becomes a link with a label. Slack shows no typing indicator for a bot.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from threading import Event as Stop
from threading import Lock
from typing import Any, NoReturn, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, urlsplit

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.http_retry import HttpRequest, HttpResponse, RateLimitErrorRetryHandler, RetryState
from slack_sdk.signature import Clock as SignatureClock
from slack_sdk.signature import SignatureVerifier
from slack_sdk.socket_mode.builtin import SocketModeClient
from slack_sdk.socket_mode.client import BaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse
from slack_sdk.webhook import WebhookClient

from perdure.channels.services.code_spans import outside_code
from perdure.channels.services.downloading import download, is_at
from perdure.channels.services.protocol import (
    FORWARDED,
    SOMEONE,
    Attachment,
    Button,
    ChannelFailed,
    Commanded,
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
    Unsupported,
    Update,
)
from perdure.channels.services.splitting import units
from perdure.clock import Clock
from perdure.errors import InvalidRequest, Unauthorized
from perdure.text.patterns import Match, compiled
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable

T = TypeVar("T")

log = logging.getLogger(__name__)

TIMEOUT_S = 10
_QUICK_S = 1
_UPLOAD_S = 15
"""Seconds for each of the three requests of an upload."""

LONGEST_PAUSE_S = 5
"""The longest `Retry-After`, in seconds, for which a call waits. A longer `Retry-After` postpones the delivery."""

_TRANSIENT = frozenset({
    "internal_error", "fatal_error", "service_unavailable", "request_timeout", "ratelimited", "rate_limited",
    "team_added_to_org", "accesslimited",
})  # fmt: skip
"""Slack's codes of errors that end by themselves. Slack answers them with status 200."""

_OF_THE_TOKEN = frozenset({
    "invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired", "no_permission",
    "missing_scope", "not_allowed_token_type", "org_login_required", "team_access_not_granted",
    "two_factor_setup_required",
})  # fmt: skip
"""Slack's codes of errors that concern all chats until the operator changes the token or the application.

Every other code, also one that Slack may add, is the refusal of one message or one chat: it is permanent.
"""

_MALFORMED = frozenset({
    "msg_too_long", "msg_blocks_too_long", "no_text", "invalid_blocks", "invalid_blocks_format", "invalid_arguments",
})  # fmt: skip
"""Slack's codes of permanent errors that concern the form of a message."""

_WITHOUT_FILES = frozenset({"missing_scope", "no_permission"})
"""Slack's codes of errors of an application that may write messages, but no files."""

_ENDING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
"""Refusals of an upload that end by themselves."""

_ONE_COMMAND = "perdure"
_LABEL_CHARS = 75
_MOST_NAMES = 10_000
_WRITTEN = frozenset({None, "file_share", "thread_broadcast", "me_message"})
"""Subtypes of messages that a person wrote."""

_UNSIGNED = "The request is not signed by Slack, or its timestamp is too old."
_MARKED = compiled(r"<([^<>|]+)(?:\|([^<>]*))?>")
_MARKUP = compiled(
    r"\*\*\*(?P<both>[^*\s](?:[^*\n]*[^*\s])?)\*\*\*|\*\*(?P<bold>[^*\s](?:[^*\n]*[^*\s])?)\*\*"
    r"|\*(?P<italic>[^*\s](?:[^*\n]*[^*\s])?)\*|~~(?P<struck>[^~\s](?:[^~\n]*[^~\s])?)~~"
    r"|\[(?P<label>[^\[\]\n]+)\]\((?P<url>https?://(?:[^\s()|]|\([^\s()|]*\))+)\)|(?m:^#{1,6} (?P<title>[^\n]+)$)"
)


class _ShortPauses(RateLimitErrorRetryHandler):
    """Repeats a rate-limited call once, if Slack's `Retry-After` is at most `LONGEST_PAUSE_S` seconds."""

    def _can_retry(
        self,
        *,
        state: RetryState,
        request: HttpRequest,
        response: HttpResponse | None = None,
        error: Exception | None = None,
    ) -> bool:
        limited = super()._can_retry(state=state, request=request, response=response, error=error)
        if not limited or response is None:
            return False
        headers = {name.lower(): value for name, value in response.headers.items()}
        pause = next(iter(headers.get("retry-after") or ()), "0")
        return pause.isdigit() and int(pause) <= LONGEST_PAUSE_S


class Slack:
    """The channel `slack`. `api_url` is the base URL of the Web API; `None` stands for Slack's own URL.

    Thread-safe.
    """

    name = "slack"
    most_file_bytes = 2**27
    most_chars = 3_000  # of a section, which a message with buttons has
    typing_s = 0.0
    notes_a_second = 0.5  # of about 50 changes a minute in a whole workspace
    reads_history = False

    def __init__(
        self, token: str, signing_secret: str | None, app_token: str | None, api_url: str | None, clock: Clock
    ) -> None:
        base = WebClient.BASE_URL if api_url is None else f"{api_url.rstrip('/')}/"
        self._client = WebClient(token, base, timeout=TIMEOUT_S, retry_handlers=[_ShortPauses(max_retry_count=1)])
        self._hosts = (".slack.com",) if api_url is None else (urlsplit(api_url).hostname or "",)
        self._uploads = WebClient(token, base, timeout=_UPLOAD_S, retry_handlers=[])
        self._notes = WebClient(token, base, timeout=TIMEOUT_S, retry_handlers=[])
        self._quick = WebClient(token, base, timeout=_QUICK_S, retry_handlers=[])
        self.listens = app_token is not None
        self._verifier = None if signing_secret is None else SignatureVerifier(signing_secret, _Seconds(clock))
        self._app_token = app_token
        self._names: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Check the signature of a webhook request. The names in `headers` are in lower case.

        Raises:
            Unauthorized: the signature is invalid, the request's timestamp differs from the current time by more than
                five minutes, or no secret is configured.
        """
        stamp, signature = (headers.get(f"x-slack-{each}", "") for each in ("request-timestamp", "signature"))
        usable = self._verifier is not None and stamp.isascii() and stamp.isdigit() and signature.isascii()
        try:
            valid = usable and self._verifier.is_valid(body, stamp, signature)  # type: ignore[union-attr]
        except UnicodeDecodeError:
            valid = False
        if not valid:
            raise Unauthorized(_UNSIGNED)

    def receive(self, headers: Mapping[str, str], body: bytes) -> Received:
        """The update in a verified webhook request, and the response to the request.

        Raises:
            InvalidRequest: the body is neither JSON nor a form.
        """
        given = _decoded(headers, body)
        if given.get("type") == "url_verification":
            return Received((), {"challenge": str(given.get("challenge", ""))})
        return Received((given,) if given.get("type") or given.get("command") else ())

    def parse(self, update: Update) -> list[Event]:
        """The events in a payload of the Events API, a button press or a slash command; empty for other payloads.

        Raises:
            KeyError, TypeError, ValueError: the payload is malformed.
        """
        if "command" in update:
            return [self._commanded(update)]
        match update.get("type"):
            case "block_actions":
                return self._pressed(update)
            case "event_callback" if update["event"].get("type") in {"message", "app_mention"}:
                return self._happened(update["event"], _bot_of(update))
            case _:
                return []

    def _happened(self, event: Update, bot: str | None) -> list[Event]:
        match event.get("subtype"):
            case "message_changed":
                return self._changed(event, bot)
            case "message_deleted":
                return _deleted(event)
            case _:
                return self._said(event, bot)

    def _said(self, event: Update, bot: str | None) -> list[Event]:
        if not _is_from_person(event):
            return []
        place, message_id = _place(event, event), _message_id(event["channel"], event["ts"])
        addressed = not place.group or event["type"] == "app_mention" or f"<@{bot}>" in event.get("text", "")
        if not addressed and "thread_ts" not in event:
            return []
        if place.group:
            self._learn_name(event["user"])
        text, sender = self._text(event.get("text", ""), bot), self._sender(event["user"])
        files = tuple(_shared(each) for each in event.get("files") or () if _is_readable(each))
        text, quoted = _with_unread(text, event.get("files") or ()), self._quoted(event, bot)
        if quoted and not text:
            text = FORWARDED
        if not text and not files:
            what = "a file" if event.get("files") else "a message without text"
            return [Unsupported(place, sender, message_id, what, if_known=not addressed)]
        return [Said(place, sender, message_id, text, if_known=not addressed, files=files, quoted=quoted)]

    def download(self, file: Shared, write: Callable[[bytes], None]) -> None:
        """Pass the content of a file to `write`. The bot needs the scope `files:read`.

        Raises:
            Undeliverable: Slack refuses the file.
            DeliveryFailed: Slack cannot be reached.
        """
        download(file.ref, self._hosts, write, {"Authorization": f"Bearer {self._client.token}"})

    def _changed(self, event: Update, bot: str | None) -> list[Event]:
        message, before = event["message"], event.get("previous_message") or {}
        if not _is_from_person(message) or message.get("text") == before.get("text"):
            return []  # Slack has added a preview
        text = _with_unread(self._text(message.get("text", ""), bot), message.get("files") or ())
        message_id, quoted = _message_id(event["channel"], message["ts"]), self._quoted(message, bot)
        sender = self._sender(message["user"])
        return [Edited(_place(event, message), sender, message_id, text, quoted)] if text else []

    def _commanded(self, given: Update) -> Commanded:
        command, argument = str(given["command"]).removeprefix("/").lower(), str(given.get("text", "")).strip()
        if command == _ONE_COMMAND:
            command, _, argument = argument.partition(" ")
        channel = given["channel_id"]
        place = Place(chat=channel, group=not channel.startswith("D"), token=given.get("response_url"))
        sender = Sender(given["user_id"], given.get("user_name"))
        return Commanded(place, sender, str(given["trigger_id"]), command.lower() or "help", argument.strip())

    def _pressed(self, given: Update) -> list[Event]:
        channel, message = given["channel"]["id"], given["message"]
        place = Place(
            chat=channel, thread=message.get("thread_ts"), message=message["ts"], group=not channel.startswith("D")
        )
        sender = Sender(given["user"]["id"], given["user"].get("name"))
        return [Pressed(place, sender, each["value"]) for each in given["actions"] if each.get("type") == "button"]

    def _text(self, text: str, bot: str | None) -> str:
        """Slack's markup as plain text, with mentions shown as names and mentions of the bot removed."""

        def shown(found: Match) -> str:
            target, label = found[1], found[2]
            match target[0]:
                case "@":
                    return "" if target[1:] == bot else f"@{label or self._names.get(target[1:]) or target[1:]}"
                case "#":
                    return f"#{label or target[1:]}"
                case "!":
                    return f"@{(label or target[1:].partition('^')[0]).removeprefix('@')}"
                case _:
                    return target if label in {None, "", target} else f"{label} ({target})"

        plain = _MARKED.sub(shown, text)
        return plain.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()

    def _quoted(self, message: Update, bot: str | None) -> tuple[Quoted, ...]:
        """The messages that a message shares, which Slack shows below it."""
        quoted = []
        for each in message.get("attachments") or ():
            if not (each.get("is_share") or each.get("is_msg_unfurl")):
                continue  # the preview of a link
            text = self._text(each.get("text") or "", bot)
            if each.get("files"):
                text = f"[a file, which is not shown] {text}".strip()
            author = each.get("author_id")
            name = each.get("author_name") or each.get("author_subname") or self._names.get(author or "") or SOMEONE
            if text:
                quoted.append(Quoted(text, None if author and author == bot else str(name), is_forward=True))
        return tuple(quoted)

    def _sender(self, user: str) -> Sender:
        return Sender(user, self._names.get(user))

    def _learn_name(self, user: str) -> None:
        """Look up and cache a user's display name. If the user has no name, cache the id."""
        if user in self._names:
            return
        try:
            profile = self._quick.users_info(user=user)["user"]
        except (SlackClientError, URLError, OSError, ValueError, KeyError):
            return
        name = (profile.get("profile") or {}).get("display_name") or profile.get("real_name") or profile.get("name")
        with self._lock:
            self._names[user] = str(name or user)
            if len(self._names) > _MOST_NAMES:
                self._names.popitem(last=False)

    def length(self, text: str) -> int:
        """The UTF-16 code units of the text as mrkdwn, with escapes."""
        return units(render(text))

    def send(
        self,
        place: Place,
        text: str,
        buttons: Sequence[Button],
        key: str,  # noqa: ARG002 (Slack has no such key)
        *,
        plain: bool = False,
    ) -> None:
        """Post one message, whose `length` is at most `most_chars`.

        The answer to a slash command is shown to the person only. It also reaches channels without the bot.

        Raises:
            NotAsked: Slack asks for a pause of more than `LONGEST_PAUSE_S` seconds, or for a second pause.
            Undeliverable: the channel no longer exists, or the bot may not write in the channel.
            DeliveryFailed: Slack did not confirm the message.
        """
        shown = _escape(text) if plain else render(text)
        if place.token is not None and self._responded(place.token, {"text": shown, "mrkdwn": not plain}):
            return
        blocks = [_section(shown), _actions(buttons)] if buttons else None
        _call(
            lambda: self._client.chat_postMessage(
                channel=place.chat,
                text=shown,
                blocks=blocks,
                mrkdwn=not plain,
                thread_ts=place.thread,
                unfurl_links=False,
                unfurl_media=False,
            )
        )

    def send_file(self, place: Place, file: Attachment, key: str) -> None:  # noqa: ARG002 (Slack has no such key)
        """Upload a file and share it in the channel. The bot needs the scope `files:write`.

        Raises:
            NotAsked: Slack asks for a pause.
            Undeliverable: as in `send`, or the application may not write files, or Slack refuses the file.
            DeliveryFailed: Slack did not confirm the message.
        """

        def upload() -> None:
            try:
                self._uploads.files_upload_v2(
                    content=file.data,
                    filename=file.name,
                    title=file.name,
                    channel=place.chat,
                    thread_ts=place.thread,
                    request_file_info=False,
                )
            except SlackApiError as error:
                if error.response.get("error") in _WITHOUT_FILES:
                    raise Undeliverable("refused: the application has no scope files:write", 403) from error
                raise
            except HTTPError as error:  # of the second request, whose server or a proxy finds the file too large
                if error.code // 100 == 4 and error.code not in _ENDING:  # noqa: PLR2004 (a refusal)
                    raise Undeliverable(f"the upload was answered with status {error.code}", error.code) from error
                raise

        _call(upload)

    def _responded(self, url: str, message: dict[str, Any]) -> bool:
        """Answer a slash command; returns `False` if Slack no longer accepts the command's `response_url`."""
        if not is_at(url, self._hosts):
            return False
        response = _call(lambda: WebhookClient(url, TIMEOUT_S, retry_handlers=[]).send_dict(message))
        return bool(response.status_code == HTTPStatus.OK)

    def mark(self, place: Place, text: str) -> None:
        """Replace the message that contains the pressed button with `text`, and remove the buttons.

        Raises:
            DeliveryFailed: as in `send`.
        """
        if place.message is not None:
            message = place.message
            shown = render(text)
            _call(
                lambda: self._client.chat_update(channel=place.chat, ts=message, text=shown, blocks=[_section(shown)])
            )

    def acknowledge(self, place: Place) -> None:
        """Do nothing: the response to Slack's request is the confirmation."""

    def typing(self, place: Place) -> None:
        """Do nothing: Slack shows no typing indicator for a bot."""

    def show_note(self, place: Place, text: str, note_id: str | None) -> str:
        """Show a note, or change the text of the message `note_id`.

        Raises:
            NotAsked: Slack asks for a pause.
            Undeliverable: Slack refuses the note, or the person has deleted it.
            DeliveryFailed: Slack did not confirm the note.
        """
        shown = _escape(text)
        if note_id is not None:
            _call(lambda: self._notes.chat_update(channel=place.chat, ts=note_id, text=shown))
            return note_id
        posted = _call(
            lambda: self._notes.chat_postMessage(
                channel=place.chat,
                text=shown,
                thread_ts=place.thread,
                unfurl_links=False,
                unfurl_media=False,
            )
        )
        return str(posted["ts"])

    def remove_note(self, place: Place, note_id: str) -> None:
        """Delete the message `note_id`.

        Raises:
            DeliveryFailed: as in `show_note`.
        """
        _call(lambda: self._notes.chat_delete(channel=place.chat, ts=note_id))

    def missed(self, chat: str, after: str) -> Sequence[Update]:  # noqa: ARG002 (the protocol's)
        """Always empty: Slack repeats events that were not acknowledged."""
        return ()

    def close(self) -> None:
        """Do nothing: each call has its own connection."""

    def listen(self, on_update: Callable[[Update], None], stop: Stop) -> None:
        """Pass the updates of Socket Mode to `on_update`, one after another, until `stop` is set.

        If `on_update` raises an error, the update is not acknowledged, and Slack sends the update again.

        Raises:
            ChannelFailed: Slack cannot be reached, or refuses the token.
        """
        client = SocketModeClient(app_token=self._app_token or "", web_client=self._client, concurrency=1)

        def arrived(socket: BaseSocketModeClient, request: SocketModeRequest) -> None:
            try:
                on_update(request.payload)
            except Exception:  # not acknowledged
                log.exception("Slack: handling an update failed; Slack sends it again")
                return
            socket.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))

        client.socket_mode_request_listeners.append(arrived)
        try:
            _call(client.connect)
            stop.wait()
        except DeliveryFailed as error:
            raise ChannelFailed(f"Slack's Socket Mode cannot be used: {error}.") from error
        finally:
            client.close()


def _bot_of(update: Update) -> str | None:
    return next((each["user_id"] for each in update.get("authorizations") or () if each.get("is_bot", True)), None)


class _Seconds(SignatureClock):
    """The clock of a `SignatureVerifier`, which reads the time from a perdure `Clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now().timestamp()


def render(text: str) -> str:
    """Convert Markdown to Slack's mrkdwn. Inside code, only escape `&`, `<` and `>`."""
    return outside_code(_escape(text), _converted)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _converted(text: str, *, is_part: bool = False) -> str:
    return _MARKUP.sub(lambda found: _marked(text, found, is_part=is_part), text)


def _marked(text: str, found: Match, *, is_part: bool) -> str:
    """What is found, as Slack writes it. `is_part`: within a heading or an emphasis, where `#` begins no heading."""
    if found["url"] is not None:
        return f"<{found['url']}|{found['label'].strip('*')}>"
    if found["title"] is not None:
        title = found["title"].replace("**", "").strip(" *")
        return text[found.start() : found.end()] if is_part else f"*{_converted(title, is_part=True)}*"
    if found["struck"] is not None:
        return f"~{_converted(found['struck'], is_part=True)}~"
    if _is_in_word(text, found):
        return text[found.start() : found.end()]
    if found["both"] is not None:
        return f"*_{_converted(found['both'], is_part=True)}_*"
    sign, name = ("_", "italic") if found["italic"] is not None else ("*", "bold")
    return f"{sign}{_converted(found[name], is_part=True)}{sign}"


def _is_in_word(text: str, found: Match) -> bool:
    """Whether a letter or a digit is next to the asterisks, as in `2*3*4` and `f(*args,**kwargs)`."""
    around = text[max(found.start() - 1, 0) : found.start()], text[found.end() : found.end() + 1]
    return any(each.isascii() and each.isalnum() for each in around)


def _decoded(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Decode a body that is JSON, a form with JSON in the field `payload`, or another form."""
    try:
        text = body.decode()
        if "x-www-form-urlencoded" in headers.get("content-type", ""):
            form = {name: values[0] for name, values in parse_qs(text, max_num_fields=100).items()}
            given = json.loads(form["payload"]) if "payload" in form else form
        else:
            given = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("The body is neither JSON nor a Slack form.") from None
    if not isinstance(given, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return given


def _is_from_person(message: Update) -> bool:
    return "user" in message and "bot_id" not in message and message.get("subtype") in _WRITTEN


def _is_external(file: Update) -> bool:
    """Whether a file is only a link, such as to a document of Google Drive. Its service does not know the bot."""
    return file.get("mode") == "external" or bool(file.get("is_external"))


def _is_readable(file: Update) -> bool:
    return bool(file.get("url_private")) and not _is_external(file)


def _with_unread(text: str, files: Sequence[Update]) -> str:
    """A text with the links to external files that it does not have, and with a remark if others cannot be read."""
    unread = [each for each in files if not _is_readable(each)]
    external = [each for each in unread if _is_external(each)]
    links = {str(each.get("external_url") or each.get("url_private") or ""): each for each in external}
    new = [(url, each) for url, each in links.items() if url.startswith("https://") and url not in text]
    lines = [f"{each.get('title') or each.get('name') or 'a file'} ({url})" for url, each in new]
    if text and len(external) < len(unread):
        text = f"[a file, which is not shown] {text}"
    return "\n".join([*([text] if text else []), *lines])


def _shared(file: Update) -> Shared:
    return Shared(str(file["url_private"]), file.get("name"), file.get("mimetype"))


def _place(event: Update, message: Update) -> Place:
    """The place for the reply to `message`: the message's thread.

    If a message in a group has no thread, the reply begins a thread below the message.
    """
    channel = event["channel"]
    group = event["channel_type"] != "im" if "channel_type" in event else not channel.startswith("D")
    thread = message.get("thread_ts") or (message["ts"] if group else None)
    return Place(chat=channel, thread=thread, message=message["ts"], group=group)


def _message_id(channel: str, ts: str) -> str:
    return f"{channel}:{ts}"


def _deleted(event: Update) -> list[Event]:
    before = event.get("previous_message") or {}
    if not _is_from_person(before):
        return []
    place = _place(event, {"ts": event["deleted_ts"], **before})
    return [Deleted(place, Sender(before["user"]), _message_id(event["channel"], event["deleted_ts"]))]


def _section(shown: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": shown, "verbatim": True}}


def _actions(buttons: Sequence[Button]) -> dict[str, Any]:
    elements = [
        {
            "type": "button",
            "action_id": f"button-{number}",
            "text": {"type": "plain_text", "text": button.label[:_LABEL_CHARS]},
            "value": button.token,
        }
        for number, button in enumerate(buttons)
    ]
    return {"type": "actions", "elements": elements}


def _call(work: Callable[[], T]) -> T:
    try:
        return work()
    except SlackApiError as error:
        _refuse(error)
    except (SlackClientError, URLError, OSError, ValueError) as error:
        raise DeliveryFailed(type(error).__name__) from error


def _refuse(error: SlackApiError) -> NoReturn:
    response: Any = error.response
    status = int(response.status_code)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        pause = {name.lower(): value for name, value in response.headers.items()}.get("retry-after", "")
        raise NotAsked("Slack asks for a pause", float(pause) if pause.isdigit() else 0.0) from error
    code = str(response.data.get("error") or "") if isinstance(response.data, dict) else ""
    if code in _MALFORMED:
        raise Undeliverable(f"refused: {code}", HTTPStatus.BAD_REQUEST) from error
    if status != HTTPStatus.OK:
        raise DeliveryFailed(f"answered with status {status}", status) from error
    if not code or code in _TRANSIENT | _OF_THE_TOKEN:
        raise DeliveryFailed(f"refused: {code[:100]}", status) from error
    # The breaker cannot classify an error with status 200, and would count the refusal of one chat as a failure of
    # Slack. The breaker does not count an error with status 403.
    raise Undeliverable(f"refused: {code[:100]}", HTTPStatus.FORBIDDEN) from error
