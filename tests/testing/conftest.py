"""The harness of tests/turns, which runs turns on PostgreSQL."""

from __future__ import annotations

from tests.turns.conftest import harness

__all__ = ["harness"]
