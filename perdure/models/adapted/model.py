"""`AdaptedModel`: a model of pydantic-ai as a model of perdure.

A reply is streamed. A stream that ended without a finish is no reply. Thoughts, in parts of their own or in tags, are
no text. The SDKs do not retry, and pydantic-ai sets no limits: `GuardedModel` and the call's deadline do that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import httpx2
from pydantic_ai.messages import (
    FilePart,
    ModelResponse,
    ModelResponsePart,
    ModelResponsePartDelta,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import Model as PydanticModel
from pydantic_ai.models import ModelRequestParameters, StreamedResponse
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RequestUsage

from perdure.clock import Clock
from perdure.errors import InvalidResponse
from perdure.models import endings, output_tool
from perdure.models.adapted import errors, event_loop, http
from perdure.models.adapted.messages import Sender, arguments_of, calls_in, finish_reason, prompt, text_of, usage_of
from perdure.models.adapted.repairs import Repairs
from perdure.models.adapted.vendors import Vendor, vendor
from perdure.models.endpoints import Refused
from perdure.models.families import family
from perdure.models.protocol import ForeignModel, ModelCall, ModelReply, ModelRequest, Usage, name_of
from perdure.models.providers.chat_wire import MAX_DESCRIPTION
from perdure.models.providers.endpoint import Endpoint, kinds_of, known, media_types, remember
from perdure.models.providers.errors import Exchange
from perdure.models.providers.reply import MAX_REPLY_CHARS, ReplyDraft
from perdure.models.providers.wire_names import WireNames
from perdure.models.schemas import offerable
from perdure.models.thoughts import ThoughtTags
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

_NOT_KEPT = "it was not stored: only an agent of pydantic-ai keeps the files that its model makes"

DEFAULT_READS = ("images", "pdf")
"""The kinds of files that models are sent, unless they have refused some."""

_OPENING = "<think>"


def adapted_model(
    name: str,
    clock: Clock,
    variable: str,
    endpoint: Endpoint | None = None,
    kind: str | None = None,
    *,
    refused: Refused | None = None,
) -> AdaptedModel:
    """The model called `name`, such as `google:gemini-3-pro`.

    `kind` is the provider as pydantic-ai names it, by default the part of `name` before the colon. `endpoint` is the
    provider's server if it is not the vendor's own. `variable` is the setting that selects the model. `refused` is
    shared with the server's other models.

    Raises:
        MissingKey: the vendor's key is not set.
        SettingsError: there is no such provider, its SDK is missing, or it cannot be set up.
    """
    scheme, _, model = name.partition(":")
    create = partial(vendor, kind or scheme, model, name, variable, endpoint)
    return AdaptedModel(name, create, clock, endpoint, refused=refused)


def adapt_model(given: ForeignModel, clock: Clock) -> AdaptedModel:
    """A model object of pydantic-ai as a model of perdure, with the object's own client and settings.

    The repairs of `perdure.models.adapted.http` and `repairs` need a client of perdure, and do not apply.
    """
    model = cast("PydanticModel[Any]", given)
    return AdaptedModel(name_of(given), lambda: Vendor(model), clock)


class AdaptedModel:
    """A model of pydantic-ai. Thread-safe."""

    def __init__(
        self,
        name: str,
        create: Callable[[], Vendor],
        clock: Clock,
        endpoint: Endpoint | None = None,
        *,
        refused: Refused | None = None,
    ) -> None:
        """`create` is called here, and again after a fork, because a client belongs to one event loop.

        By default, the model's server is an endpoint without settings.

        Raises:
            SettingsError: `create` raised it.
        """
        self._name = name
        self._create = create
        self._clock = clock
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._vendor = create()
        self._sender = _sender_of(name, self._vendor.model)
        self._endpoint = endpoint or Endpoint(name, self._vendor.model.base_url or "")
        reads = media_types(DEFAULT_READS if self._endpoint.reads is None else self._endpoint.reads)
        self._quirks = replace(self._endpoint.quirks_of(self._sender.family), reads=reads)
        self._refused: Refused = {} if refused is None else refused
        self._close = weakref.finalize(self, self._vendor.close)

    @property
    def name(self) -> str:
        return self._name

    @property
    def reads(self) -> frozenset[str]:
        """The media types of the files that the model reads, as far as is known."""
        return self._quirks.reads

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt, and stream the text to `call`; see `Model.respond`."""
        call.remaining()
        model = self._model_of_process()
        if request.requires_output and (request.tools or not _has_structured_output(model)):
            return output_tool.as_text(request, self.respond(output_tool.with_tool(request), call), call)
        names = WireNames(tool.name for tool in request.tools)
        parameters = _parameters(request, names, model)
        quirks = learned = before = known(self._quirks, self._refused, self._sender.endpoint)
        kinds = kinds_of(file.media_type for each in request.messages for file in each.files)
        is_whole = False
        while True:
            sender = None if quirks.forgets else self._sender
            messages = model.prepare_messages(prompt(request.messages, names, sender, quirks.reads), parameters)
            noted = Exchange(self.name, self._endpoint.may_be_quoted, bool(self._endpoint.show_received))
            exchange = http.HttpExchange(call, noted, Repairs(quirks, self._clock), is_whole)
            stream = model.request_stream(messages, _settings(request, names, model, call), parameters)
            try:
                reply = event_loop.run(partial(self._read, stream, names, exchange), call)
            except Exception as error:
                call.check()  # raises if the engine has ended the call
                is_whole = is_whole or exchange.is_empty  # the server may have failed behind the head of its response
                if exchange.is_empty:
                    continue
                found = errors.adaptation(error, exchange, self._clock, quirks, kinds)
                if found is None:
                    raise errors.mapped(error, exchange, self._clock) from error
                log.warning("%s refused %s, and is asked again without", self.name, found.what)
                quirks, learned = found.quirks, found.quirks if found.lasting else learned
                continue
            if learned is not before:
                self._quirks = learned
                remember(learned, self._refused, self._sender.endpoint)
            noted.log_success()
            return reply

    async def _read(
        self,
        opening: AbstractAsyncContextManager[StreamedResponse],
        names: WireNames,
        exchange: http.HttpExchange,
        waiting: event_loop.WaitingThread,
    ) -> ModelReply:
        http.current.set(exchange)
        reading = _Reading(
            ReplyDraft(names, self._quirks),
            self._sender,
            lambda text: waiting.post(partial(exchange.call.delta, text)),
            ThoughtTags(thinks_first=self._quirks.thinks_first),
        )
        async with opening as stream:
            exchange.has_pieces = lambda: reading.pieces > 0
            exchange.pieces_at_end = lambda: reading.pieces if _has_ended(stream) else None
            async for event in stream:
                if isinstance(event, PartStartEvent):
                    reading.count(stream.usage)
                reading.take(event)
            return reading.finish(stream.get())

    def close(self) -> None:
        """Close the connections to the server. Garbage collection of the model also closes them."""
        self._close()

    def _model_of_process(self) -> PydanticModel:
        loop = event_loop.running()
        with self._lock:
            if self._loop not in (None, loop):
                self._close.detach()  # the connections are the parent's, or closed
                self._vendor = self._create()
                self._close = weakref.finalize(self, self._vendor.close)
            self._loop = loop
            return self._vendor.model


def _has_ended(stream: StreamedResponse) -> bool:
    """Whether the server has named a reason for the end. Some servers write `null` as a string in every chunk."""
    return (stream.provider_details or {}).get("finish_reason") not in {None, "", "null"}


def _sender_of(name: str, made: PydanticModel) -> Sender:
    """The sender has the server's host: the environment may direct one name to different servers."""
    endpoint, _, model = name.partition(":")
    host = httpx2.URL(made.base_url).netloc.decode() if made.base_url else ""
    return Sender(f"{endpoint}@{host}" if host else endpoint, family(model))


def _parameters(request: ModelRequest, names: WireNames, model: PydanticModel) -> ModelRequestParameters:
    longest = MAX_DESCRIPTION if _is(model, "OpenAIChatModel", "OpenAIResponsesModel") else None
    tools = [
        ToolDefinition(
            name=names.to_wire(tool.name),
            parameters_json_schema=dict(tool.parameters),
            description=tool.description,
        )
        for tool in (offerable(each, longest) for each in request.tools)
    ]
    if not tools and _needs_definitions(model):
        tools = [ToolDefinition(name=name) for name in calls_in(request.messages, names)]
    if request.output is None or not _has_structured_output(model):
        return ModelRequestParameters(function_tools=tools)
    output = OutputObjectDefinition(json_schema=dict(request.output), name="answer")
    return ModelRequestParameters(function_tools=tools, output_mode="native", output_object=output)


def _needs_definitions(model: PydanticModel) -> bool:
    """Whether the provider requires definitions of all tools that the conversation calls."""
    return _is(model, "AnthropicModel", "BedrockConverseModel")


def _is(model: PydanticModel, *classes: str) -> bool:
    """Whether the model is of one of these classes of pydantic-ai, whose modules need the SDKs of their vendors."""
    return any(each.__name__ in classes for each in type(model).__mro__)


def _has_structured_output(model: PydanticModel) -> bool:
    try:
        return bool(model.profile.get("supports_json_schema_output", False))
    except NotImplementedError:  # a model that chooses among others
        return False


def _settings(request: ModelRequest, names: WireNames, model: PydanticModel, call: ModelCall) -> ModelSettings:
    """The settings with pydantic-ai's names, without retries, and with the time that `call` has left."""
    given = dict(request.settings)
    if (effort := given.pop("reasoning_effort", None)) is not None:
        given["thinking"] = False if effort == "none" else effort
    if isinstance(choice := given.get("tool_choice"), list | tuple):
        given["tool_choice"] = [names.to_wire(name) for name in choice]
    left = call.remaining()
    own: dict[str, Any] = {"max_retries": 0, "timeout": left, "request_timeout": left}
    if not request.tools and _needs_definitions(model) and any(message.tool_calls for message in request.messages):
        own["tool_choice"] = "none"
    unsupported = type(model).unsupported_settings
    return cast(ModelSettings, {**given, **{name: own[name] for name in own if name not in unsupported}})


class _Reading:
    """Reads one stream: passes its text on, and assembles the reply."""

    def __init__(self, draft: ReplyDraft, sender: Sender, post: Callable[[str], None], tags: ThoughtTags) -> None:
        """`post` is called with each piece of the reply's text. `tags` are for the parts of the whole response."""
        self._draft = draft
        self._sender = sender
        self._post = post
        self._tags = tags
        self._tagged: set[int] = set()
        """The indexes of the thinking parts that pydantic-ai has made of a tag in the text."""
        self._size_of_arguments = 0
        self._begun: Usage | None = None
        self.pieces = 0
        """The number of events so far."""

    def count(self, usage: RequestUsage) -> None:
        """Note the tokens of the prompt, which some servers report at the beginning of a reply, and as 0 at the end."""
        self._begun = self._begun or usage_of(vars(usage))

    def take(self, event: ModelResponseStreamEvent) -> None:
        """Read one event.

        Raises:
            InvalidResponse: the reply is too long.
        """
        self.pieces += 1
        if isinstance(event, PartDeltaEvent):
            self._continue(event.index, event.delta)
        elif isinstance(event, PartStartEvent):
            if self._tagged:
                self._show(self._draft.close_thoughts())
            self._begin(event.index, event.part)

    def _begin(self, index: int, part: ModelResponsePart) -> None:
        if isinstance(part, TextPart):
            self._text(part.content)
        elif isinstance(part, ThinkingPart) and _is_of_a_tag(part):
            self._tagged.add(index)
            self._text(_OPENING)
        elif isinstance(part, ThinkingPart):
            self._draft.add_thoughts(part.content)

    def _continue(self, index: int, delta: ModelResponsePartDelta) -> None:
        if isinstance(delta, TextPartDelta):
            self._text(delta.content_delta)
        elif isinstance(delta, ThinkingPartDelta) and index in self._tagged:
            self._text(delta.content_delta or "")
        elif isinstance(delta, ThinkingPartDelta):
            self._draft.add_thoughts(delta.content_delta or "")
        elif isinstance(delta, ToolCallPartDelta) and isinstance(delta.args_delta, str):
            self._size_of_arguments += len(delta.args_delta)
            if self._size_of_arguments > MAX_REPLY_CHARS:
                raise InvalidResponse(f"The model's reply is longer than {MAX_REPLY_CHARS:,} characters.")

    def finish(self, response: ModelResponse) -> ModelReply:
        """The reply.

        Raises:
            InvalidResponse: the stream ended without a finish.
            PerdureError: see `ReplyDraft.finish`.
        """
        reason = finish_reason(response)
        refusal = (response.provider_details or {}).get("refusal")
        if isinstance(refusal, str) and refusal:
            self._text(refusal)
            reason = endings.REFUSAL
        lines = self._lines_of_files(response)
        self._text(lines)
        calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
        for part in calls:
            self._draft.extend_call(call := self._draft.add_call(), name=part.tool_name, arguments=arguments_of(part))
            call.id = part.tool_call_id
        usage, begun = usage_of(vars(response.usage)), self._begun
        if usage is not None and begun is not None and usage.input_tokens < begun.input_tokens:
            usage = replace(usage, input_tokens=begun.input_tokens, cached_tokens=begun.cached_tokens)
        self._draft.usage = usage
        self._draft.model = response.model_name or ""
        self._draft.end(endings.TOOL_CALLS if calls and reason and endings.is_proper(reason) else reason)
        rest, reply = self._draft.finish()
        self._show(rest)
        parts = self._without_tags(response.parts, is_proper=not calls and endings.is_proper(reason))
        parts += [TextPart(lines)] if lines else []
        kept = replace(response, parts=parts)
        opaque = self._sender.opaque(kept) if text_of(parts) == reply.content else None
        return replace(reply, opaque=opaque)

    @staticmethod
    def _lines_of_files(response: ModelResponse) -> str:
        """What stands at the end of the text for the files that the model made, which are not kept."""
        files = [part.content for part in response.parts if isinstance(part, FilePart)]
        if not files:
            return ""
        log.warning(
            "%s: the files of a reply are left out: an agent of perdure does not keep them", response.model_name
        )
        lines = [
            f"[{'image' if each.is_image else 'file'}: {first_line(each.media_type, 100)}, {len(each.data)} bytes; "
            f"{_NOT_KEPT}]"
            for each in files
        ]
        return "\n".join([*([""] if text_of(response.parts) else []), *lines])

    def _text(self, text: str) -> None:
        self._show(self._draft.add_text(text))

    def _show(self, text: str) -> None:
        if text:
            self._post(text)

    def _without_tags(self, parts: Sequence[ModelResponsePart], *, is_proper: bool) -> list[ModelResponsePart]:
        """The parts of the response, in which thoughts in tags are left out."""
        found: list[ModelResponsePart] = []
        for index, part in enumerate(parts):
            if isinstance(part, TextPart):
                _, text = self._tags.split(part.content)
                found.append(part if text == part.content else replace(part, content=text))
            elif index in self._tagged and isinstance(part, ThinkingPart):
                _, text = self._tags.split(_OPENING + part.content)
                found.append(TextPart(text + self._tags.close()[1]))
            else:
                found.extend([] if isinstance(part, FilePart) else [part])
        if rest := self._tags.finish(is_proper=is_proper)[1]:
            found.append(TextPart(rest))
        return [part for part in found if not (isinstance(part, TextPart) and _is_empty(part))]


def _is_empty(part: TextPart) -> bool:
    return not (part.content or part.id or part.provider_details)


def _is_of_a_tag(part: ThinkingPart) -> bool:
    """Whether pydantic-ai began `part` at a delta that is exactly `<think>`. Vendors' parts have a provider's name."""
    return not part.content and part.signature is None and (part.provider_name is None or part.id == "content")
