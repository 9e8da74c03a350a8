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

import hashlib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from perdure.casebank import COMMON
from perdure.errors import InvalidRequest, SettingsError
from perdure.guards import Guard, Guards, guards_of
from perdure.hooks import (
    ApprovalWaiting,
    Hooks,
    Required,
    ToolCalled,
    ToolCalling,
    TurnContext,
    TurnEnding,
    TurnStarted,
)
from perdure.models.protocol import ForeignModel, name_of
from perdure.models.settings import check as check_settings
from perdure.output import OutputType
from perdure.settings import OnUnavailable
from perdure.text import declarations
from perdure.text.untrusted import IDENTIFIER, is_identifier
from perdure.tools.awaited.asking import AskUser
from perdure.tools.awaited.external import ExternalTool
from perdure.tools.awaited.task import CeleryTool
from perdure.tools.awaited.timer import SleepUntil
from perdure.tools.delegation import AgentTool, HandoffTool
from perdure.tools.mcp.server import McpServer
from perdure.tools.registry import Tool, tool
from perdure.tools.sources import Toolset

if TYPE_CHECKING:
    from perdure.tools.mcp.connections import Connections

_MAX_NAME_CHARS = 200
"""The longest name of an agent: a message names its agent with at most as many characters."""

_MAKERS = "perdure.tools.", "perdure.adapters."
"""The modules of the functions that make tools. None of these functions is a tool itself."""


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

    Example:
        >>> texts = ErrorTexts({"TIMEOUT": "That took too long."}, {"de": {"TIMEOUT": "Das hat zu lange gedauert."}})
        >>> texts.find("TIMEOUT", "de-AT")
        'Das hat zu lange gedauert.'
        >>> assistant = Agent("assistant", "You help.", error_messages=texts)
    """

    by_code: Mapping[str, str]
    by_language: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise SettingsError if the declaration is invalid."""
        declarations.require(
            declarations.is_text_by_text(self.by_code), "ErrorTexts", "by_code", self.by_code, "texts by error code"
        )
        languages = self.by_language
        are_texts = declarations.maps(languages, declarations.is_text_by_text)
        declarations.require(are_texts, "ErrorTexts", "by_language", languages, "texts by error code, by language")

    def find(self, code: str, language: str | None) -> str | None:
        texts = {tag.lower(): of_tag for tag, of_tag in self.by_language.items()}
        wanted = (language or "").replace("_", "-").lower()
        while wanted:
            if found := texts.get(wanted, {}).get(code):
                return found
            wanted = wanted.rpartition("-")[0]
        return self.by_code.get(code)


OwnTool = Tool | CeleryTool | ExternalTool | AskUser | SleepUntil | AgentTool | HandoffTool
"""A tool that an agent declares itself, as opposed to a tool that an MCP server lists."""


@dataclass(frozen=True)
class Agent:
    """An agent: its instructions, its tools, and limits that override those of the settings.

    `model` has the form of `PERDURE_MODEL`, and defaults to that setting. It may also be a model object of pydantic-ai.
    `settings` are those of the model's calls, such as `temperature` (`perdure.models.settings`). A plain function among
    `tools` becomes a tool with the effect `unsafe`. An `McpServer` among `tools` adds all tools of the server, and is
    moved to `servers`. `on_unavailable` determines what happens to a turn if no model replies: `fail` or `park`.
    `error_messages` has the messages that users receive when a turn fails.

    `max_steps`, `timeout_s` (seconds), `max_tokens` and `max_cost` (US dollars) limit one turn. They are checked before
    each model call; a turn that has reached one of them fails with `BUDGET_EXHAUSTED`, or with `TIMEOUT`. `window` is
    the number of tokens of the model's window, and `keep_turns` that of the session's turns in a prompt, the present
    one included.

    `instructions` may be a function, `def` or `async def`, of the `TurnContext`. What it returns is stored with the
    turn. `deps` is such a function, too: it makes what `ToolContext.deps` and `TurnContext.deps` are, once for each run
    of a turn by a worker.

    `output` is the type of the agent's answers: a model of pydantic, a dataclass, a TypedDict, or any other type that
    pydantic knows. The turn's reply has the answer as `data`. `check_output` is a function of the answer, which is text
    without an `output`; if it raises `ModelRetry`, the model answers again (`perdure.output`).

    `casebank` names a bank of cases. The bank supplies cases to the agent's prompts, and stores the agent's positively
    rated turns as cases. The default is the common bank; `None` and `False` mean no bank. `perdure.hooks` describes the
    hooks, and `perdure.guards` the guards.

    Example:
        >>> def weather(city: str) -> str:
        ...     '''Say what the weather is like.'''
        ...     return f"Rain in {city}."
        >>> assistant = Agent("assistant", "You help.", tools=[weather])
        >>> answer = ask(assistant, "Umbrella?", model=Scripted(call("weather", city="Paris"), "Take one."))
        >>> answer.calls[0].result, answer.reply
        ('Rain in Paris.', 'Take one.')
    """

    name: str
    instructions: str | Callable[[TurnContext[Any]], str | Awaitable[str]] = field(hash=False)
    tools: Sequence[OwnTool | McpServer | Callable[..., Any]] = ()
    model: str | ForeignModel | None = field(default=None, hash=False)
    max_steps: int | None = None
    timeout_s: float | None = None
    max_tokens: int | None = None
    max_cost: float | Decimal | None = None
    window: int | None = None
    keep_turns: int | None = None
    on_unavailable: OnUnavailable | str | None = None
    error_messages: ErrorMessages | None = None
    casebank: str | Literal[False] | None = COMMON
    before_turn: Hooks[TurnStarted] = ()
    after_turn: Hooks[TurnEnding] = ()
    before_tool: Hooks[ToolCalling] = ()
    after_tool: Hooks[ToolCalled] = ()
    on_approval_waiting: Hooks[ApprovalWaiting] = ()
    input_guards: Guards = ()
    output_guards: Guards = ()
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    deps: Callable[[TurnContext[Any]], Any] | None = field(default=None, hash=False)
    output: Any = field(default=None, hash=False)
    check_output: Callable[[Any], object] | None = None
    output_type: OutputType | None = field(init=False, repr=False, compare=False)
    servers: tuple[McpServer, ...] = field(init=False, hash=False)
    guards: tuple[Guard, ...] = field(init=False, repr=False, compare=False)
    reply_guards: tuple[Guard, ...] = field(init=False, repr=False, compare=False)
    _by_name: dict[str, OwnTool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise SettingsError if the declaration is invalid."""
        declarations.require(
            declarations.is_name(self.name, _MAX_NAME_CHARS), "an agent", "name", self.name,
            f"text of 1 to {_MAX_NAME_CHARS} characters",
        )  # fmt: skip
        self._check_tools()
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
        self._check_values()
        is_text = self.output is None or self.output is str
        output = None if is_text else OutputType(self.output, f"agent {self.name!r}")
        object.__setattr__(self, "output_type", output)
        object.__setattr__(self, "tools", tuple(made))
        object.__setattr__(self, "servers", servers)
        object.__setattr__(self, "guards", self._guards("input_guards"))
        object.__setattr__(self, "reply_guards", self._guards("output_guards"))
        object.__setattr__(self, "_by_name", by_name)

    def _check_tools(self) -> None:
        self._require("tools", declarations.is_list(self.tools), "a list of tools, such as [weather]")
        for given in self.tools:
            is_maker = str(getattr(given, "__module__", "")).startswith(_MAKERS)
            if isinstance(given, OwnTool | McpServer) or (inspect.isroutine(given) and not is_maker):
                continue
            task = getattr(given, "name", None) if hasattr(given, "apply_async") else None
            hint = f"; for a Celery task, write celery_tool({task!r})" if isinstance(task, str) else ""
            accepted = (
                "functions with @tool, plain functions, celery_tool(…), external_tool(…), ask_user(…), "
                "agent_tool(…), handoff(…), sleep_until, McpServer(…)"
            )
            if hasattr(given, "tool_list"):
                hint = "; for another agent, write agent_tool(…) or handoff(…)"
            if inspect.isroutine(given):
                hint = f"; {given.__name__} makes a tool: write {given.__name__}(…)"
            raise SettingsError(
                f"agent {self.name!r} has {declarations.shown(given)} among its tools; accepted: {accepted}{hint}"
            )

    def _check_values(self) -> None:
        is_text = declarations.is_text(self.instructions)
        of_turn = "a function of the turn (TurnContext)"
        self._require("instructions", is_text or declarations.takes_one(self.instructions), f"text, or {of_turn}")
        self._require("deps", self.deps is None or declarations.takes_one(self.deps), f"{of_turn}, or None")
        given: Any = self.model
        model = "a name such as 'openai:gpt-5', a model of pydantic-ai, or None for PERDURE_MODEL"
        is_name = declarations.is_text(given) and bool(given.strip())
        is_model = isinstance(given, ForeignModel) and not isinstance(given, type)
        self._require("model", given is None or is_name or is_model, model)
        check_settings(self.settings, f"agent {self.name!r}")
        for argument in ("max_steps", "max_tokens", "window", "keep_turns"):
            value = getattr(self, argument)
            self._require(argument, value is None or declarations.is_count(value), f"{declarations.COUNT}, or None")
        is_amount = self.max_cost is None or declarations.is_amount(self.max_cost)
        self._require("max_cost", is_amount, f"{declarations.AMOUNT}, or None")
        within = self.timeout_s is None or declarations.is_seconds(self.timeout_s)
        self._require("timeout_s", within, f"{declarations.SECONDS}, or None")
        known = self.on_unavailable is None or self.on_unavailable in [*OnUnavailable]
        self._require("on_unavailable", known, f"{', '.join(OnUnavailable)}, or None")
        given = self.error_messages
        find = None if isinstance(given, type | str) else getattr(given, "find", None)
        texts = "ErrorTexts({code: text}), an object with the method find(code, language), or None"
        self._require("error_messages", given is None or callable(find), texts)
        given = self.casebank
        bank = given is None or given is False or (isinstance(given, str) and is_identifier(given))
        self._require("casebank", bank, f"{IDENTIFIER}, or None for no bank")
        check = self.check_output
        self._require(
            "check_output", check is None or declarations.takes_one(check), "a function of the answer, or None"
        )
        for point in ("before_turn", "after_turn", "before_tool", "after_tool", "on_approval_waiting"):
            hooks = getattr(self, point)
            fit = declarations.is_list(hooks) and all(
                isinstance(each, Required) or declarations.takes_one(each) for each in hooks
            )
            self._require(point, fit, "a list of functions with one parameter, each plain or required(…)")

    def _guards(self, argument: str) -> tuple[Guard, ...]:
        found = guards_of(getattr(self, argument), f"agent {self.name!r}", argument)
        if argument == "output_guards" and any(each.parallel for each in found):
            raise SettingsError(
                f"agent {self.name!r} has a parallel guard among its output_guards: only input_guards may be"
            )
        return found

    def _require(self, argument: str, fits: bool, accepted: str) -> None:  # noqa: FBT001 (as assert)
        declarations.require(fits, f"agent {self.name!r}", argument, getattr(self, argument), accepted)

    def asked_model(self, default: str) -> str | ForeignModel:
        """The model that the agent asks. `default` is `PERDURE_MODEL`."""
        return self.model or default

    @property
    def judges_replies(self) -> bool:
        """Whether a reply of the model may be no answer of the agent. Its text is then not streamed."""
        return self.output_type is not None or self.check_output is not None or bool(self.output_guards)

    @property
    def screens(self) -> bool:
        """Whether hooks or guards must let a user's message pass."""
        return bool(self.before_turn or self.input_guards)

    is_own: ClassVar[bool] = True
    """Whether perdure knows the agent's instructions and tools. Those of an adapted agent, another library knows."""

    @property
    def bank(self) -> str | None:
        return self.casebank or None

    def find_tool(self, name: str) -> OwnTool | None:
        return self._by_name.get(name)

    @property
    def origin(self) -> object:
        """The object that the author made: two agents of one origin are the same agent."""
        return self

    @property
    def tool_list(self) -> tuple[OwnTool, ...]:
        return tuple(self._by_name.values())

    def toolset(self, connections: Connections | None) -> Toolset:
        """All tools that the agent may call now, including the tools that its MCP servers have listed.

        The first call in a process waits for each server to connect, at most the server's `connect_timeout_s`. If
        `connections` is `None`, the result has only the tools that the agent declares itself.
        """
        remote = connections.tools(self.servers) if connections is not None else ()
        return Toolset([*self.tool_list, *remote])

    @cached_property
    def fingerprint(self) -> str:
        """12 hexadecimal digits that change with what the agent's declaration tells a model.

        That is the instructions, the tools with their schemas, the model, its settings and the output. Tools of MCP
        servers, the result of a function as instructions, and the code of tools do not count.
        """
        function = getattr(self.instructions, "__qualname__", repr(type(self.instructions)))
        declared = [
            self.name,
            self.instructions if isinstance(self.instructions, str) else function,
            self._declared_tools(),
            name_of(self.asked_model("")),
            sorted(self.settings.items()),
            None if self.output_type is None else self.output_type.schema,
        ]
        return hashlib.sha256(json.dumps(declared, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def _declared_tools(self) -> list[Any]:
        return [[each.name, each.description, each.parameters] for each in self.tool_list]

    def may_have(self, name: str) -> bool:
        """Whether `name` has the prefix of one of the agent's MCP servers.

        The server may or may not have a tool of that name.
        """
        return any(name.startswith(f"{server.name}:") for server in self.servers)


class Agents:
    """The agents of one installation, by name; the first is the default.

    The agents that others have as tools (`agent_tool`, `handoff`) belong to it, too.

    Raises:
        SettingsError: there is no agent, two have the same name, or a tool names an agent that does not exist.
    """

    def __init__(self, agents: Sequence[Agent]) -> None:
        if not agents:
            raise SettingsError("there is no agent: the module of PERDURE_AGENTS must define one")
        found = _with_reached(agents)
        self._by_name = {agent.name: agent for agent in found}
        if len(self._by_name) != len(found):
            raise SettingsError(f"two agents have the same name: {sorted(agent.name for agent in found)}")
        for agent in found:
            for each in _delegating(agent):
                if each.agent_name not in self._by_name:
                    raise SettingsError(
                        f"agent {agent.name!r} has the tool {each.name!r}, but there is no agent {each.agent_name!r}. "
                        f"Known: {', '.join(sorted(self._by_name))}"
                    )
        self.default = agents[0]

    @classmethod
    def from_module(cls, path: str, collect: Callable[[Mapping[str, object]], list[Agent]] | None = None) -> Agents:
        """Import the module at `path` and collect the agents that it defines.

        `collect` finds the agents among the module's variables. Defaults to all that are perdure's own.

        Raises:
            SettingsError: the import raises an exception of any type, or the module defines no agent.
        """
        try:
            module = importlib.import_module(path)
        except SettingsError as error:
            raise SettingsError(f"PERDURE_AGENTS is {path!r}: {error}") from error
        except (Exception, SystemExit) as error:
            raise SettingsError(
                f"PERDURE_AGENTS is {path!r}: {_explain(error)}; accepted: the path of an importable module"
                f"{_hidden_file(path)}"
            ) from error
        if collect is not None:
            found = collect(vars(module))
        else:
            found = [value for value in vars(module).values() if isinstance(value, Agent)]
        unique = list({id(agent): agent for agent in found}.values())
        if not unique:
            raise SettingsError(
                f"PERDURE_AGENTS is {path!r}: the module defines no Agent (it is {_origin(module)}){_hidden_file(path)}"
            )
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
        return self._by_name.get(name)

    def screens(self, name: str) -> bool:
        """Whether the agent of that name, if there is one, screens messages."""
        agent = self.find(name)
        return agent is not None and agent.screens

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each agent, by name."""
        return {agent.name: agent.fingerprint for agent in self}

    @property
    def banks(self) -> list[str]:
        return sorted({agent.bank for agent in self if agent.bank is not None})

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._by_name.values())


def _delegating(agent: Agent) -> list[AgentTool | HandoffTool]:
    return [each for each in agent.tool_list if isinstance(each, AgentTool | HandoffTool)]


def _with_reached(agents: Sequence[Agent]) -> list[Agent]:
    """The agents, and those that they have as tools, directly or through another."""
    found = list(agents)
    for agent in found:  # grows
        for each in _delegating(agent):
            if each.agent is not None and all(other.origin is not each.agent.origin for other in found):
                found.append(each.agent)
    return found


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "a part of Python"


def _hidden_file(path: str) -> str:
    """A hint, if a module of Python or of an installed package has the name of a file in the working directory."""
    name = path.partition(".")[0]
    module = sys.modules.get(name)
    own = [each for each in (Path(f"{name}.py"), Path(name, "__init__.py"), Path(name)) if each.exists()]
    found = {
        Path(each).resolve() for each in (getattr(module, "__file__", None), *getattr(module, "__path__", ())) if each
    }
    if module is None or not own or found & {each.resolve() for each in own}:
        return ""
    return f"; the module {name!r} ({_origin(module)}) hides {own[0].absolute()}: give your module another name"


def _explain(error: BaseException) -> str:
    """The message of an error that an import raised, with the file and line unless the error is an `ImportError`."""
    if isinstance(error, ImportError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
