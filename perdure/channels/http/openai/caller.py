"""The user and the conversation of an OpenAI-compatible request.

The user is `X-Perdure-User`, else `safety_identifier`, else `user`, else `metadata.user_id`, else the user token's
user. The conversation is `X-Perdure-Conversation`, else `prompt_cache_key`. If a request names no user or no
conversation, the missing one is taken from the headers that Open WebUI forwards. These headers are ignored if the
caller has a user token, because only a front end that the operator trusts may name the user. If no source names a
conversation, the message belongs to the user's conversation without a key.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers

from perdure.access.tenants import UserKey, user_of
from perdure.channels.http.auth import KeyKind
from perdure.channels.http.dependencies import Users
from perdure.channels.http.openai.errors import BadParameter
from perdure.channels.http.openai.wire import ChatRequest, ResponseRequest
from perdure.text.untrusted import is_storable
from perdure.turns.inbox.incoming import MAX_NAME_CHARS

_IDEMPOTENCY = "idempotency-key"
_USER, _CONVERSATION = "x-perdure-user", "x-perdure-conversation"
_WEBUI_USER, _WEBUI_CHAT = "x-openwebui-user-id", "x-openwebui-chat-id"
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


def place_of(request: Request, body: ChatRequest | ResponseRequest, users: Users) -> Place:
    """The user and the conversation that a request names.

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
    named = named or (_header(headers, _WEBUI_USER) if trusted else None)
    if not named:
        raise BadParameter(_NO_USER, "user")
    conversation = _header(headers, _CONVERSATION) or body.prompt_cache_key
    conversation = conversation or (_header(headers, _WEBUI_CHAT) if trusted else None)
    return Place(users.key(named), named, conversation or None)


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
