"""Circuit breakers: the answers of `/v1/breakers`."""

from __future__ import annotations

from typing import Literal

from perdure.channels.http.schemas.answer import Answer, examples

_CLOSED = {
    "name": "llm:openai:gpt-5",
    "state": "closed",
    "failure_count": 0,
    "success_count": 0,
    "last_failure_time": None,
    "opened_at": None,
}
_OPEN = {
    "name": "llm:openai:gpt-5",
    "state": "open",
    "failure_count": 5,
    "success_count": 0,
    "last_failure_time": 1777714200000,
    "opened_at": 1777714200000,
}


class Breaker(Answer):
    """A circuit breaker of the fleet. Times are in milliseconds since 1970."""

    model_config = examples(_CLOSED)

    name: str
    state: Literal["closed", "open", "half_open"]
    failure_count: int
    success_count: int
    last_failure_time: int | None
    opened_at: int | None


class BreakerList(Answer):
    """The breakers that were used in the last week, sorted by name."""

    model_config = examples({"breakers": [_OPEN]})

    breakers: list[Breaker]
