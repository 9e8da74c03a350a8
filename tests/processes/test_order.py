"""Two hundred concurrent messages to one session."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from pytest_celery import CeleryTestSetup

from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

MESSAGES = 200


@pytest.mark.exhaustive
def test_messages_sent_at_once_are_answered_in_the_order_accepted(
    celery_setup: CeleryTestSetup, installation: Installation
) -> None:
    """Two workers answer concurrent messages to one session in the order of their acceptance."""
    with ThreadPoolExecutor(16) as senders:
        accepted = list(senders.map(lambda number: installation.accept(f"message {number}"), range(MESSAGES)))

    turns = installation.settled(*(each.turn_id for each in accepted), within_s=60)

    assert {turn["status"] for turn in turns} == {"done"}
    assert sorted(turn["seq"] for turn in turns) == list(range(1, MESSAGES + 1))
    by_seq = sorted(turns, key=lambda turn: int(turn["seq"]))
    texts = {str(each.turn_id): f"message {number}" for number, each in enumerate(accepted)}
    contents = [row.content for row in installation.transcript(accepted[0].session_id)]
    expected = [line for turn in by_seq for text in [texts[turn["turn_id"]]] for line in (text, answer_to(text))]
    assert contents == expected
    installation.check()
