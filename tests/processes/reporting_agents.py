"""The PERDURE_AGENTS module of `test_chats`: a tool that reports its progress, and goes on when the test permits it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from perdure import Agent, ToolContext, tool
from tests.processes.faults import SCENE

STEPS = 3


def gate(directory: Path, step: int) -> Path:
    """The file that ends a step of the tool when the test makes it."""
    return directory / f"step-{step}"


@tool(effect="pure", timeout_s=60)
def slow(note: str, context: ToolContext) -> str:
    """Work for a while."""
    for step in range(1, STEPS + 1):
        context.progress(f"{step} of {STEPS} <b>")
        while not gate(Path(os.environ[SCENE]), step).exists():
            time.sleep(0.02)
    return f"done with {note}"


reporter = Agent("reporter", "You work.", tools=[slow])
