"""The module of PERDURE_AGENTS in the workers of a certification: the author's agents, with watched tools.

The import loads the module that `MODULE` names. Each agent keeps its name, instructions, hooks and guards. Its model is
that of `perdure.certify.model`, and it has only the tools that are certified. The process passes by a fault before and
after each commit, and before and after each execution of a tool.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from perdure.agents import Agent
from perdure.certify import scenarios, watching
from perdure.certify.faults import Faults, append
from perdure.certify.model import MODEL
from perdure.database.engine import Database
from perdure.errors import PerdureError
from perdure.text.untrusted import error_summary
from perdure.tools import around, event_loop
from perdure.tools.registry import DidNotHappen, Happened, Probe, ProbeOutcome, Tool, ToolContext

MODULE = "PERDURE_CERTIFY_MODULE"
DIRECTORY = "PERDURE_CERTIFY_DIRECTORY"
TURNS = "PERDURE_CERTIFY_TURNS"
"""Environment variables: the author's module, the directory of the faults and the journal, and the file of `_turn`."""

EXECUTIONS = "executions"
"""The file with a line for each event of an execution."""

_SHOWN = 400
"""The most characters of a result that are recorded."""


class Journal:
    """Records the executions of tools, and passes by their faults.

    Executions take turns, over all workers of all lanes: they may change the same world, and a change is to be that of
    one execution. `turns` is the file whose lock has the execution whose turn it is, for `longest_s` seconds at most.
    """

    def __init__(self, directory: Path, world: Callable[[], Any] | None, turns: Path, longest_s: float) -> None:
        self.faults = Faults(directory)
        self._world = world
        self._turns = turns
        self._longest_s = longest_s
        self._file = directory / EXECUTIONS

    def pass_commit(self, moment: str, name: str) -> None:
        """Pass by the faults of a commit. A tool may make one itself, as those for memories do."""
        with watching.unwatched():
            self.faults.pass_by(moment, name)

    def note(self, tool: str, context: ToolContext, event: str, **more: Any) -> None:
        """Record an event of a call."""
        line = {"turn_id": str(context.turn_id), "effect_id": str(context.effect_id), "tool": tool, "event": event}
        append(self._file, json.dumps({**line, **more}, ensure_ascii=False))

    def execute(self, tool: Tool, context: ToolContext, work: Callable[[], str]) -> str:
        """Run a tool's function, and record what it changed."""
        self.faults.pass_by("within", f"{tool.name}.entered")
        with self._turn():
            before = self._picture()
            self.note(tool.name, context, "began")
            watch = watching.Watch()
            try:
                text = watching.watched(work, watch)
            except PerdureError as error:
                self.note(tool.name, context, "raised", text=error.message[:_SHOWN], **self._seen(watch, before))
                raise
            self.note(tool.name, context, "returned", text=text[:_SHOWN], **self._seen(watch, before))
        self.faults.pass_by("within", f"{tool.name}.acted")
        return text

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other execution is between its two pictures.

        A worker that is killed lets the next one in, and so does an execution that exceeds its time limit.
        """
        with self._turns.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            overdue = threading.Timer(self._longest_s, fcntl.flock, (file.fileno(), fcntl.LOCK_UN))
            overdue.daemon = True
            overdue.start()
            try:
                yield
            finally:
                overdue.cancel()

    def _seen(self, watch: watching.Watch, before: list[str]) -> dict[str, list[str]]:
        """What an execution changed, and the addresses to which it connected."""
        difference = watching.difference(before, self._picture())
        changed = [f"the world: {difference}"] if difference else []
        changed += [f"the file {path}" for path in watch.changed_files()]
        changed += [f"the request {request}" for request in sorted(watch.requests)]
        return {"changed": changed, "connections": sorted(watch.connections)}

    def _picture(self) -> list[str]:
        with around.surrounded("the world of the certification"):
            return watching.picture(self._world)

    def ask(self, tool: str, probe: Probe, context: ToolContext) -> ProbeOutcome:
        """Ask a tool's probe, and record its answer."""
        try:
            found: Any = event_loop.call(f"the probe of {tool}", partial(probe, context), lambda: False)
        except Exception as error:
            self.note(tool, context, "probed", answer="error", text=error_summary(error))
            raise
        answer = "happened" if isinstance(found, Happened) else "unknown"
        self.note(tool, context, "probed", answer="nothing" if isinstance(found, DidNotHappen) else answer)
        outcome: ProbeOutcome = found
        return outcome


@dataclass(frozen=True, slots=True, eq=False)
class WatchedTool(Tool):
    """A tool whose executions are recorded."""

    journal: Journal

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Run the tool, and record the execution."""
        return self.journal.execute(self, context, lambda: Tool.call(self, arguments, context))


def watch(agent: Agent, journal: Journal, longest_s: float) -> Agent:
    """The agent with watched tools and the scripted model. No tool has more than `longest_s` seconds."""
    tools = [_watched(each, journal, longest_s) for each in agent.tool_list if isinstance(each, Tool)]
    return replace(agent, tools=tools, model=MODEL, settings={}, max_cost=None)


def _watched(tool: Tool, journal: Journal, longest_s: float) -> WatchedTool:
    given = {each.name: getattr(tool, each.name) for each in fields(Tool) if each.init}
    probe = tool.probe
    given["probe"] = None if probe is None else partial(journal.ask, tool.name, probe)
    given["timeout_s"] = None if tool.timeout_s is None else min(tool.timeout_s, longest_s)
    return WatchedTool(**given, journal=journal)


def _load() -> None:
    """Define the watched agents as variables of this module."""
    agents, certification = scenarios.load(os.environ[MODULE])
    longest_s = float(os.environ["PERDURE_TURN__TOOL_TIMEOUT_S"])
    journal = Journal(Path(os.environ[DIRECTORY]), certification.world, Path(os.environ[TURNS]), longest_s)
    watching.install()
    Database.observe_all(journal.pass_commit)
    made = {f"agent_{at}": watch(each, journal, longest_s) for at, each in enumerate(agents) if each.is_own}
    vars(sys.modules[__name__]).update(made)


if MODULE in os.environ:
    _load()
