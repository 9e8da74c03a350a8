"""A rate limit for wrong keys, by the client's address.

Only requests with a wrong key are counted. A valid key is never refused, even if wrong keys come from the same address,
such as a proxy's. A wrong key beyond the limit is answered with 429 instead of 401.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections import OrderedDict, deque

from perdure.clock import Clock
from perdure.errors import RateLimited

log = logging.getLogger(__name__)

MAX_WRONG_KEYS = 10
"""The most wrong keys from one address within `WINDOW_S` seconds that get 401; further ones get 429."""

WINDOW_S = 60.0

MAX_ADDRESSES = 10_000
"""The most addresses that are tracked; the address whose last wrong key is the oldest is dropped first."""

_IPV6_NETWORK = 64


class WrongKeys:
    """Wrong keys of the last minute, in a sliding window for each address. Belongs to one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, address: str) -> None:
        """Count a wrong key of `address`.

        Raises:
            RateLimited: the address has reached the limit. The wrong key is then not counted. `retry_after_s`: seconds
                until the oldest wrong key leaves the window.
        """
        now = self._clock.monotonic()
        client = _client(address)
        times = self._seen.setdefault(client, deque(maxlen=MAX_WRONG_KEYS))
        self._seen.move_to_end(client)
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        if len(times) >= MAX_WRONG_KEYS:
            left_s = math.ceil(times[0] + WINDOW_S - now)
            raise RateLimited("Too many wrong keys. Try again later.", retry_after_s=left_s)
        times.append(now)
        if len(times) == MAX_WRONG_KEYS:
            log.warning(
                "%d wrong keys within %g s from %s: further ones get 429",
                MAX_WRONG_KEYS,
                WINDOW_S,
                client or "a client",
            )
        while len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)

    def __len__(self) -> int:
        """The count of tracked addresses."""
        return len(self._seen)


def _client(address: str) -> str:
    """`address`, or for IPv6 its /64 network, because one client usually has the whole network."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, _IPV6_NETWORK), strict=False))
    return address
