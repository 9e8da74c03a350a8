"""What the tools share whose calls no thread of a worker runs: a schema, and arguments that are checked against it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from perdure.errors import SettingsError, ToolError
from perdure.models.protocol import ToolSchema
from perdure.models.providers.wire_names import WireKeys
from perdure.text import declarations, untrusted
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    USER,
    Approvable,
    Approval,
    Approver,
    Effect,
    Tool,
    ToolContext,
    load_arguments,
    refusal_of,
    require_approval,
    require_name,
    tool,
)

Parameters = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema of type object, or a function whose signature and docstring describe the arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredTool(Approvable):
    """A tool with a schema and without a function to call; see `sources.RunnableTool`."""

    breaker: ClassVar[None] = None
    probe: ClassVar[None] = None

    name: str
    description: str
    parameters: Mapping[str, Any]
    max_result_chars: int
    requires_approval: Approval
    approver: Approver
    _signature: Tool | None
    _each: Mapping[str, Any]
    _keys: WireKeys = field(init=False)
    _schema: ToolSchema = field(init=False)

    def __post_init__(self) -> None:
        keys = WireKeys(self.parameters)
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_schema", ToolSchema(self.name, self.description, keys.schema))

    @property
    def has_odd_keys(self) -> bool:
        """Whether models write other keys than those that `parse` returns; see `WireKeys`."""
        return self._keys.schema is not self.parameters

    def schema(self) -> ToolSchema:
        return self._schema

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check the arguments that a model wrote, and return them as JSON values by name, without added defaults.

        If a function describes the arguments, they must match its signature. Otherwise, only their names are checked.

        Raises:
            ToolError: the arguments are not a strict JSON object, or a check fails; the message is for the model.
        """
        given = self._load(arguments)
        self._check(given)
        return given

    def _load(self, arguments: str) -> dict[str, Any]:
        try:
            return self._keys.from_wire(load_arguments(arguments, self.parameters))
        except (ValueError, OverflowError) as error:
            raise self._refusal(str(error)) from None

    def _check(self, given: Mapping[str, Any]) -> None:
        if self._signature is not None:
            self._signature.parse(json.dumps(given))
        known = self._each.get("properties", {})
        missing = [name for name in self._each.get("required", ()) if name not in given]
        extra = [name for name in given if name not in known and not self._each.get("additionalProperties", True)]
        if missing or extra:
            raise self._refusal(
                "; ".join([f"{name} is missing" for name in missing] + [f"{name} is not a parameter" for name in extra])
            )

    def _refusal(self, reason: str) -> ToolError:
        return refusal_of(f"The arguments of {self.name} were refused", reason, self._keys.schema)


class Asleep:
    """What the tools share whose call has no side effect, and makes the turn wait."""

    __slots__ = ()

    breaker: ClassVar[None] = None
    probe: ClassVar[None] = None
    effect: ClassVar[Effect] = Effect.PURE
    max_result_chars: ClassVar[int] = MAX_RESULT_CHARS

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:  # noqa: ARG002 (as RunnableTool)
        return False

    def approver_of(self, arguments: Mapping[str, Any]) -> str:  # noqa: ARG002 (as RunnableTool)
        return USER

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> NoReturn:  # noqa: ARG002 (as RunnableTool)
        """Raise `ToolError`: the engine parks the turn and never calls this method."""
        raise ToolError("The tool makes the turn wait; no process runs it.")


def require_declared(
    owner: str, name: object, description: object, requires_approval: Approval, approver: Approver
) -> None:
    """Raise `SettingsError` unless a tool may be declared so. `description` may be `None`."""
    require_name(owner, name)
    is_told = description is None or is_description(description)
    declarations.require(is_told, owner, "description", description, "text for the model, or None")
    require_approval(owner, requires_approval, approver)


def require_answered_in(owner: str, timeout_s: object) -> None:
    """Raise `SettingsError` unless a person or a client may have `timeout_s` seconds for an answer."""
    fits = timeout_s is None or declarations.is_seconds(timeout_s)
    accepted = f"{declarations.SECONDS}, or None for PERDURE_APPROVAL__EXPIRES_S"
    declarations.require(fits, owner, "timeout_s", timeout_s, accepted)


def is_description(value: object) -> bool:
    return declarations.is_text(value) and bool(str(value).strip())


def parse_text(arguments: str, member: str, refusal: Callable[[str], ToolError]) -> dict[str, Any]:
    """The arguments that a model wrote, if they are a strict JSON object with the text `member` and no other key.

    Raises:
        ToolError: they are anything else. `refusal` makes it from the reason, which is for the model.
    """
    try:
        given = untrusted.load_object(arguments)
    except (ValueError, OverflowError) as error:
        raise refusal(str(error)) from None
    if set(given) != {member} or not isinstance(given[member], str) or not given[member].strip():
        raise refusal(f"a string `{member}`, and nothing else, is expected")
    return given


def signature_of(name: str, parameters: Parameters | None) -> Tool | None:
    """The function in `parameters` as a tool named `name`; `None` if `parameters` is no function.

    Raises:
        SettingsError: the function has a parameter that a model cannot be given.
    """
    if parameters is None or isinstance(parameters, Mapping) or not callable(parameters):
        return None
    # A Celery task is not a function; its attribute `run` is the decorated function.
    function = parameters if inspect.isroutine(parameters) else getattr(parameters, "run", parameters)
    return tool(name=name)(function)


def schema_of(owner: str, parameters: Parameters | None) -> Mapping[str, Any]:
    """The schema `parameters`; any JSON object if it is `None`. `owner` is what declares it.

    Raises:
        SettingsError: it is no JSON schema of type object.
    """
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": True}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        accepted = "a JSON schema of type object, or a function"
        raise SettingsError(f"{owner} has parameters={declarations.shown(parameters)}; accepted: {accepted}")
    try:
        untrusted.load_object(json.dumps(parameters))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        why = untrusted.first_line(str(error))
        raise SettingsError(f"{owner} has parameters that cannot be sent to a model: {why}") from error
    return {"properties": {}, **parameters}
