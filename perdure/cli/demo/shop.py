"""The agent of `perdure demo`. Its tool appends a line to a file, so that each effect can be counted."""

from __future__ import annotations

import os
from pathlib import Path

from perdure import Agent, ToolContext, tool

ORDERS = "DEMO_ORDERS"
"""The variable that names the file."""


@tool(effect="idempotent")
def order(article: str, pieces: int, context: ToolContext) -> str:
    """Order an article.

    Args:
        article: What to order.
        pieces: How many.
        context: Has the id of the effect.
    """
    path, line = Path(os.environ[ORDERS]), f"{context.effect_id} {pieces} {article}\n"
    if not path.exists() or line not in path.read_text(encoding="utf-8"):
        with path.open("a", encoding="utf-8") as orders:
            orders.write(line)
    return f"{pieces} of {article} are ordered"


assistant = Agent("assistant", instructions="You sell office supplies.", tools=[order])
