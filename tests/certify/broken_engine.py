"""The honest agent, on an engine that repeats unsafe tools."""

from __future__ import annotations

from unittest import mock

from perdure.turns.calls.execute import CallExecutor
from tests.certify import liars

honest = liars.honest

mock.patch.object(CallExecutor, "decide", return_value=None).start()
