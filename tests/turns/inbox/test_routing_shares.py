"""Routing an application's messages: a user with many messages does not delay those of other users."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from perdure import send
from perdure.turns.inbox import route_unrouted
from perdure.turns.inbox.accept import accept
from tests.turns.harness import Harness
from tests.turns.inbox.test_sending import application, woken

__all__ = ["application", "woken"]


def test_a_user_with_many_messages_takes_a_share_of_the_time(
    harness: Harness, application: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routing checks its time within a user's messages, too, so that the other users' messages are routed."""
    now = 0.0

    def monotonic() -> float:
        return now

    def routed_in_a_second(*given: Any, **more: Any) -> Any:
        nonlocal now
        now += 1
        return accepting(*given, **more)

    accepting = accept
    monkeypatch.setattr(route_unrouted, "accept", routed_in_a_second)
    monkeypatch.setattr(route_unrouted, "time", SimpleNamespace(monotonic=monotonic))
    with application.begin() as connection:
        many = [send(connection, user_id="ana", text=f"message {number}") for number in range(60)]
        one = send(connection, user_id="bob", text="hello")
    route_unrouted.route_due(harness.runtime)
    left = {row.turn_id for row in harness.sql("SELECT turn_id FROM unrouted WHERE settled_at IS NULL")}
    assert one.turn_id not in left
    assert now <= 12
    assert 0 < len(left) < len(many)


def test_a_user_with_many_messages_hides_no_other(
    harness: Harness, application: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If more messages are due than a round reads, it goes on to further users, round by round."""
    with application.begin() as connection:
        for number in range(20):
            send(connection, user_id="ana", text=f"message {number}")
        for number in range(6):
            send(connection, user_id=f"user {number}", text="hello")
    asked: list[str] = []
    monkeypatch.setattr(route_unrouted, "route_user", lambda _, user, __: asked.append(user))
    for _ in range(4):
        route_unrouted.route_due(harness.runtime, most=2)
    assert set(asked) == {"ana", *(f"user {number}" for number in range(6))}
