"""The two kinds of agents that pass one suite of the turn: perdure's own, and an agent of pydantic-ai."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import CallDeferred, ExternalToolset
from pydantic_ai.tools import ToolDefinition

from perdure import adapt, effect, effect_id, external_tool, tool
from perdure.agents import Agent, Agents
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import Settings
from perdure.tools.registry import Effect, Probe, ToolContext
from tests.conftest import RecordingWaker
from tests.turns.harness import PATIENCE_S, Harness

KINDS = ("native", "adapted")
DEFERRING = "deferring"
"""An adapted agent whose tools outside raise `CallDeferred`, instead of being those of an `ExternalToolset`."""


@dataclass
class Bench:
    """Gives the harness's agent tools that record each of their runs."""

    harness: Harness
    kind: str
    ran: list[tuple[str, UUID]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)

    def equip(self, *tools: Tool, **limits: Any) -> None:
        """Give the default agent these tools and limits."""
        self.harness.agents = Agents([self.agent(*tools, **limits)])

    def agent(self, *tools: Tool, **limits: Any) -> Agent:
        """An agent of the kind with these tools and limits."""
        if self.kind == "native":
            return Agent("assistant", "You help.", [self._native(each) for each in tools], **limits)
        outside = [each.name for each in tools if each.outside and self.kind != DEFERRING]
        external = [ExternalToolset([ToolDefinition(name=name, description="Act.") for name in outside])]
        bare = PydanticAgent(name="assistant", instructions="You help.", toolsets=external if outside else [])
        for each in tools:
            if each.name not in outside:
                self._give(bare, each)
        return adapt(bare, **limits)

    @property
    def counts(self) -> dict[str, int]:
        """How often each tool ran."""
        names = [name for name, _ in self.ran]
        return {name: names.count(name) for name in names}

    def _native(self, given: Tool) -> Any:
        if given.outside:
            return external_tool(given.name, "Act.", requires_approval=given.requires_approval)

        def act(context: ToolContext, amount: int = 0) -> str:
            """Record the run."""
            return self._run(given, context.effect_id, amount)

        return tool(
            effect=Effect(given.effect),
            name=given.name,
            probe=given.probe,
            requires_approval=given.requires_approval,
            timeout_s=given.timeout_s,
        )(act)

    def _give(self, bare: PydanticAgent[Any, Any], given: Tool) -> None:
        def act(amount: int = 0) -> str:
            """Record the run."""
            return self._run(given, effect_id(), amount)

        bare.tool_plain(
            name=given.name,
            requires_approval=given.requires_approval,
            metadata=effect(Effect(given.effect), probe=given.probe),
            timeout=given.timeout_s,
        )(act)

    def _run(self, given: Tool, effect_id: UUID, amount: int) -> str:
        self.ran.append((given.name, effect_id))
        if given.outside:
            raise CallDeferred(metadata={"amount": amount})
        if given.waits:
            self.entered.set()
            self.gate.wait(PATIENCE_S)
        return given.result or f"{given.name} {amount}"


@dataclass(frozen=True)
class Tool:
    """A tool of both kinds of agents. `waits`: it waits until the test opens the gate. `outside`: a client runs it."""

    name: str = "act"
    effect: str = "unsafe"
    probe: Probe | None = None
    requires_approval: bool = False
    timeout_s: float | None = None
    waits: bool = False
    outside: bool = False
    result: str = ""


@pytest.fixture
def harness(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Iterator[Harness]:
    """A harness that checks the invariants of the database after the test."""
    made = Harness(settings, clock, database, waker)
    yield made
    made.check()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of which library the agent is."""
    return str(request.param)


@pytest.fixture
def bench(harness: Harness, kind: str) -> Iterator[Bench]:
    """A bench that has recorded no run."""
    made = Bench(harness, kind)
    yield made
    made.gate.set()
