"""Reads the files that people share in chats from the servers of the chat service."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx2

from perdure.turns.outbox import DeliveryFailed, Undeliverable

_TIMEOUT_S = 10.0
_DEADLINE_S = 60.0
_PIECE = 2**16


def is_at(url: str, hosts: Collection[str]) -> bool:
    """Whether the host of `url` is one of `hosts`, or ends with one that begins with a dot, such as `.slack.com`."""
    host = urlsplit(url).hostname or ""
    return any(host == each or (each.startswith(".") and host.endswith(each)) for each in hosts)


def download(url: str, hosts: Collection[str], write: Callable[[bytes], None], headers: Mapping[str, str]) -> None:
    """Pass the body at `url` to `write`, piece by piece.

    `hosts` are those of the service; see `is_at`. `headers` may have the channel's token,
    so the request goes to no other host, and redirects are not followed.

    Raises:
        Undeliverable: the URL is not the service's, or the service refuses it.
        DeliveryFailed: the service cannot be reached, or is too slow; a retry may succeed.
    """
    if not is_at(url, hosts):
        raise Undeliverable(f"the file is at {(urlsplit(url).hostname or '')[:100]!r}, which is not the service's", 400)
    ends = time.monotonic() + _DEADLINE_S
    try:
        with httpx2.stream("GET", url, headers=dict(headers), timeout=_TIMEOUT_S, follow_redirects=False) as response:
            if response.status_code != HTTPStatus.OK:
                kind = DeliveryFailed if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else Undeliverable
                raise kind(f"the file was answered with status {response.status_code}", response.status_code)
            for piece in response.iter_bytes(_PIECE):
                if time.monotonic() > ends:
                    raise DeliveryFailed(f"the file was not read within {_DEADLINE_S:g} s")
                write(piece)
    except httpx2.HTTPError as error:
        raise DeliveryFailed(f"the file cannot be read: {type(error).__name__}") from error
