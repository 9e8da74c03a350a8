"""Fixtures of the tests of what an operator sees."""

from __future__ import annotations

from tests.turns.conftest import harness

__all__ = ["harness"]
