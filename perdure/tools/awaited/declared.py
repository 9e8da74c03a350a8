"""What the tools share whose calls no thread of a worker runs: a schema, and arguments that are checked against it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from perdure.errors import SettingsError, ToolError
from perdure.models.protocol import ToolSchema
from perdure.models.providers.wire_names import WireKeys
from perdure.text import declarations, untrusted
from perdure.tools.registry import Approval, Approver, Tool, load_arguments, must_be_approved, tool, who_approves

Parameters = Mapping[str, Any] | Callable[..., Any]
"""A JSON schema of type object, or a function whose signature and docstring describe the arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredTool:
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keys", WireKeys(self.parameters))

    @property
    def has_odd_keys(self) -> bool:
        """Whether models write other keys than those that `parse` returns; see `WireKeys`."""
        return self._keys.schema is not self.parameters

    def schema(self) -> ToolSchema:
        return ToolSchema(self.name, self.description, self._keys.schema)

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check the arguments that a model wrote, and return them as JSON values by name, without added defaults.

        If a function describes the arguments, they must match its signature. Otherwise, only their names are checked.

        Raises:
            ToolError: the arguments are not a strict JSON object, or a check fails; the message is for the model.
        """
        given = self._load(arguments)
        self._check(given)
        return given

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        return must_be_approved(self.name, self.requires_approval, arguments)

    def approver_of(self, arguments: Mapping[str, Any]) -> str:
        return who_approves(self.name, self.approver, arguments)

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
        expected = json.dumps(self._keys.schema, ensure_ascii=False)
        return ToolError(
            f"The arguments of {self.name} were refused: {untrusted.storable(untrusted.cut(reason, 2_000))}. "
            f"Expected a JSON object that fits this schema: {untrusted.cut(expected, 4_000)}"
        )


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


def refusal_of(outcome: str, reason: str, parameters: Mapping[str, Any]) -> ToolError:
    """The refusal of arguments. `outcome` begins it, such as `Not asked`."""
    return ToolError(
        f"{outcome}: {untrusted.storable(untrusted.cut(reason, 500))}. "
        f"Expected a JSON object that fits this schema: {json.dumps(parameters)}"
    )


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
