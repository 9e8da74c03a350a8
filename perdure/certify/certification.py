"""What an author adds to a module that is certified: how its tools are called, and what they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.errors import SettingsError
from perdure.models.protocol import ToolCall
from perdure.text import declarations


@dataclass(frozen=True, slots=True, init=False)
class Scenario:
    """A turn of an agent: the replies of its model, in order, as for `perdure.testing.Scripted`.

    A reply is a call, a list of calls that run concurrently, or a text, which ends the turn. Without a text, the model
    ends the turn by itself. `agent` is the agent's name; by default it is the first agent of the module that has the
    tools. `text` is the user's message and `user_id` the user.

    Example:
        >>> Scenario(call("order", article="ink"), user_id="ana").steps[0][0].name
        'order'
    """

    steps: tuple[tuple[ToolCall, ...], ...]
    reply: str | None
    agent: str | None
    text: str
    user_id: str

    def __init__(
        self,
        *replies: ToolCall | list[ToolCall] | str,
        agent: str | None = None,
        text: str = "Certify the tools.",
        user_id: str = "certify",
    ) -> None:
        """Raise SettingsError if a reply is neither a call, a list of calls, nor a text at the end."""
        calls = [(each,) if isinstance(each, ToolCall) else each for each in replies]
        steps = [tuple(each) for each in calls if isinstance(each, list | tuple)]
        texts = [each for each in replies if isinstance(each, str)]
        if len(steps) + len(texts) != len(replies) or texts not in ([], [replies[-1]] if replies else []):
            raise SettingsError("a Scenario has calls or lists of calls, and at most one text, at the end")
        if not steps or not all(steps) or any(not isinstance(call, ToolCall) for step in steps for call in step):
            raise SettingsError("a Scenario has at least one call; make calls with perdure.testing.call")
        for name, value in (("steps", tuple(steps)), ("reply", texts[0] if texts else None), ("agent", agent)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "user_id", user_id)

    @property
    def tools(self) -> frozenset[str]:
        """The names of the tools that the scenario calls."""
        return frozenset(call.name for step in self.steps for call in step)


class Certification:
    """How to certify the agents of a module. A module has at most one, under any name.

    `scenarios` are turns that call the tools; a tool that is in none of them is called alone, with arguments that are
    derived from its schema. `world` is a function without parameters that returns what the tools change, in a form
    that can be compared, such as the rows of a table. It is called in the worker, before and after each execution.

    Example:
        >>> ordered = []
        >>> certification = Certification([Scenario(call("order", article="ink"))], world=lambda: list(ordered))
        >>> certification.world()
        []
    """

    def __init__(self, scenarios: Sequence[Scenario] = (), *, world: Callable[[], Any] | None = None) -> None:
        """Raise SettingsError if an argument has the wrong type."""
        fits = declarations.is_list(scenarios) and all(isinstance(each, Scenario) for each in scenarios)
        declarations.require(fits, "a Certification", "scenarios", scenarios, "a list of Scenario(…)")
        declarations.require(
            world is None or callable(world),
            "a Certification",
            "world",
            world,
            "a function without parameters, or None",
        )
        self.scenarios = tuple(scenarios)
        self.world = world
