"""`perdure` without a limit of wrong keys: schemathesis expects 401 for each of the many that it tries."""

from __future__ import annotations

from unittest import mock

from perdure import cli
from perdure.channels.http import throttle


def main() -> None:
    """Run the command."""
    with mock.patch.object(throttle, "MAX_WRONG_KEYS", 1_000_000):
        cli.main()
