"""The agent of the shop in Django, with a tool that ends each process that is not an isolated child."""

from __future__ import annotations

import os
import sys

from django.contrib.admin.models import LogEntry
from shop.agents import refund  # type: ignore[import-not-found]  # in examples/django

from perdure import Agent, tool


@tool(effect="idempotent")
def count() -> str:
    """Count the entries of the log."""
    if "isolated" not in sys.argv[0]:
        os._exit(9)
    return f"{LogEntry.objects.count()} entries"


assistant = Agent("assistant", instructions="You help.", tools=[count, refund])
