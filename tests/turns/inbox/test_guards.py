"""The limits on the number of a user's messages per minute and per hour are exact under concurrency."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from perdure.errors import RateLimited
from perdure.settings import GuardSettings
from perdure.turns.inbox.accept import Accepted
from tests.turns.harness import Harness, side_by_side


@pytest.fixture
def limited(harness: Harness) -> Harness:
    """A harness that accepts at most two messages a minute and three an hour from each user."""
    return _limited(harness, per_minute=2, per_hour=3)


def _limited(harness: Harness, **rates: Any) -> Harness:
    harness.settings = harness.settings.model_copy(update={"guard": GuardSettings(**rates)})
    return harness


def test_a_refusal_says_when_to_retry(limited: Harness) -> None:
    """After `retry_after_s` seconds, a message is accepted again. A refused message is neither counted nor stored."""
    limited.send()
    limited.move(20)
    limited.send()
    with pytest.raises(RateLimited, match="2 a minute and 3 an hour") as refused:
        limited.send()
    assert refused.value.retry_after_s is not None
    assert 35 < refused.value.retry_after_s <= 40
    assert limited.counts()["inbox"] == 2
    limited.send(user_id="bea")
    limited.move(40.1)
    limited.send()
    limited.move(60.1)
    with pytest.raises(RateLimited) as refused:
        limited.send()
    assert refused.value.retry_after_s is not None
    assert 3_400 < refused.value.retry_after_s < 3_500
    limited.move(refused.value.retry_after_s)
    limited.send()


def test_a_repeated_message_is_not_limited(limited: Harness) -> None:
    """A repeated message gets the first response again, even if the rate limit is reached."""
    first = limited.send(message_id="m1")
    limited.send()
    again = limited.send(message_id="m1")
    assert (again.turn_id, again.duplicate) == (first.turn_id, True)


@pytest.mark.parametrize("on_busy", ["enqueue", "merge", "interrupt"])
def test_no_on_busy_bypasses_the_limit(limited: Harness, on_busy: str) -> None:
    """Merged and interrupting messages count towards the limit. A refused message does not interrupt a turn."""
    sent = [limited.send(on_busy=on_busy) for _ in range(2)]
    with pytest.raises(RateLimited):
        limited.send(on_busy=on_busy)
    assert limited.turn(sent[-1].turn_id)["status"] == "accepted"


@pytest.mark.parametrize("known", [True, False])
def test_the_limit_is_exact_under_concurrency(harness: Harness, *, known: bool) -> None:
    """Of eight concurrent messages under a limit of three, exactly three are accepted, even if the user is new."""
    if known:
        harness.send()
        harness.move(61)
    _limited(harness, per_minute=3)
    found = side_by_side(*(lambda: harness.send(message_id=str(uuid4())) for _ in range(8)))
    assert sum(isinstance(each, Accepted) for each in found) == 3
    assert sum(isinstance(each, RateLimited) for each in found) == 5


def test_a_clock_set_back_blocks_no_user(limited: Harness) -> None:
    """After the clock is set back, messages with a time in the future do not count towards the limit."""
    limited.move(86_400)
    for _ in range(2):
        limited.send()
    limited.move(-86_400)
    limited.send()
