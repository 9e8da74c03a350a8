"""The PERDURE_AGENTS module of the workers in `test_erasing`: tools and hooks whose failures quote the user.

The tools have the names that the model of these tests (`model_server`) calls.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import BinaryContent

from perdure import Agent, File, TurnContext, agent_tool, ask_user, handoff, tool
from perdure.errors import ToolError
from perdure.hooks import TurnEnding
from perdure.tools.registry import ToolContext
from tests.files.contents import pdf
from tests.processes.model_server import ASK, ASK_ADAPTED, ASK_SIZE, CHART, HAND_OVER


@tool(effect="pure")
def pure(note: str, context: ToolContext) -> str:
    """Stores its argument, and returns a text that contains the argument."""
    context.working_variables["kept"] = note
    context.progress(f"noting {note}")
    time.sleep(0.3)  # until the progress is written: that of a call which has ended is not
    return f"noted {note}"


@tool(effect="idempotent", name=CHART)
def chart(note: str) -> list[str | File]:
    """Returns a file whose name and content contain the argument."""
    return [f"a chart of {note}", File(document(note), name=f"{note}.pdf")]


def document(note: str) -> bytes:
    """A PDF that contains the argument, and is stored as an object."""
    return pdf(2, size=5_000) + note.encode()


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


def _instructions(turn: TurnContext[Any]) -> str:
    return f"You keep what {turn.user_id} tells you, such as {turn.text}."


_other = Agent("other", _instructions)
_adapted_other = PydanticAgent(name="adapted other", instructions="You keep what you are told.")

tester = Agent(
    "tester",
    _instructions,
    tools=[
        *(pure, unsafe, idempotent, deadly, chart),
        ask_user(name=ASK_SIZE),
        agent_tool(_other, name=ASK),
        agent_tool(_adapted_other, name=ASK_ADAPTED),
        handoff(_other, name=HAND_OVER),
    ],
    after_turn=[_fail],
)

adapted = PydanticAgent(name="adapted", instructions="You keep what you are told.")


@adapted.tool_plain(name="pure")
def note_down(note: str) -> str:
    """Returns a text that contains the argument."""
    return f"noted {note}"


@adapted.tool_plain(name=CHART)
def draw(note: str) -> list[Any]:
    """Returns a file whose name and content contain the argument."""
    return [f"a chart of {note}", BinaryContent(document(note), media_type="application/pdf", identifier=note)]
