"""The example shop in plain Celery: one worker runs the shop's tasks and the agents' turns."""

from __future__ import annotations

import pytest

from tests.examples.conftest import QUEUES, Example
from tests.processes.faults import wait_until

EXAMPLE = "celery"


@pytest.mark.long
def test_a_task_of_the_shop_gets_the_agents_reply(example: Example) -> None:
    """One task sends a question, and another task receives the reply, as in the README."""
    example.environment["PERDURE_REPLY_TASKS"] = "shop.answer@celery"
    log = example.worker("shop", f"celery,{QUEUES}")
    example.script("shop.py", "ana", "what is 12*7+5?")
    wait_until(lambda: "done: " in log.read_text() and "89" in log.read_text(), "the reply is printed")
