"""`celery_tool`: declares a Celery task as a tool.

    export = celery_tool("reports.export", effect="idempotent", timeout_s=3600, parameters=export_report)

If perdure sends a task again, the task has the same id. If repeated runs with the same id take effect only once, the
tool may declare the effect `idempotent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from perdure.errors import SettingsError, ToolError
from perdure.text import declarations
from perdure.text.patterns import compiled
from perdure.tools.awaited.declared import DeclaredTool, Parameters, require_declared, schema_of, signature_of
from perdure.tools.registry import (
    MAX_RESULT_CHARS,
    USER,
    Approval,
    Approver,
    Effect,
    EffectName,
    ToolContext,
    require_effect,
    require_max_result_chars,
)

MAX_NAME = 200
"""The most characters in the name of a task or a queue."""

MAX_PARTS = 100
"""The most tasks in one call of a tool that declares `max_parallel`."""

_TASK = compiled(r"[A-Za-z_][A-Za-z0-9_.:-]*")
_QUEUE = compiled(r"[A-Za-z0-9_.:-]+")
_DOTS = compiled(r"[.:]")


@dataclass(frozen=True, slots=True, eq=False)
class CeleryTool(DeclaredTool):
    """A Celery task that a model may call; see `sources.RunnableTool`. Make one with `celery_tool`.

    If `queue` is `None`, the application's routes choose the queue. A task that has not ended `timeout_s` seconds after
    the call counts as lost. If `max_parallel` is set, the model passes a list of arguments, and each item becomes a
    separate task.
    """

    waits_for: ClassVar[str] = "task"

    timeout_s: float
    effect: Effect
    task: str
    queue: str | None
    max_parallel: int | None

    def parse(self, arguments: str) -> dict[str, Any]:
        """As `DeclaredTool.parse`; if `max_parallel` is set, for each item of the list `calls`."""
        given = self._load(arguments)
        if self.max_parallel is None:
            self._check(given)
            return given
        calls = given.get("calls")
        if set(given) != {"calls"} or not isinstance(calls, list) or not 0 < len(calls) <= MAX_PARTS:
            raise self._refusal(f"a list `calls` of 1 to {MAX_PARTS} objects is expected")
        for each in calls:
            if not isinstance(each, dict):
                raise self._refusal("an item of `calls` is not an object")
            self._check(each)
        return given

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> NoReturn:  # noqa: ARG002 (as RunnableTool)
        """Raise `ToolError`: the engine sends the task and never calls this method."""
        raise ToolError(f"{self.name} is a Celery task, which runs in a worker of its own.")


def celery_tool(
    task: str,
    *,
    effect: Effect | EffectName = Effect.UNSAFE,
    timeout_s: float = 3_600,
    name: str | None = None,
    description: str | None = None,
    parameters: Parameters | None = None,
    queue: str | None = None,
    max_parallel: int | None = None,
    max_result_chars: int = MAX_RESULT_CHARS,
    requires_approval: Approval = False,
    approver: Approver = USER,
) -> CeleryTool:
    """Make a tool from the Celery task named `task`, which receives the arguments by keyword.

    `parameters` describes the arguments: a JSON schema, or a function (such as the task's own) with type hints and a
    docstring. If `parameters` is `None`, any JSON object is accepted. If `max_parallel` is set, the model passes a list
    of arguments. Each item becomes a separate task, and at most `max_parallel` of the tasks are queued or running at a
    time. `name` defaults to the task's name, with each `.` and `:` replaced by `_`.

    Raises:
        SettingsError: a value is invalid; the message names it.

    Example:
        >>> def export(year: int) -> str:
        ...     '''Export the orders of a year.'''
        ...     return f"orders-{year}.csv"
        >>> export_tool = celery_tool("shop.export", effect="idempotent", timeout_s=600, parameters=export)
        >>> export_tool.name, export_tool.description
        ('shop_export', 'Export the orders of a year.')
        >>> shop = Agent("shop", "You report.", tools=[export_tool])
        >>> model = Scripted(call("shop_export", year=2026), "Here it is.")
        >>> ask(shop, "Export 2026.", model=model, tasks={"shop.export": export}).calls[0].result
        'orders-2026.csv'
    """
    if not declarations.matches(task, _TASK, MAX_NAME):
        accepted = "the name of a Celery task, such as 'shop.export'"
        raise SettingsError(f"celery_tool has the task {declarations.shown(task)}; accepted: {accepted}")
    chosen = name if name is not None else _DOTS.sub(lambda _: "_", task)
    owner = f"the celery_tool {task!r}"
    declarations.require(declarations.is_seconds(timeout_s), owner, "timeout_s", timeout_s, declarations.SECONDS)
    is_count = max_parallel is None or declarations.is_count(max_parallel)
    declarations.require(is_count, owner, "max_parallel", max_parallel, f"{declarations.COUNT}, or None")
    require_max_result_chars(owner, max_result_chars)
    require_effect(owner, effect)
    is_queue = queue is None or declarations.matches(queue, _QUEUE, MAX_NAME)
    declarations.require(is_queue, owner, "queue", queue, "letters, digits and _ . : -, or None")
    require_declared(owner, chosen, description, requires_approval, approver)
    signature = signature_of(chosen, parameters)
    each = schema_of(owner, parameters) if signature is None else signature.parameters
    return CeleryTool(
        name=chosen,
        description=description or (signature.description if signature else f"Run the task {task}."),
        parameters=each if max_parallel is None else _list_of(each),
        effect=Effect(effect),
        timeout_s=float(timeout_s),
        task=task,
        queue=queue,
        max_result_chars=max_result_chars,
        requires_approval=requires_approval,
        approver=approver,
        max_parallel=max_parallel,
        _signature=signature,
        _each=each,
    )


def _list_of(each: Mapping[str, Any]) -> Mapping[str, Any]:
    # A `$ref` starts at the root of the schema, so `$defs` moves to the new root.
    definitions = {"$defs": each["$defs"]} if "$defs" in each else {}
    items = {name: value for name, value in each.items() if name != "$defs"}
    calls = {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_PARTS}
    return {
        "type": "object", "properties": {"calls": calls}, "required": ["calls"], "additionalProperties": False,
        **definitions,
    }  # fmt: skip
