"""The example shop in FastAPI, with the gateway at `/agents`. The shop's own tokens authenticate its customers."""

from __future__ import annotations

import httpx2
import pytest

from tests.examples.conftest import QUEUES, Example

EXAMPLE = "fastapi"
ANA, BEN = ({"Authorization": f"Bearer token-of-{name}"} for name in ("ana", "ben"))


@pytest.mark.long
def test_a_customer_of_the_shop_talks_to_the_agent(example: Example) -> None:
    """The agent answers a customer's message and handles an order. Another customer cannot read the message's turn."""
    address = example.serve("app:app")
    example.worker("app:worker", QUEUES)
    messages = f"{address}/agents/v1/messages"
    hello = {"user_id": "ana", "text": "what is 12*7+5?"}
    assert httpx2.post(messages, json=hello).status_code == 401
    accepted = httpx2.post(messages, json=hello, headers=ANA).json()
    turn = f"{address}/agents/v1/turns/{accepted['turn_id']}?wait=20"
    assert "89" in httpx2.get(turn, headers=ANA, timeout=30).json()["reply"]["text"]
    assert httpx2.get(turn, headers=BEN).status_code == 404

    ordered = httpx2.post(f"{address}/orders?item=a%20lamp", headers=ANA, timeout=30).json()
    assert ordered["order"] == 1
    reply = httpx2.get(f"{address}/agents/v1/turns/{ordered['turn_id']}?wait=20", headers=ANA, timeout=30)
    assert reply.json()["status"] == "done"
