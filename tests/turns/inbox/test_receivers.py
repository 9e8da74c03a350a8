"""A message with a `reply_to` that the operator does not allow is rejected before anything is written."""

from __future__ import annotations

import pytest

from perdure.errors import InvalidRequest
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from tests.network.test_egress import SPELLINGS
from tests.network.test_queues import NOT_FOR_REPLIES
from tests.turns.harness import Harness


def _refused(harness: Harness, message: str, **reply_to: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^reply_to(.queue)?: .*{message}"):
        accept(harness.runtime, parse_incoming({"user_id": "ana", "text": "hello", "reply_to": reply_to}))


def test_a_reply_to_an_address_that_is_not_public_is_refused(harness: Harness) -> None:
    """A non-public address is refused in every spelling, unless the setting `reply_urls` contains its network."""
    for url in SPELLINGS:
        _refused(harness, "", url=url)
    _refused(harness, r"10\.0\.0\.1 is not a public address", url="http://10.0.0.1/")
    assert harness.counts()["inbox"] == 0
    harness.settings = harness.settings.model_copy(update={"reply_urls": ("10.0.0.0/8",)})
    assert harness.send(reply_to={"url": "http://10.0.0.1/"}).status == "accepted"


def test_a_reply_to_a_queue_that_is_not_allowed_is_refused(harness: Harness) -> None:
    """Only queues in `PERDURE_REPLY_TASKS` are allowed, so no sender can write to kombu's keys or perdure's queues."""
    harness.settings = harness.settings.model_copy(update={"reply_tasks": ("shop.*@shop",)})
    for queue in [*NOT_FOR_REPLIES, "celery", "billing"]:
        _refused(harness, "", task="shop.replied", queue=queue)
    message = "the queue 'unacked_index' is not one that PERDURE_REPLY_TASKS allows"
    _refused(harness, message, task="shop.replied", queue="unacked_index")
    assert harness.counts()["inbox"] == 0
    assert harness.send(reply_to={"task": "shop.replied", "queue": "shop"}).status == "accepted"
    assert harness.send(reply_to={"task": "shop.replied"}).status == "accepted"
