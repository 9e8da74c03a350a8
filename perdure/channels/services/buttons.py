"""Tokens of approval buttons, each valid only for one tool call, one chat and one person.

A token consists of the decision, the turn's id and an HMAC with the installation's secret. The HMAC covers the
decision, the turn's id, the call's id, the channel, the chat and the person. No token is stored. A token has 45
characters. Telegram allows 64 bytes in a button's token, and Discord allows 100 characters.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

_PURPOSE = b"perdure: buttons of chats"
_MAC_BYTES = 16
_DECISIONS: dict[str, Literal["approve", "deny"]] = {"a": "approve", "d": "deny"}
_CHARS = 45
_ID_CHARS = 22


@dataclass(frozen=True, slots=True)
class Chat:
    """The channel and the chat that show a button, and the service's id of the person who may press it."""

    channel: str
    chat: str
    external_id: str


class Buttons:
    """Makes tokens with the first of `secrets`, and accepts those of all of them (`Settings.signing_keys`)."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._keys = [hmac.digest(secret, _PURPOSE, hashlib.sha256) for secret in secrets]

    def token(self, decision: Literal["approve", "deny"], turn_id: UUID, call_id: str, chat: Chat) -> str:
        return f"{decision[0]}{_text(turn_id.bytes)}{_mac(self._keys[0], decision, turn_id, call_id, chat)}"

    def turn_of(self, token: str) -> tuple[Literal["approve", "deny"], UUID] | None:
        """The decision and the turn's id in a token; `None` if the token is malformed.

        Does not verify the token's HMAC; `is_for` does.
        """
        if len(token) != _CHARS or token[0] not in _DECISIONS or not token.isascii():
            return None
        try:
            raw = base64.urlsafe_b64decode(f"{token[1 : 1 + _ID_CHARS]}==")
        except ValueError:
            return None
        return (_DECISIONS[token[0]], UUID(bytes=raw)) if len(raw) == len(UUID(int=0).bytes) else None

    def is_for(self, token: str, call_id: str, chat: Chat) -> bool:
        """Whether the token was made for this call, chat and person."""
        named = self.turn_of(token)
        return named is not None and any(
            hmac.compare_digest(token[1 + _ID_CHARS :], _mac(key, *named, call_id, chat)) for key in self._keys
        )


def _mac(key: bytes, decision: str, turn_id: UUID, call_id: str, chat: Chat) -> str:
    parts = (decision, str(turn_id), call_id, chat.channel, chat.chat, chat.external_id)
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return _text(hmac.digest(key, text.encode(), hashlib.sha256)[:_MAC_BYTES])


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
