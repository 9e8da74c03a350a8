"""`Agent` declares an agent in plain Python; `Agents` holds all agents of an installation.

    from perdure import Agent, tool

    @tool(effect="pure")
    def weather(city: str) -> str:
        '''Say what the weather is like.'''
        ...

    assistant = Agent("assistant", instructions="You help.", tools=[weather])

`PERDURE_AGENTS` names the module that declares the agents. The first agent in the module is the default.
"""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from perdure.casebank import COMMON
from perdure.errors import InvalidRequest, SettingsError
from perdure.hooks import ApprovalWaiting, Hooks, Required, ToolCalled, ToolCalling, TurnEnding, TurnStarted
from perdure.settings import OnUnavailable
from perdure.text.untrusted import IDENTIFIER, is_identifier
from perdure.tools.awaited.task import CeleryTool
from perdure.tools.awaited.timer import SleepUntil
from perdure.tools.mcp.server import McpServer
from perdure.tools.registry import Tool, tool
from perdure.tools.sources import Toolset

if TYPE_CHECKING:
    from perdure.tools.mcp.connections import Connections


class ErrorMessages(Protocol):
    """The messages that an agent's users receive when a turn fails."""

    def find(self, code: str, language: str | None) -> str | None:
        """The message for the error code `code`. `None` means that perdure sends its own message.

        `language` is from the metadata of the user's message.
        """
        ...


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """`ErrorMessages` from mappings: `by_code` maps error codes to messages, for all languages.

    `by_language` maps each language to another such mapping, which takes precedence over `by_code`. Languages are
    BCP 47 tags, looked up as in RFC 4647: if a code has no message for `de-AT`, the user gets the message for `de`.
    """

    by_code: Mapping[str, str]
    by_language: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def find(self, code: str, language: str | None) -> str | None:
        """See `ErrorMessages.find`."""
        texts = {tag.lower(): of_tag for tag, of_tag in self.by_language.items()}
        wanted = (language or "").replace("_", "-").lower()
        while wanted:
            if found := texts.get(wanted, {}).get(code):
                return found
            wanted = wanted.rpartition("-")[0]
        return self.by_code.get(code)


OwnTool = Tool | CeleryTool | SleepUntil
"""A tool that an agent declares itself, as opposed to a tool that an MCP server lists."""


@dataclass(frozen=True)
class Agent:
    """An agent: its instructions, its tools, and limits that override those of the settings.

    `model` has the form of `PERDURE_MODEL`, and defaults to that setting. A plain function among `tools` becomes a tool
    with the effect `unsafe`. An `McpServer` among `tools` adds all tools of the server, and is moved to `servers`.
    `on_unavailable` determines what happens to a turn if no model replies: `fail` or `park`. `error_messages` has the
    messages that users receive when a turn fails.

    `casebank` names a bank of cases. The bank supplies cases to the agent's prompts, and stores the agent's positively
    rated turns as cases. The default is the common bank; `None` and `False` mean no bank. `perdure.hooks` describes the
    hooks.
    """

    name: str
    instructions: str
    tools: Sequence[OwnTool | McpServer | Callable[..., Any]] = ()
    model: str | None = None
    max_steps: int | None = None
    timeout_s: float | None = None
    on_unavailable: OnUnavailable | str | None = None
    error_messages: ErrorMessages | None = None
    casebank: str | Literal[False] | None = COMMON
    before_turn: Hooks[TurnStarted] = ()
    after_turn: Hooks[TurnEnding] = ()
    before_tool: Hooks[ToolCalling] = ()
    after_tool: Hooks[ToolCalled] = ()
    on_approval_waiting: Hooks[ApprovalWaiting] = ()
    servers: tuple[McpServer, ...] = field(init=False, hash=False)
    _by_name: dict[str, OwnTool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        servers = tuple(given for given in self.tools if isinstance(given, McpServer))
        if len({server.name for server in servers}) != len(servers):
            raise SettingsError(
                f"agent {self.name!r} has two MCP servers with the same name: {[each.name for each in servers]}"
            )
        own = [given for given in self.tools if not isinstance(given, McpServer)]
        made = [given if isinstance(given, OwnTool) else tool()(given) for given in own]
        by_name = {each.name: each for each in made}
        if len(by_name) != len(made):
            raise SettingsError(
                f"agent {self.name!r} has two tools with the same name: {sorted(each.name for each in made)}"
            )
        if self.on_unavailable is not None and self.on_unavailable not in [*OnUnavailable]:
            accepted = ", ".join(OnUnavailable)
            raise SettingsError(f"agent {self.name!r} has on_unavailable={self.on_unavailable!r}; accepted: {accepted}")
        self._check_casebank(self.casebank)
        self._check_limits()
        object.__setattr__(self, "tools", tuple(made))
        object.__setattr__(self, "servers", servers)
        object.__setattr__(self, "_by_name", by_name)

    def _check_casebank(self, given: object) -> None:
        if given is None or given is False or (isinstance(given, str) and is_identifier(given)):
            return
        raise SettingsError(f"agent {self.name!r} has casebank={given!r}; accepted: {IDENTIFIER}, or None for no bank")

    def _check_limits(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise SettingsError(f"agent {self.name!r} has max_steps={self.max_steps!r}; accepted: 1 or more")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise SettingsError(f"agent {self.name!r} has timeout_s={self.timeout_s!r}; accepted: seconds above 0")
        for point in ("before_turn", "after_turn", "before_tool", "after_tool", "on_approval_waiting"):
            hooks = getattr(self, point)
            if not isinstance(hooks, Sequence) or not all(
                callable(each) or isinstance(each, Required) for each in hooks
            ):
                raise SettingsError(f"agent {self.name!r} has {point}={hooks!r}; accepted: a list of functions")

    @property
    def bank(self) -> str | None:
        """The agent's bank of cases; `None` if it uses no bank."""
        return self.casebank or None

    def find_tool(self, name: str) -> OwnTool | None:
        """The tool of that name, or `None`."""
        return self._by_name.get(name)

    @property
    def tool_list(self) -> tuple[OwnTool, ...]:
        """The tools that the agent declares itself, in the order given."""
        return tuple(self._by_name.values())

    def toolset(self, connections: Connections | None) -> Toolset:
        """All tools that the agent may call now, including the tools that its MCP servers have listed.

        The first call in a process waits for each server to connect, at most the server's `connect_timeout_s`. If
        `connections` is `None`, the result has only the tools that the agent declares itself.
        """
        remote = connections.tools(self.servers) if connections is not None else ()
        return Toolset([*self.tool_list, *remote])

    def may_have(self, name: str) -> bool:
        """Whether `name` has the prefix of one of the agent's MCP servers.

        The server may or may not have a tool of that name.
        """
        return any(name.startswith(f"{server.name}:") for server in self.servers)


class Agents:
    """The agents of one installation, by name; the first is the default."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        if not agents:
            raise SettingsError("there is no agent: the module of PERDURE_AGENTS must define one")
        self._by_name = {agent.name: agent for agent in agents}
        if len(self._by_name) != len(agents):
            raise SettingsError(f"two agents have the same name: {sorted(agent.name for agent in agents)}")
        self.default = agents[0]

    @classmethod
    def from_module(cls, path: str) -> Agents:
        """Import the module at `path` and collect the agents that it defines.

        Raises:
            SettingsError: the import raises an exception of any type, or the module defines no agent.
        """
        try:
            module = importlib.import_module(path)
        except SettingsError as error:
            raise SettingsError(f"PERDURE_AGENTS is {path!r}: {error}") from error
        except Exception as error:
            raise SettingsError(
                f"PERDURE_AGENTS is {path!r}: {_explain(error)}; accepted: the path of an importable module"
            ) from error
        found = [value for value in vars(module).values() if isinstance(value, Agent)]
        unique = list({id(agent): agent for agent in found}.values())
        if not unique:
            raise SettingsError(f"PERDURE_AGENTS is {path!r}: the module defines no Agent")
        return cls(unique)

    def get(self, name: str) -> Agent:
        """The agent of that name.

        Raises:
            InvalidRequest: there is no such agent.
        """
        agent = self._by_name.get(name)
        if agent is None:
            raise InvalidRequest(f"There is no agent {name!r}. Known: {', '.join(sorted(self._by_name))}.")
        return agent

    def find(self, name: str) -> Agent | None:
        """The agent of that name, or `None`."""
        return self._by_name.get(name)

    @property
    def banks(self) -> list[str]:
        """The banks of cases that the agents use, without duplicates."""
        return sorted({agent.bank for agent in self if agent.bank is not None})

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._by_name.values())


def _explain(error: Exception) -> str:
    """The message of an error that an import raised, with the file and line unless the error is an `ImportError`."""
    if isinstance(error, ImportError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
