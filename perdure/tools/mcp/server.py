"""`McpServer`: the declaration of an MCP server by an agent's author. A declaration opens no connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from perdure.errors import SettingsError
from perdure.settings import McpSettings
from perdure.text import declarations
from perdure.text.patterns import compiled
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    USER,
    Approval,
    Approver,
    Effect,
    EffectName,
    Probe,
    require_approval,
)

_NAME = compiled(r"[a-zA-Z0-9_-]{1,32}")
_HEADER = compiled(r"[a-zA-Z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = compiled(r"(?:[!-~](?:[ -~\t]*[!-~])?)?")
UNSENDABLE = "with characters that HTTP does not allow, such as a line break at the end of a token"


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server whose tools an agent may call, each by the name `server:tool`.

        McpServer("weather", command=["uvx", "weather-server"], effect="pure")
        McpServer("shop", url="https://shop.example/mcp", effects={"price": "pure"})

    Each process that runs turns starts `command` as a child process. `PERDURE_MCP__COMMANDS` must contain the first
    item of `command`. The child's environment contains `env`, PATH, HOME and a few other variables, but not perdure's
    own. `headers` are sent with each request to `url`; for tokens that expire, they are a function without parameters,
    which is called in a thread before each request, for at most `connect_timeout_s`. `effect` is the effect of all
    tools; `effects` overrides it for single tools. If `trust_hints` is True, the server's hints (`readOnlyHint`,
    `idempotentHint`) override `effect`, but not `effects`. `requires_approval` is one value for all tools, or maps
    single tools to their values, as does `approver`. The keys of `effects`, `probes`, `requires_approval` and
    `approver` are names of tools without the prefix `server:`.

    Example:
        >>> weather = McpServer("weather", command=["uvx", "weather-server"], effect="pure")
        >>> shop = McpServer("shop", url="https://shop.example/mcp", effects={"price": "pure"})
        >>> assistant = Agent("assistant", "You help.", tools=[weather, shop])
        >>> [server.name for server in assistant.servers]
        ['weather', 'shop']
    """

    name: str
    _: KW_ONLY
    command: Sequence[str] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | Path | None = None
    headers: Mapping[str, str] | Callable[[], Mapping[str, str]] = field(default_factory=dict, repr=False)
    effect: Effect | EffectName = Effect.UNSAFE
    effects: Mapping[str, Effect | str] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict)
    requires_approval: Approval | Mapping[str, Approval] = False
    approver: Approver | Mapping[str, Approver] = USER
    trust_hints: bool = False
    timeout_s: float | None = None
    connect_timeout_s: float = 15
    max_result_chars: int = MAX_RESULT_CHARS

    def __post_init__(self) -> None:
        """Raise SettingsError if the declaration is invalid."""
        if not declarations.matches(self.name, _NAME):
            raise self._unfit(f"is named {self.name!r}; accepted: 1 to 32 of a-z, A-Z, 0-9, _ and -")
        self._check_types()
        if bool(self.command) == (self.url is not None):
            raise self._unfit("needs either command=[...] or url=..., and not both")
        if self.url is not None and not _is_http(self.url):
            raise self._unfit(
                f"has url={declarations.shown(self.url)}; accepted: an address that begins with http:// or https://"
            )
        wrong = sorted({str(each) for each in [self.effect, *self.effects.values()] if each not in [*Effect]})
        if wrong:
            raise self._unfit(f"declares the effect {wrong[0]!r}; accepted: {', '.join(Effect)}")
        self._check_approvals()
        self._check_limits()

    @property
    def configured_tools(self) -> frozenset[str]:
        """The tools that the declarations for single tools name, without the prefix `server:`."""
        by_tool = [each for each in (self.requires_approval, self.approver) if isinstance(each, Mapping)]
        return frozenset({*self.effects, *self.probes}.union(*by_tool))

    def effect_of(self, tool: str, hinted: Effect | None) -> Effect:
        """The effect of the server's `tool`. `hinted` is the effect that the server's hints declare, if any."""
        if tool in self.effects:
            return Effect(self.effects[tool])
        return hinted if self.trust_hints and hinted is not None else Effect(self.effect)

    def approval_of(self, tool: str) -> Approval:
        """Whether calls of the server's `tool` need a person's approval."""
        if isinstance(self.requires_approval, Mapping):
            return self.requires_approval.get(tool, False)
        return self.requires_approval

    def approver_of(self, tool: str) -> Approver:
        return self.approver.get(tool, USER) if isinstance(self.approver, Mapping) else self.approver

    def _check_approvals(self) -> None:
        needed, approver = self.requires_approval, self.approver
        pairs: list[tuple[object, object]] = []
        pairs += [(each, USER) for each in (needed.values() if isinstance(needed, Mapping) else [needed])]
        if isinstance(approver, Mapping):
            pairs += [(self.approval_of(tool), each) for tool, each in approver.items()]
        else:
            pairs.append((needed is not False, approver))
        for pair in pairs:
            require_approval(f"the MCP server {self.name!r}", *pair)

    def _check_types(self) -> None:
        command, probes = self.command, self.probes
        is_command = declarations.is_list(command) and all(declarations.is_text(part) for part in command)
        self._require("command", is_command, 'a list of strings, such as ["uvx", "x"]')
        self._require("cwd", self.cwd is None or isinstance(self.cwd, str | Path), "the path of a directory, or None")
        for argument, more in (("env", ""), ("headers", ", or a function without parameters that returns one")):
            given = getattr(self, argument)
            if not (declarations.is_text_by_text(given) or (more and callable(given))):  # the value may have a secret
                raise self._unfit(
                    f"has {argument} that are not text by name; accepted: a mapping of text to text{more}"
                )
        if not callable(self.headers) and (name := unsendable(self.headers)) is not None:
            raise self._unfit(f"has the header {name!r} {UNSENDABLE}")
        self._require("effects", isinstance(self.effects, Mapping), "a mapping of the tools' names to effects")
        are_probes = declarations.maps(probes, declarations.takes_one)
        self._require("probes", are_probes, "a mapping of the tools' names to functions with one parameter")
        self._require("trust_hints", isinstance(self.trust_hints, bool), "True or False")

    def _check_limits(self) -> None:
        optional = self.timeout_s is None or declarations.is_seconds(self.timeout_s)
        self._require("timeout_s", optional, f"{declarations.SECONDS}, or None")
        self._require("connect_timeout_s", declarations.is_seconds(self.connect_timeout_s), declarations.SECONDS)
        self._require("max_result_chars", declarations.is_count(self.max_result_chars), declarations.COUNT)

    def _require(self, argument: str, fits: bool, accepted: str) -> None:  # noqa: FBT001 (as assert)
        declarations.require(fits, f"the MCP server {self.name!r}", argument, getattr(self, argument), accepted)

    def _unfit(self, why: str) -> SettingsError:
        return SettingsError(f"the MCP server {self.name!r} {why}")


def unsendable(headers: Mapping[str, str]) -> str | None:
    """The name of the first header that cannot be sent; `None` if all can. An error of HTTP would show the value."""
    unfit = (
        name for name, value in headers.items() if not (_HEADER.fullmatch(name) and _HEADER_VALUE.fullmatch(value))
    )
    return next(unfit, None)


def check(servers: Iterable[McpServer], settings: McpSettings) -> None:
    """Check that this installation may start the servers; called before a process connects to them.

    Raises:
        SettingsError: a command is not allowed, or two different servers have the same name.
    """
    seen: dict[str, McpServer] = {}
    for server in servers:
        if seen.setdefault(server.name, server) != server:
            raise SettingsError(f"two different MCP servers are named {server.name!r}; give each a name of its own")
        if server.command and server.command[0] not in settings.commands:
            allowed = ",".join([*settings.commands, server.command[0]])
            raise SettingsError(
                f"PERDURE_MCP__COMMANDS is {','.join(settings.commands)!r}, and the MCP server {server.name!r} "
                f"would start {server.command[0]!r}: set PERDURE_MCP__COMMANDS={allowed} to allow that, "
                "or take the server out of its agent's tools"
            )


def _is_http(url: object) -> bool:
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False
