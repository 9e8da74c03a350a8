"""What the workers of `test_erasing` are given as PERDURE_AGENTS: tools and hooks whose failures quote the user.

Their names are those that the model of these tests (`model_server`) knows.
"""

from __future__ import annotations

import os
import signal

from perdure import Agent, tool
from perdure.errors import ToolError
from perdure.hooks import TurnEnding
from perdure.tools.registry import ToolContext


@tool(effect="pure")
def pure(note: str, context: ToolContext) -> str:
    """Returns what it is told, and keeps it."""
    context.working_variables["kept"] = note
    return f"noted {note}"


@tool(effect="unsafe")
def unsafe(note: str) -> str:
    """Fails, and says with what."""
    raise ValueError(note)


@tool(effect="idempotent")
def idempotent(note: str) -> str:
    """Refuses, and says what."""
    try:
        return {"known": note}[note]
    except KeyError as error:
        raise ToolError(f"I do not know {note}.") from error


@tool(effect="pure")
def deadly(note: str) -> str:
    """Kills the process that it runs in."""
    os.kill(os.getpid(), signal.SIGKILL)
    return note


def _fail(over: TurnEnding) -> None:
    raise ValueError(over.turn.text)


tester = Agent("tester", "You keep what you are told.", tools=[pure, unsafe, idempotent, deadly], after_turn=[_fail])
