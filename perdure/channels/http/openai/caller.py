"""The user and the conversation of an OpenAI-compatible request.

The user is `X-Perdure-User`, else `safety_identifier`, else `user`, else `metadata.user_id`, else the user token's
user. The conversation is `X-Perdure-Conversation`, else `prompt_cache_key`. If a request names no user or no
conversation, the missing one is taken from the headers that Open WebUI forwards. These headers are ignored if the
caller has a user token, because only a front end that the operator trusts may name the user. On a gateway without keys,
the user that no source names is `local`. If no source names a conversation, the message belongs to the user's
conversation without a key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers

from perdure.access.tenants import UserKey, user_of
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.dependencies import Users
from perdure.channels.http.openai.errors import BadParameter
from perdure.channels.http.openai.wire import ChatRequest, ResponseRequest
from perdure.settings import OnDisconnect, StreamSettings
from perdure.text.untrusted import is_storable
from perdure.turns.inbox.incoming import MAX_NAME_CHARS

_IDEMPOTENCY = "idempotency-key"
_USER, _CONVERSATION = "x-perdure-user", "x-perdure-conversation"
_WEBUI_USER, _WEBUI_CHAT = "x-openwebui-user-id", "x-openwebui-chat-id"
_TEMPORARY = ("temporary:", "local:")
"""What the id of a temporary chat of Open WebUI begins with: since 0.12, and in earlier releases."""
_DIGITS = 16
_ON_DISCONNECT = "x-perdure-on-disconnect"
LOCAL = "local"
"""The user of the page and the terminal on a gateway without keys."""
_NO_USER = (
    "The request names no user: send the header X-Perdure-User, or safety_identifier, user or metadata.user_id in the "
    "body, or use a user token."
)


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of a request's message. `user` is the user's key, and `user_id` is the id without the tenant."""

    user: UserKey
    user_id: str
    conversation: str | None


def place_of(request: Request, body: ChatRequest | ResponseRequest, users: Users, *, is_open: bool = False) -> Place:
    """The user and the conversation that a request names. `is_open`: the gateway has no keys.

    Raises:
        BadParameter: the request names no user.
        NotFound: the caller has a user token, and the request names another user.
    """
    caller, headers = users.caller, request.headers
    trusted = caller.kind is not KeyKind.USER
    own = user_of(caller.user) if caller.user is not None else None
    in_metadata = (body.metadata or {}).get("user_id")
    named = _header(headers, _USER) or body.safety_identifier or body.user
    named = named or (in_metadata if isinstance(in_metadata, str) else None) or own
    named = named or (_header(headers, _WEBUI_USER) if trusted else None) or (LOCAL if is_open else None)
    if not named:
        raise BadParameter(_NO_USER, "user")
    conversation = _header(headers, _CONVERSATION) or body.prompt_cache_key
    if not conversation and trusted and (chat := _header(headers, _WEBUI_CHAT)) is not None:
        conversation = f"{chat}:{_beginning(body)}"[:MAX_NAME_CHARS] if chat.startswith(_TEMPORARY) else chat
    return Place(users.key(named), named, conversation or None)


def is_open_webui(request: Request, users: Users) -> bool:
    """Whether Open WebUI sent the request, as its headers say, with a key that is trusted to forward them."""
    is_trusted = users.caller.kind is not KeyKind.USER
    return is_trusted and any(name in request.headers for name in (_WEBUI_USER, _WEBUI_CHAT))


def is_temporary(request: Request) -> bool:
    """Whether the request belongs to a temporary chat of Open WebUI, of which nothing is remembered."""
    return request.headers.get(_WEBUI_CHAT, "").startswith(_TEMPORARY)


def _beginning(body: ChatRequest | ResponseRequest) -> str:
    """A digest of the first user message. Open WebUI gives all temporary chats of one page the same id."""
    first = next((each.get("content") for each in body.items() if each.get("role") == "user"), "")
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:_DIGITS]


def cancels_on_disconnect(request: Request, users: Users, settings: StreamSettings) -> bool:
    """Whether the turn of a client that closes its connection is cancelled: as the client says, else as the setting.

    Open WebUI closes the connection if its user stops the answer.

    Raises:
        BadParameter: the header has another value.
    """
    said = _header(request.headers, _ON_DISCONNECT)
    if said is None:
        return settings.on_disconnect is OnDisconnect.CANCEL or is_open_webui(request, users)
    if said not in [*OnDisconnect]:
        accepted = ", ".join(OnDisconnect)
        raise BadParameter(f"{_ON_DISCONNECT}: is {said[:80]!r}; accepted: {accepted}.", _ON_DISCONNECT)
    return said == OnDisconnect.CANCEL


def idempotency_key(request: Request) -> str | None:
    """The header `Idempotency-Key`, which becomes the `message_id`; `None` if it is missing or blank.

    Raises:
        BadParameter: the header cannot be a `message_id`.
    """
    key = _header(request.headers, _IDEMPOTENCY)
    if key is not None and (len(key) > MAX_NAME_CHARS or not is_storable(key)):
        raise BadParameter(f"{_IDEMPOTENCY}: at most {MAX_NAME_CHARS} characters are accepted.", _IDEMPOTENCY)
    return key


def _header(headers: Headers, name: str) -> str | None:
    """A header's text; `None` if it is missing or blank.

    Raises:
        BadParameter: the header is not UTF-8, or a front end has sent a template (`{{...}}`) without filling it in.
    """
    try:
        text = headers.get(name, "").encode("latin-1").decode().strip()
    except UnicodeDecodeError:
        raise BadParameter(f"{name}: must be UTF-8.", name) from None
    if "{{" in text:
        raise BadParameter(f"{name}: is a template that was not filled in: {text[:80]!r}.", name)
    return text or None
