"""The agent of the shop in Django, with a tool that ends each process that is not an isolated child."""

from __future__ import annotations

import os
import sys

from shop.agents import refund  # type: ignore[import-not-found]  # in examples/django
from shop.models import Order  # type: ignore[import-not-found]

from perdure import Agent, tool


@tool(effect="idempotent")
def count() -> str:
    """Count the orders."""
    if "isolated" not in sys.argv[0]:
        os._exit(9)
    return f"{Order.objects.count()} orders"


assistant = Agent("assistant", instructions="You help.", tools=[count, refund])
