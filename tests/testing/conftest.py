"""The stage of tests/turns, which runs turns on PostgreSQL."""

from __future__ import annotations

from tests.turns.conftest import stage

__all__ = ["stage"]
