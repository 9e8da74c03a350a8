"""The arguments of a call that `before_tool` hooks have changed, as the ledger records them and as the tool gets them.

A value that no hook changed stays what the model, or a person at an approval, wrote for it, and the tool gets it as
pydantic-ai converted it before: its conversion is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_ai import RunContext, ToolsetTool
from pydantic_ai.tools import ToolDefinition
from pydantic_core import PydanticSerializationError, to_json

from perdure.errors import ToolError
from perdure.text.untrusted import load_object


@dataclass(frozen=True, slots=True)
class Changed:
    """`text` is the JSON object that the ledger records, `written` its values; `arguments` is what the tool gets."""

    text: str
    written: dict[str, Any]
    arguments: dict[str, Any]


Checked = Callable[[str, Mapping[str, Any], Mapping[str, Any]], Changed]
"""Checks what hooks changed: of a call written as the text, the arguments before and after. Raises ToolError."""


def checked(
    tool: ToolsetTool[Any] | ToolDefinition | None,
    context: RunContext[Any],
    text: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> Changed:
    """Check the arguments `after` the hooks with the tool's validator. `before` is what it made of `text`.

    A value of `before` among them counts as unchanged.

    Raises:
        ToolError: they have no JSON form, or do not fit the tool.
    """
    same = {name: value for name, value in after.items() if name in before and before[name] is value}
    try:
        text = to_json(_written(tool, text, before, after, same)).decode()
        written = load_object(text)
    except (PydanticSerializationError, ValueError) as error:
        raise ToolError("A hook changed the arguments to values without a JSON form.") from error
    validator = getattr(tool, "args_validator", None)
    if validator is None:  # a tool of a dynamic toolset, which checks the arguments of each call itself
        return Changed(text, written, {**written, **same})
    try:
        converted: dict[str, Any] = validator.validate_json(text, context=context.validation_context)
    except ValidationError as error:
        raise ToolError(f"A hook changed the arguments to some that do not fit: {error}") from error
    return Changed(text, written, {**converted, **same})


def _written(
    tool: ToolsetTool[Any] | ToolDefinition | None,
    text: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    same: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments `after` the hooks, each of `same` as `text` has it, without defaults that are the same."""
    try:
        given: Mapping[str, Any] = load_object(text)
    except ValueError:  # pydantic-ai reads more
        given = before
    # A capability of the agent may have added a required argument.
    required = _required(tool)
    found = {
        name: given[name] if name in same and name in given else value
        for name, value in after.items()
        if name not in same or name in given or name in required
    }
    if same.keys() <= given.keys() or not before.keys() <= after.keys():
        return found
    # One that was not written may be a default, or have an alias in what was written.
    return {name: value for name, value in given.items() if name not in before} | found


def _required(tool: ToolsetTool[Any] | ToolDefinition | None) -> frozenset[str]:
    definition = tool.tool_def if isinstance(tool, ToolsetTool) else tool
    return frozenset() if definition is None else frozenset(definition.parameters_json_schema.get("required", ()))
