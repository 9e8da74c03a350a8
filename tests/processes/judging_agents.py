"""The PERDURE_AGENTS module of the workers of `boundaries`: the agents of `agents`, and one that judges its replies.

`judging` has instructions that are stored with the turn, dependencies, a guard that runs in parallel, a hook that
replaces the arguments of each call, and a check that rejects its first answer in each turn.
"""

from __future__ import annotations

from typing import Any

from perdure import Agent, Allow, ModelRetry, Refuse, ToolCalling, TurnContext, Verdict, guard, required
from tests.processes.agents import tester as tester  # noqa: PLC0414 (the module's first agent)
from tests.processes.agents import tools
from tests.processes.model_server import REPAIR, answer_to


def _instructions(turn: TurnContext[str]) -> str:
    return f"You are under test, in the turn {turn.turn_id}, by {turn.deps}."


def _user_of(turn: TurnContext[Any]) -> str:
    return turn.user_id


def _must_be_repaired(text: str) -> None:
    if text != answer_to(REPAIR):
        raise ModelRetry(REPAIR)


def _allow(text: str, turn: TurnContext[Any]) -> Verdict:
    return Allow() if turn.text == text else Refuse("another text")


class _Changed(str):
    """A text with the same JSON as another, of another type: an argument that has changed."""

    __slots__ = ()


def _same_arguments(call: ToolCalling) -> ToolCalling:
    return call.replace(arguments={name: _Changed(value) for name, value in call.arguments.items()})


judging = Agent(
    "judging",
    _instructions,
    tools,
    deps=_user_of,
    check_output=_must_be_repaired,
    input_guards=[guard(_allow, parallel=True)],
    before_tool=[required(_same_arguments)],
)
