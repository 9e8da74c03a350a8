"""`external_tool`: a tool without a body, whose calls a client or another service runs.

    scan = external_tool("scan_barcode", "Scan a barcode with the user's phone.", {"type": "object", "properties": {}})

The turn waits for the result, which comes through `POST /v1/turns/{id}/results` or `perdure.answer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from perdure.errors import SettingsError, ToolError
from perdure.text import declarations
from perdure.tools.awaited.declared import (
    DeclaredTool,
    Parameters,
    is_description,
    require_answered_in,
    schema_of,
    signature_of,
)
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    USER,
    Approval,
    Approver,
    Effect,
    ToolContext,
    require_approval,
    require_max_result_chars,
    require_name,
)


@dataclass(frozen=True, slots=True, eq=False)
class ExternalTool(DeclaredTool):
    """A tool whose calls are run outside perdure; see `sources.RunnableTool`. Make one with `external_tool`.

    A call that has no result `timeout_s` seconds after it was made has an unknown outcome. `None`:
    `PERDURE_APPROVAL__EXPIRES_S` applies.
    """

    waits_for: ClassVar[str] = "client"
    effect: ClassVar[Effect] = Effect.UNSAFE

    timeout_s: float | None

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> NoReturn:  # noqa: ARG002 (as RunnableTool)
        """Raise `ToolError`: the engine parks the turn and never calls this method."""
        raise ToolError(f"{self.name} runs outside perdure.")


def external_tool(
    name: str,
    description: str | None = None,
    parameters: Parameters | None = None,
    *,
    timeout_s: float | None = None,
    max_result_chars: int = MAX_RESULT_CHARS,
    requires_approval: Approval = False,
    approver: Approver = USER,
) -> ExternalTool:
    """Make a tool without a body. The turn waits until a client or another service brings the result of its call.

    `parameters` describes the arguments: a JSON schema, or a function with type hints and a docstring. If `parameters`
    is `None`, any JSON object is accepted. `description` may be left out if `parameters` is a function. A call that has
    no result after `timeout_s` seconds, by default `PERDURE_APPROVAL__EXPIRES_S`, has an unknown outcome for the model.

    Raises:
        SettingsError: a value is invalid; the message names it.

    Example:
        >>> location = external_tool("get_location", "Where the user's phone is.")
        >>> guide = Agent("guide", "You show the way.", tools=[location])
        >>> model = Scripted(call("get_location"), "You are in Paris.")
        >>> ask(guide, "Where am I?", model=model, tasks={"get_location": lambda: "Paris"}).calls[0].result
        'Paris'
    """
    require_name("external_tool", name)
    owner = f"the external_tool {name!r}"
    signature = signature_of(name, parameters)
    told = signature.description if description is None and signature is not None else description
    if told is None or not is_description(told):
        raise SettingsError(f"{owner} has description={declarations.shown(told)}; accepted: text for the model")
    require_answered_in(owner, timeout_s)
    require_max_result_chars(owner, max_result_chars)
    require_approval(owner, requires_approval, approver)
    schema = schema_of(owner, parameters) if signature is None else signature.parameters
    return ExternalTool(
        name=name,
        description=told,
        parameters=schema,
        timeout_s=timeout_s,
        max_result_chars=max_result_chars,
        requires_approval=requires_approval,
        approver=approver,
        _signature=signature,
        _each=schema,
    )
