"""Exports the traces of turns with OpenTelemetry's SDK. Imported only if the environment asks for traces.

A thread reads the rows of each settled turn, and makes its spans with the times of the rows. So the thread of the turn
waits for nothing, and a turn costs three statements more, after it is settled. If the queue of turns is full, or the
database is unavailable, the turn is not traced. A worker that is killed between the commit that settles a turn and the
export loses the turn's spans; none is ever exported twice.

The names of the attributes are those of the GenAI semantic conventions as of `opentelemetry-semantic-conventions`
0.66b2, copied here because they change between its releases.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from typing import Any
from uuid import UUID

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from sqlalchemy import Row

from perdure.database.engine import Database
from perdure.errors import SettingsError, loggable
from perdure.observe import trace_queries as queries
from perdure.observe.traces import DELIVERED, NOT_DUE, Attempt, Traces

log = logging.getLogger(__name__)

_TEXTS = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"

_MOST_WAITING = 10_000
_CLOSE_S = 5.0

OPERATION = "gen_ai.operation.name"
AGENT = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"

_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTraces(Traces):
    """Exports with `exporter`. `texts`: whether messages, arguments and results are exported, too."""

    is_on = True

    def __init__(self, database: Database, exporter: SpanExporter, *, texts: bool = False) -> None:
        self._database = database
        self._texts = texts
        self._ids = _Ids()
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "perdure"}
        resource = Resource.create({**named, "service.version": version("perdure")})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._provider)  # for what the author's tools trace themselves
        self._tracer = self._provider.get_tracer("perdure", version("perdure"))
        self._waiting: queue.Queue[UUID | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="perdure-traces", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, database: Database) -> OtelTraces:
        """Exports to the receiver that the environment names.

        Raises:
            SettingsError: with another protocol than OTLP over HTTP.
        """
        for name in _PROTOCOLS:
            if os.environ.get(name, _SPOKEN) not in {_SPOKEN, ""}:
                raise SettingsError(f"{name} is {os.environ[name]!r}; accepted: {_SPOKEN}")
        texts = os.environ.get(_TEXTS, "").strip().lower() in {"true", "1", "span_only", "span_and_event"}
        return cls(database, OTLPSpanExporter(), texts=texts)

    @contextmanager
    def accepting(self, turn_id: UUID) -> Iterator[str | None]:
        """Trace the accept. Its trace is that of the current span, or a new one with the turn's id."""
        with self._ids.given(_span_id(turn_id, "accept"), turn_id.int):
            span = self._tracer.start_span(
                "accept", kind=SpanKind.PRODUCER, attributes={"perdure.turn_id": str(turn_id)}
            )
        with _current(span):
            try:
                yield _traceparent(span.get_span_context())
            except Exception as error:
                _fail(span, type(error).__name__)
                raise
            finally:
                span.end()

    @contextmanager
    def calling(
        self, turn_id: UUID, traceparent: str | None, *, step: int | None = None, effect_id: UUID | None = None
    ) -> Iterator[None]:
        """See `Traces.calling`."""
        span_id = _chat_span_id(turn_id, step or 0) if effect_id is None else _call_span_id(effect_id)
        parent = _parent(turn_id, traceparent)
        with _current(
            NonRecordingSpan(SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=parent.trace_flags))
        ):
            yield

    def settled(self, turn_id: UUID) -> None:
        """See `Traces.settled`."""
        try:
            self._waiting.put_nowait(turn_id)
        except queue.Full:
            log.warning("turn %s is not traced: %d turns wait for that", turn_id, _MOST_WAITING)

    @contextmanager
    def delivering(self, delivery_id: UUID) -> Iterator[Attempt]:
        """Trace an attempt. The span ends with the block, and the block's span is the current one."""
        rows = self._database.run(queries.DELIVERY, {"delivery_id": delivery_id})
        if not rows:
            with super().delivering(delivery_id) as attempt:
                yield attempt
            return
        row = rows[0]
        parent = NonRecordingSpan(_parent(row.turn_id, row.traceparent))
        named = {"perdure.turn_id": str(row.turn_id), "perdure.delivery_id": str(delivery_id)}
        with self._ids.given(_span_id(delivery_id, f"attempt {row.attempts + 1}"), row.turn_id.int):
            span = self._tracer.start_span(
                "deliver", trace.set_span_in_context(parent), SpanKind.PRODUCER,
                {**named, "perdure.attempt": row.attempts + 1},
            )  # fmt: skip
        with _current(span):
            attempt = _Attempt()
            yield attempt
        if attempt.outcome == NOT_DUE:
            return  # the span does not end, and is not exported
        if attempt.outcome != DELIVERED:
            _fail(span, attempt.outcome)
        span.end()

    def headers(self) -> dict[str, str]:
        """See `Traces.headers`."""
        found: dict[str, str] = {}
        _PROPAGATOR.inject(found)
        return found

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        """See `Traces.joined`."""
        if trace.get_current_span().get_span_context().is_valid:
            yield
            return
        token = contexts.attach(_PROPAGATOR.extract(headers))
        try:
            yield
        finally:
            contexts.detach(token)

    def close(self) -> None:
        """See `Traces.close`."""
        try:
            self._waiting.put(None, timeout=_CLOSE_S)
        except queue.Full:
            log.warning("%d settled turns are not traced", self._waiting.qsize())
        self._thread.join(_CLOSE_S)
        closing = threading.Thread(target=self._provider.shutdown, name="perdure-traces-end", daemon=True)
        closing.start()  # the exporter's own limits are longer
        closing.join(_CLOSE_S)

    def _run(self) -> None:
        while (turn_id := self._waiting.get()) is not None:
            try:
                self._export(turn_id)
            except Exception as error:  # noqa: BLE001 (the turn is answered; only its trace is missing)
                log.warning("turn %s is not traced: %s", turn_id, loggable(error))

    def _export(self, turn_id: UUID) -> None:
        """Make the spans of a settled turn from its rows."""
        rows = self._database.run(queries.TURN, {"turn_id": turn_id})
        if not rows or rows[0].started_at is None:
            return  # erased, or cancelled before it began
        turn = rows[0]
        given = {
            "turn_id": turn_id,
            "session_id": turn.session_id,
            "first_seq": turn.first_seq or 0,
            "texts": self._texts,
        }
        messages = self._database.run(queries.MESSAGES, given)
        effects = self._database.run(queries.EFFECTS, given)
        parent = _parent(turn_id, turn.traceparent)
        whole = self._invoke_agent(turn_id, turn, parent)
        within = trace.set_span_in_context(whole)
        above = within if turn.traceparent is None else trace.set_span_in_context(NonRecordingSpan(parent))
        with self._ids.given(_span_id(turn_id, "queue"), parent.trace_id):
            waited = self._tracer.start_span("queue", above, SpanKind.CONSUMER, start_time=_ns(turn.accepted_at))
        waited.end(_ns(turn.started_at))
        self._chats(turn_id, turn, messages, within)
        for effect in effects:
            self._execute_tool(effect, turn, messages, within)
        whole.end(_ns(turn.settled_at))

    def _invoke_agent(self, turn_id: UUID, turn: Row[Any], parent: SpanContext) -> Span:
        usage = turn.usage or {}
        attributes = {
            OPERATION: "invoke_agent",
            AGENT: turn.agent,
            CONVERSATION: str(turn.session_id),
            INPUT_TOKENS: usage.get("input_tokens"),
            OUTPUT_TOKENS: usage.get("output_tokens"),
            "perdure.turn_id": str(turn_id),
            "perdure.channel": turn.channel,
            "perdure.status": turn.status,
            "perdure.attempts": turn.attempts,
            "perdure.steps": turn.steps,
        }
        above = contexts.Context() if turn.traceparent is None else trace.set_span_in_context(NonRecordingSpan(parent))
        with self._ids.given(_turn_span_id(turn_id), parent.trace_id):
            span = self._tracer.start_span(
                f"invoke_agent {turn.agent}",
                above,
                SpanKind.INTERNAL,
                _set(attributes),
                start_time=_ns(turn.started_at),
            )
        if turn.error_code is not None:
            _fail(span, turn.error_code)
        return span

    def _chats(self, turn_id: UUID, turn: Row[Any], messages: Sequence[Row[Any]], within: contexts.Context) -> None:
        """A span for each reply of a model. It begins at the commit before it."""
        before, step, asked = turn.started_at, 0, None
        for at, message in enumerate(messages):
            asked = message.asked or asked
            if message.role == "assistant" and message.model is not None:
                step += 1
                provider, _, model = (asked or message.model).rpartition(":")
                usage = message.usage or {}
                attributes = {
                    OPERATION: "chat",
                    PROVIDER: provider.partition(":")[0] or "perdure",
                    REQUEST_MODEL: model,
                    RESPONSE_MODEL: message.model,
                    FINISH_REASONS: [message.stop_reason] if message.stop_reason else None,
                    INPUT_TOKENS: usage.get("input_tokens"),
                    OUTPUT_TOKENS: usage.get("output_tokens"),
                    CACHE_READ_TOKENS: usage.get("cached_tokens"),
                    CONVERSATION: str(turn.session_id),
                    "perdure.step": step,
                    "perdure.fallback": message.fallback,
                }
                if self._texts:
                    attributes[INPUT_MESSAGES] = json.dumps([_told(each) for each in messages[:at]], ensure_ascii=False)
                    attributes[OUTPUT_MESSAGES] = json.dumps([_told(message)], ensure_ascii=False)
                with self._ids.given(_chat_span_id(turn_id, step), turn_id.int):
                    span = self._tracer.start_span(
                        f"chat {model}", within, SpanKind.CLIENT, _set(attributes), start_time=_ns(before)
                    )
                span.end(_ns(max(before, message.created_at)))
            if message.role != "user":
                before = max(before, message.created_at)

    def _execute_tool(
        self, effect: Row[Any], turn: Row[Any], messages: Sequence[Row[Any]], within: contexts.Context
    ) -> None:
        later = [each for each in messages if each.seq > effect.message_seq]
        ended = effect.finished_at or (later[0].created_at if later else turn.settled_at)
        result = next((each for each in later[effect.position : effect.position + 1] if each.role == "tool"), None)
        attributes = {
            OPERATION: "execute_tool",
            TOOL_NAME: effect.tool,
            TOOL_TYPE: "function",
            TOOL_CALL_ID: str(effect.effect_id),
            TOOL_ARGUMENTS: effect.arguments,
            TOOL_RESULT: None if result is None else result.content,
            "perdure.effect": effect.effect,
            "perdure.status": effect.status,
            "perdure.waits_for": effect.waits_for,
        }
        with self._ids.given(_call_span_id(effect.effect_id), effect.effect_id.int):
            span = self._tracer.start_span(
                f"execute_tool {effect.tool}", within, SpanKind.INTERNAL, _set(attributes),
                start_time=_ns(effect.intended_at),
            )  # fmt: skip
        if effect.status in {"failed", "unknown"}:
            _fail(span, effect.status)
        span.end(_ns(max(effect.intended_at, ended)))


class _Attempt:
    outcome = DELIVERED

    def ended(self, outcome: str) -> None:
        """See `Attempt.ended`."""
        self.outcome = outcome


class _Ids(RandomIdGenerator):
    """Random ids, or those that this thread gives."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @contextmanager
    def given(self, span_id: int, trace_id: int) -> Iterator[None]:
        """The ids of the spans that the block starts. A span with a parent has the parent's trace."""
        self._of_thread.ids = span_id, trace_id
        try:
            yield
        finally:
            self._of_thread.ids = None

    def generate_span_id(self) -> int:
        """See `IdGenerator`."""
        ids: tuple[int, int] | None = getattr(self._of_thread, "ids", None)
        return super().generate_span_id() if ids is None else ids[0]

    def generate_trace_id(self) -> int:
        """See `IdGenerator`."""
        ids: tuple[int, int] | None = getattr(self._of_thread, "ids", None)
        return super().generate_trace_id() if ids is None else ids[1]


@contextmanager
def _current(span: Span) -> Iterator[None]:
    token = contexts.attach(trace.set_span_in_context(span))
    try:
        yield
    finally:
        contexts.detach(token)


def _parent(turn_id: UUID, traceparent: str | None) -> SpanContext:
    """The span above those of a turn. Without one, the trace has the turn's id, and the turn's span is its root."""
    if traceparent is not None:
        found = trace.get_current_span(_PROPAGATOR.extract({"traceparent": traceparent})).get_span_context()
        if found.is_valid:
            return found
    return SpanContext(turn_id.int, _turn_span_id(turn_id), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _call_span_id(effect_id: UUID) -> int:
    """The span of a call: the last 8 bytes of its id, which are random. SQL computes the same."""
    return int.from_bytes(effect_id.bytes[8:])


def _turn_span_id(turn_id: UUID) -> int:
    """The span of a turn. Another agent's turn has the id of the call that it answers, which has a span of its own."""
    return _span_id(turn_id, "invoke_agent")


def _chat_span_id(turn_id: UUID, step: int) -> int:
    return _span_id(turn_id, f"chat {step}")


def _span_id(identifier: UUID, what: str) -> int:
    digest = hashlib.blake2b(what.encode(), key=identifier.bytes, digest_size=8).digest()
    return int.from_bytes(digest) or 1


def _traceparent(span: SpanContext) -> str | None:
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


def _fail(span: Span, kind: str) -> None:
    span.set_status(StatusCode.ERROR)
    span.set_attribute(ERROR_TYPE, kind)


def _set(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(at: datetime) -> int:
    return int(at.timestamp() * 1_000_000) * 1_000


def _told(message: Row[Any]) -> dict[str, Any]:
    """A message in the form of the conventions."""
    parts: list[dict[str, Any]] = []
    if message.role == "tool":
        return {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}],
        }
    if message.content:
        parts.append({"type": "text", "content": message.content})
    parts += [
        {"type": "tool_call", "id": each.get("id"), "name": each["name"], "arguments": each["arguments"]}
        for each in message.tool_calls or ()
    ]
    told = {"role": message.role, "parts": parts}
    return told if message.role == "user" else {**told, "finish_reason": message.stop_reason or "stop"}
