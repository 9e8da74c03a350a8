"""The PERDURE_AGENTS module of the workers in `test_erasing`: tools and hooks whose failures quote the user.

The tools have the names that the model of these tests (`model_server`) calls.
"""

from __future__ import annotations

import os
import signal

from pydantic_ai import Agent as PydanticAgent

from perdure import Agent, tool
from perdure.errors import ToolError
from perdure.hooks import TurnEnding
from perdure.tools.registry import ToolContext


@tool(effect="pure")
def pure(note: str, context: ToolContext) -> str:
    """Stores its argument, and returns a text that contains the argument."""
    context.working_variables["kept"] = note
    return f"noted {note}"


@tool(effect="unsafe")
def unsafe(note: str) -> str:
    """Fails with an error that quotes the argument."""
    raise ValueError(note)


@tool(effect="idempotent")
def idempotent(note: str) -> str:
    """Refuses with a message that quotes the argument."""
    try:
        return {"known": note}[note]
    except KeyError as error:
        raise ToolError(f"I do not know {note}.") from error


@tool(effect="pure")
def deadly(note: str) -> str:
    """Kills the process that it runs in."""
    os.kill(os.getpid(), signal.SIGKILL)
    return note


def _fail(ending: TurnEnding) -> None:
    raise ValueError(ending.turn.text)


tester = Agent("tester", "You keep what you are told.", tools=[pure, unsafe, idempotent, deadly], after_turn=[_fail])

adapted = PydanticAgent(name="adapted", instructions="You keep what you are told.")


@adapted.tool_plain(name="pure")
def note_down(note: str) -> str:
    """Returns a text that contains the argument."""
    return f"noted {note}"
