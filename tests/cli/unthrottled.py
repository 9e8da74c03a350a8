"""`perdure` without the limit on wrong API keys. schemathesis sends many wrong keys, and expects a 401 for each."""

from __future__ import annotations

from unittest import mock

from perdure import cli
from perdure.channels.http.limits import throttle


def main() -> None:
    """Run `perdure`."""
    with mock.patch.object(throttle, "MAX_WRONG_KEYS", 1_000_000):
        cli.main()
