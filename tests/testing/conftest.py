"""Provides the fixture `harness` of `tests/turns`, with which a test runs turns on PostgreSQL."""

from __future__ import annotations

from tests.turns.conftest import harness

__all__ = ["harness"]
