"""Circuit breakers: the answers of `/v1/breakers`."""

from __future__ import annotations

from typing import Literal

from perdure.channels.http.schemas.answer import Answer


class Breaker(Answer):
    """A circuit breaker of the fleet. Times are in milliseconds since 1970."""

    name: str
    state: Literal["closed", "open", "half_open"]
    failure_count: int
    success_count: int
    last_failure_time: int | None
    opened_at: int | None


class BreakerList(Answer):
    """The breakers used in the last week, by name."""

    breakers: list[Breaker]
