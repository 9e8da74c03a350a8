"""Signs callbacks as Standard Webhooks 1.0 specifies; any Standard Webhooks library can verify them.

The signature covers the message's id, the time of the delivery attempt and the body. A receiver can therefore reject a
replay.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence

_PREFIX = "whsec_"
_MIN_BYTES = 24
_NEW_BYTES = 32

ACCEPTED = f"accepted: {_PREFIX} and base64 of at least {_MIN_BYTES} bytes; several while they rotate, newest first"


def make_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_NEW_BYTES)).decode()


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """Parse the secrets in `text`, which are separated by spaces or commas. Returns one key per secret.

    Raises:
        ValueError: a secret is malformed or too short, or `text` is empty. The error's message contains no secret.
    """
    keys = tuple(_key(number, each) for number, each in enumerate(text.replace(",", " ").split(), start=1))
    if not keys:
        raise ValueError(f"it is empty; {ACCEPTED}")
    return keys


def signed_headers(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of one delivery attempt: the message's id, `timestamp` in seconds, and one signature per key."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(
            f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}" for key in keys
        ),
    }


def _key(number: int, secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True) if secret.startswith(_PREFIX) else b""
    except binascii.Error:
        key = b""
    if len(key) < _MIN_BYTES:
        raise ValueError(f"secret {number} is malformed or too short; {ACCEPTED}")
    return key
