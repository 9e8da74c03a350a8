"""The durability capability: hands each unit of a run, a model request or a tool call, to the turn that runs it.

It implements pydantic-ai's public interface for durable engines (`pydantic_ai.durable_exec`). Outside a turn of perdure
it changes nothing, so an adapted agent remains an agent of pydantic-ai.

Discovering tools, checking arguments, compaction and event handlers are no units: they run again when a run does.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import count
from typing import Any, Protocol, Self, cast
from weakref import WeakValueDictionary

from pydantic_ai import AbstractToolset, CallToolsNode, RunContext, ToolsetTool, UserPromptNode, WrapperToolset
from pydantic_ai.agent.abstract import AbstractAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    CallToolResult,
    DurabilityCodec,
    DurabilityEngineSpec,
    DurableOperation,
    DurableOperationBackend,
    JournalCallableOperationBackend,
    ModelRequestId,
    ModelRequestParams,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    ToolsetCallToolParams,
)
from pydantic_ai.durable_exec._operation import IdentityParameterTransport, NoCacheIdentity
from pydantic_ai.durable_exec._toolset import wrap_tool_call_result
from pydantic_ai.exceptions import ModelRetry, UserError
from pydantic_ai.messages import (
    AgentStreamEvent,
    ModelMessage,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    UserContent,
)
from pydantic_ai.models import Model, ModelRequestContext, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolDefinition
from pydantic_ai.toolsets.external import ExternalToolset

from perdure.adapters.pydantic_ai.changed import Checked, checked
from perdure.adapters.pydantic_ai.streaming import streams
from perdure.errors import OutcomeUnknown
from perdure.models.endings import is_proper

Body = Callable[[], Awaitable[Any]]

_numbers = count()

OWN_MODEL = "perdure"
"""The name by which pydantic-ai knows a model that is not the agent's own."""

given_models: WeakValueDictionary[str, Model] = WeakValueDictionary()
"""The models to which capabilities have moved requests, such as `ModelFallback`. Units run in this process."""

_MARK = "\0"
"""In a name of `given_models`, between the model's identifier and a number."""

CUT_OFF = "Your reply was cut off before it was complete, so none of its calls were run."


class _Codec(DurabilityCodec):
    """pydantic-ai's codec without the counts of tokens that a provider did not report, which are 0 there."""

    def dump(self, tp: Any, value: Any) -> Any:
        found = JSON_CODEC.dump(tp, value)
        if isinstance(value, ModelResponse):
            reported = vars(value.usage)
            found["usage"] = {name: count for name, count in found["usage"].items() if name in reported}
        return found

    def load(self, tp: Any, payload: Any) -> Any:
        return JSON_CODEC.load(tp, payload)


CODEC: DurabilityCodec = _Codec()


@dataclass(frozen=True)
class Asked:
    """What a run asks its model, and the run's context."""

    messages: Sequence[ModelMessage]
    settings: ModelSettings | None
    parameters: ModelRequestParameters
    context: RunContext[Any]
    given: str | None = None
    """The name of the model in `given_models`, if a capability has moved the request to another model."""

    @property
    def model(self) -> object:
        """The model of the request, or its name."""
        found = None if self.given is None else given_models.get(self.given)
        return self.context.model if found is None else found

    @property
    def model_id(self) -> str | None:
        """The identifier by which pydantic-ai knows the model of the request."""
        if self.given is not None and self.given in given_models:
            return self.given.partition(_MARK)[0]
        model = self.context.model
        return self.context.model_id or (model.model_id if isinstance(model, Model) else None)


class Run(Protocol):
    """The run of an agent in a turn, as the capability sees it. All methods are called on the event loop."""

    streams: bool
    """Whether the run's model streams its text."""
    prompt: str | list[UserContent] | None
    """What the user asked in the turn, also if the history of the run has it already."""

    async def request_model(self, body: Body, asked: Asked) -> Any:
        """Run one model request; returns the response as JSON values."""
        ...

    async def call_tool(
        self,
        body: Body,
        arguments: dict[str, Any],
        context: RunContext[Any],
        definition: ToolDefinition | None,
        checked: Checked,
    ) -> Any:
        """Run one tool call, or return its recorded result; returns a `CallToolResult` as JSON values.

        `body` runs the tool with `arguments`, which hooks may change before. `checked` checks what they changed.
        """
        ...

    async def accept(self, response: ModelResponse) -> None:
        """Take the reply with which the run goes on. Hooks of the agent may have changed what the model gave."""
        ...

    async def decide(
        self, requests: DeferredToolRequests, definitions: Mapping[str, ToolDefinition]
    ) -> DeferredToolResults:
        """The decisions about calls that wait for a person, and the results of calls that wait for a client.

        `definitions` are the run's tools by name.
        """
        ...

    def delta(self, text: str) -> None:
        """Report streamed text of the present model request."""
        ...


current: ContextVar[Run | None] = ContextVar("perdure_run", default=None)
"""The run of the present coroutine."""


class _Backend(JournalCallableOperationBackend[None]):
    async def execute(
        self, *, operation_id: object, name: str, body: Body, cache_key: tuple[Any, ...], config: None
    ) -> Any:
        del name, config
        run = current.get()
        if run is not None and isinstance(operation_id, ModelRequestId):
            _, messages, settings, parameters, context = cache_key
            asked = Asked(messages, settings, parameters, context, operation_id.model_id)
            return await run.request_model(body, asked)
        if run is not None and isinstance(operation_id, ToolsetCallToolId):
            _, arguments, context, tool = cache_key
            definition = getattr(tool, "tool_def", tool)
            return await run.call_tool(body, arguments, context, definition, partial(checked, tool, context))
        return await body()


class Durability(BaseDurabilityCapability[Any]):
    """Makes the runs of an agent durable while a turn of perdure runs it. `models` are used besides the agent's own."""

    engine_spec = DurabilityEngineSpec(
        engine_name="perdure",
        durable_unit_noun="unit",
        durable_container_noun="turn",
        codec=CODEC,
        journal_discovery=False,
        wrapped_toolset_kinds=frozenset({"function", "dynamic"}),  # `_wrap_leaf_toolset` wraps those of MCP servers
    )

    def __init__(self, name: str, models: Mapping[str, Model] | None = None) -> None:
        super().__init__(name=name, models=models, event_stream_handler=_report_text)

    @property
    def in_durable_context(self) -> bool:
        return current.get() is not None

    def get_durable_operation_backend(self) -> DurableOperationBackend[Any]:
        config = RoleBasedOperationConfig[None](model=None, event=None, capability=None, tool=None)
        return _Backend(agent_name=self.name, config=config)

    @property
    def has_units_of_capabilities(self) -> bool:
        """Whether a capability of the agent has durable operations of its own, or a workspace."""
        return bool(self._bound_capability_operations) or self._bound_workspace_operation is not None

    def for_agent(self, agent: AbstractAgent[Any, Any]) -> AbstractCapability[Any]:
        """The capability itself, if it is bound to the agent. Binding scans the agent, so runs share one."""
        return self if self._agent is agent else super().for_agent(agent)

    def with_model(self, model: Model | None) -> Self:
        """The bound capability of a run with another model than the agent's own; `None`: with the agent's own."""
        if model is None:
            return self
        made = copy(self)
        made._models_by_id = {**self._models_by_id, OWN_MODEL: model}  # noqa: SLF001 (a copy of this object)
        return made

    def _effective_event_stream_handler(self) -> Any:
        run = current.get()
        return self._event_stream_handler if run is not None and run.streams else None

    def _bind_models(self, agent: AbstractAgent[Any, Any]) -> None:
        if agent.model is not None or not self._extra_models:
            super()._bind_models(agent)
        else:  # a model of perdure, which each run is given
            self._models_by_id = dict(self._extra_models)

    def _model_id_for_request(self, ctx: RunContext[Any], request_context: ModelRequestContext) -> str | None:
        """Name a model that only this process knows, which pydantic-ai's own engines refuse."""
        try:
            return super()._model_id_for_request(ctx, request_context)
        except UserError:
            model = request_context.model
            name = f"{request_context.model_id or model.model_id}{_MARK}{next(_numbers)}"
            given_models[name] = model
            return name

    def _registered_model_id(self, model: Model) -> tuple[bool, str | None]:
        found = super()._registered_model_id(model)
        known = None if found[0] else next((name for name, each in given_models.items() if each is model), None)
        return found if known is None else (True, known)

    async def _model_request_stream_operation(self, params: ModelRequestParams) -> ModelResponse:
        """Ask the model, without streaming if a capability has moved the request to a model that cannot stream."""
        if params.model_id is not None:
            async with self._durable_model_scope(params.model_id, params.run_context, serving=True) as (model, _):
                can_stream = streams(model)
            if not can_stream:
                response = await self._model_request_operation(params)
                run = current.get()
                if run is not None:
                    run.delta(response.text or "")
                return response
        return await super()._model_request_stream_operation(params)

    async def _resolve_model_for_request(self, model_id: str | None, run_context: RunContext[Any]) -> Model:
        given = None if model_id is None else given_models.get(model_id)
        return await super()._resolve_model_for_request(model_id, run_context) if given is None else given

    def _wrap_and_register_leaf(self, ts: AbstractToolset[Any]) -> AbstractToolset[Any]:
        # The ledger knows a call by its reply and its id. Agents may share a toolset: its name is unique in a process.
        if ts._explicit_id is None and hasattr(ts, "_id"):  # noqa: SLF001 (the interface names no other way)
            ts._id = f"<{type(ts).__name__} {next(_numbers)}>"  # noqa: SLF001 (the same)
            if hasattr(ts, "_id_explicit"):
                ts._id_explicit = True  # noqa: SLF001 (the same)
        return super()._wrap_and_register_leaf(ts)

    def _wrap_leaf_toolset(self, ts: AbstractToolset[Any]) -> WrapperToolset[Any] | None:
        """Record the calls of each toolset: pydantic-ai wraps those that it knows, this method all others."""
        known = super()._wrap_leaf_toolset(ts)
        if known is not None or isinstance(ts, ExternalToolset):
            return known

        async def handler(params: ToolsetCallToolParams) -> CallToolResult:
            tool = cast("ToolsetTool[Any]", params.tool)
            with self._tool_run_context_scope(params.ctx) as context:
                called = ts.call_tool(params.name, params.tool_args, context, tool)
                return await wrap_tool_call_result(_answered(called))

        operation: DurableOperation[ToolsetCallToolParams, Any, CallToolResult] = DurableOperation(
            operation_id=ToolsetCallToolId("function", toolset_id=cast("str", ts.id)),
            handler=handler,
            parameter_transport=IdentityParameterTransport(),
            cache_identity=_CallIdentity(),
            result_codec=self._typed_result_codec(CallToolResult),
            config_role="tool",
            invocation_label=lambda params: params.name,
        )
        bound = self.get_durable_operation_backend().bind(operation)

        async def call(parameters: ToolsetCallToolParams) -> Any:
            if not self.in_durable_context:
                tool = cast("ToolsetTool[Any]", parameters.tool)
                return await ts.call_tool(parameters.name, parameters.tool_args, parameters.ctx, tool)
            return self._unwrap_tool_result(await bound(parameters))

        return _RecordedToolset(ts, call)

    async def after_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        """Reject a reply that did not end properly, so that none of its calls runs."""
        del ctx, request_context
        if current.get() is not None and response.tool_calls and not is_proper(response.finish_reason or "stop"):
            raise ModelRetry(CUT_OFF)
        return response

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[Any], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """The answers for calls that wait for a person or a client."""
        run = current.get()
        return None if run is None else await run.decide(requests, ctx.tools)


async def continued(ctx: RunContext[Any], *, node: Any) -> Any:
    """A hook before each node of the run: the reply of the model is final, or the turn's prompt is `ctx.prompt`."""
    del ctx
    run = current.get()
    if run is not None and isinstance(node, CallToolsNode):
        await run.accept(node.model_response)
    # A run that continues a turn adds no prompt.
    if run is None or not isinstance(node, UserPromptNode) or node.user_prompt is not None:
        return node
    given = {each.name: getattr(node, each.name) for each in fields(node) if each.init}
    return _Continued(**given, prompt=run.prompt)


@dataclass
class _Continued(UserPromptNode[Any, Any]):
    """The first node of a run that adds no prompt, because its history has the prompt."""

    prompt: str | list[UserContent] | None = None

    @classmethod
    @cache
    def get_node_id(cls) -> str:
        """The id under which the graph of a run knows the node."""
        return UserPromptNode.get_node_id()

    async def run(self, ctx: Any) -> Any:
        """Run the node. It takes the last request of the history for the prompt, which may be what a tool returned."""
        ctx.deps.prompt = self.prompt
        found = await super().run(ctx)
        ctx.deps.prompt = self.prompt
        return found


class _RecordedToolset(WrapperToolset[Any]):
    """A toolset whose calls go through `call`, as the wrappers of pydantic-ai do for the toolsets that it knows."""

    def __init__(self, wrapped: AbstractToolset[Any], call: Callable[[ToolsetCallToolParams], Awaitable[Any]]) -> None:
        super().__init__(wrapped)
        self._call = call

    @property
    def _explicit_id(self) -> str | None:
        return self.wrapped._explicit_id  # noqa: SLF001 (as pydantic-ai's own wrappers)

    def visit_and_replace(
        self,
        visitor: Callable[[AbstractToolset[Any]], AbstractToolset[Any]],  # noqa: ARG002 (it stays as it is)
    ) -> AbstractToolset[Any]:
        return self

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        return await self._call(ToolsetCallToolParams(name, tool_args=tool_args, ctx=ctx, tool=tool))


class _CallIdentity(NoCacheIdentity[ToolsetCallToolParams]):
    def project(self, params: ToolsetCallToolParams) -> Any:
        return params.name, params.tool_args, params.ctx, params.tool


async def _answered(called: Awaitable[Any]) -> Any:
    """The result of a call. pydantic-ai reports the loss of an MCP server during a call like an error of the tool.

    Raises:
        OutcomeUnknown: the server is lost, or did not answer in time.
    """
    try:
        return await called
    except Exception as error:
        if _is_lost(error):
            raise OutcomeUnknown("The MCP server did not answer.") from error
        raise


def _is_lost(error: BaseException | None) -> bool:
    """Whether an MCP server caused `error` by not answering."""
    if "mcp" not in sys.modules:
        return False
    from mcp import MCPError  # noqa: PLC0415 (it is imported already, which takes a second)

    from perdure.tools.mcp.faults import UNANSWERED  # noqa: PLC0415 (the same)

    while error is not None:
        if isinstance(error, MCPError) and error.code in UNANSWERED:
            return True
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    return False


async def _report_text(_: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
    run = current.get()
    async for event in events:
        if run is None:
            continue
        if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
            run.delta(event.part.content)
        elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
            run.delta(event.delta.content_delta)
