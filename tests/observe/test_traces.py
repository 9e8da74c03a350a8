"""Traces of turns: made from the committed rows when a turn is settled, with ids that follow from those of the rows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import StatusCode
from starlette.testclient import TestClient

from perdure import Agent, ToolContext, agent_tool, celery_tool, tool
from perdure.agents import Agents
from perdure.channels.http.app import create_app
from perdure.errors import SettingsError
from perdure.observe import otel
from perdure.observe.otel import OtelTraces
from perdure.observe.traces import OFF, configured
from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The span of a client."""


class Kept(SpanExporter):
    """Keeps the exported spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is left."""


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture(autouse=True)
def no_global_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a provider of its own; the global one can be set only once in a process."""
    monkeypatch.setattr(trace, "set_tracer_provider", lambda _: None)


@pytest.fixture
def traces(harness: Harness, kept: Kept) -> Iterator[OtelTraces]:
    """The traces of the harness. `close` exports what is left."""
    harness.traces = made = OtelTraces(harness.database, kept)
    yield made
    made.close()


def _spans(traces: OtelTraces, kept: Kept) -> dict[str, ReadableSpan]:
    """The exported spans by name; those of steps with their number."""
    traces.close()
    found = {}
    for each in kept.spans:
        step = (each.attributes or {}).get("perdure.step", (each.attributes or {}).get("perdure.attempt"))
        name = each.name if step is None else f"{each.name} {step}"
        assert name not in found, f"{name} is exported twice"
        found[name] = each
    return found


def _parents(spans: dict[str, ReadableSpan]) -> dict[str, str | None]:
    names = {each.context.span_id: name for name, each in spans.items()}
    return {name: names.get(each.parent.span_id, "?") if each.parent else None for name, each in spans.items()}


def _attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@tool(effect="pure")
def price(article: str) -> str:
    """Look up a price."""
    return f"{article} costs 3 euros"


def _ask(harness: Harness, **given: Any) -> dict[str, Any]:
    harness.equip(price)
    harness.script(calls(("price", {"article": "ink"})), says("Three euros."))
    return harness.ask("What is ink?", **given)


WHOLE = "invoke_agent assistant"


def test_a_turn_is_one_trace(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """From the accept to the reply. The trace has the turn's id. No text is exported."""
    turn = _ask(harness)
    spans = _spans(traces, kept)
    assert _parents(spans) == {
        "accept": None,
        "queue": "accept",
        WHOLE: "accept",
        "chat offline 1": WHOLE,
        "execute_tool price": WHOLE,
        "chat offline 2": WHOLE,
    }
    assert {each.context.trace_id for each in kept.spans} == {UUID(turn["turn_id"]).int}
    whole, first, called = (_attributes(spans[name]) for name in (WHOLE, "chat offline 1", "execute_tool price"))
    assert (whole["perdure.status"], whole["gen_ai.conversation.id"]) == ("done", turn["session_id"])
    assert (whole["gen_ai.usage.input_tokens"], whole["gen_ai.usage.output_tokens"]) == (20, 7)
    assert (first["gen_ai.response.model"], first["gen_ai.usage.output_tokens"]) == ("scripted", 5)
    assert (called["gen_ai.tool.name"], called["perdure.effect"], called["perdure.status"]) == ("price", "pure", "done")
    exported = str([_attributes(each) for each in kept.spans])
    assert not re.search("ink|euros", exported)


def test_the_times_are_those_of_the_commits(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """Each span of a step begins where the one before it ends, within the turn."""
    turn = _ask(harness)
    spans = _spans(traces, kept)
    row = harness.sql("SELECT * FROM turns WHERE turn_id = %(id)s", id=turn["turn_id"])[0]
    began, ended = otel._ns(row.started_at), otel._ns(row.settled_at)
    assert (spans["queue"].start_time, spans["queue"].end_time) == (otel._ns(row.accepted_at), began)
    assert (spans[WHOLE].start_time, spans[WHOLE].end_time) == (began, ended)
    steps = [spans[name] for name in ("chat offline 1", "execute_tool price", "chat offline 2")]
    times = [time for each in steps for time in (each.start_time or 0, each.end_time or 0)]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (began, ended)


def test_texts_are_exported_if_they_are_asked_for(harness: Harness, kept: Kept) -> None:
    harness.traces = traces = OtelTraces(harness.database, kept, texts=True)
    _ask(harness)
    spans = _spans(traces, kept)
    last = _attributes(spans["chat offline 2"])
    told = json.loads(last["gen_ai.input.messages"])
    assert [each["role"] for each in told] == ["user", "assistant", "tool"]
    assert told[0]["parts"] == [{"type": "text", "content": "What is ink?"}]
    assert told[2]["parts"][0]["response"] == "ink costs 3 euros"
    assert json.loads(last["gen_ai.output.messages"])[0]["parts"][0]["content"] == "Three euros."
    assert _attributes(spans["execute_tool price"])["gen_ai.tool.call.result"] == "ink costs 3 euros"


def test_a_trace_of_the_client_goes_on(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """The client's header is the parent, as the gateway and `turns.submit` pass it; the turn's row has the accept's."""
    with traces.joined({"traceparent": ABOVE}):
        turn = _ask(harness)
    spans = _spans(traces, kept)
    assert {f"{each.context.trace_id:032x}" for each in kept.spans} == {ABOVE.split("-")[1]}
    accepted = spans["accept"]
    assert accepted.parent is not None
    assert f"{accepted.parent.span_id:016x}" == ABOVE.split("-")[2]
    stored = harness.sql("SELECT traceparent FROM turns WHERE turn_id = %(id)s", id=turn["turn_id"])[0].traceparent
    assert stored.split("-")[2] == f"{accepted.context.span_id:016x}"


def test_the_callers_decision_not_to_sample_is_kept(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    with traces.joined({"traceparent": f"{ABOVE[:-2]}00"}):
        _ask(harness)
    assert _spans(traces, kept) == {}


def test_a_step_that_is_resumed_is_exported_once(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """A worker dies after a committed step, and one before its commit. Another worker settles the turn."""
    harness.equip(price)
    harness.script(calls(("price", {"article": "ink"})), says("lost"), says("Three euros."))
    accepted = harness.send()
    with harness.crashing("before", "turns.settle"):
        harness.run(accepted.session_id)
    harness.move(60)
    harness.run(accepted.session_id)
    spans = _spans(traces, kept)
    assert sorted(spans) == sorted(["accept", "queue", WHOLE, "chat offline 1", "execute_tool price", "chat offline 2"])
    assert _attributes(spans[WHOLE])["perdure.attempts"] == 2


def test_what_a_tool_traces_itself_is_within_its_call(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """A tool's own spans, and the headers of its requests, belong to the call's span."""
    headers = {}

    @tool(effect="pure")
    def look_up(context: ToolContext) -> str:
        """Look up."""
        with traces._tracer.start_as_current_span("own"):
            headers.update(traces.headers())
        return str(context.effect_id)

    harness.equip(look_up)
    harness.script(calls(("look_up", {})), says("Found."))
    harness.ask()
    spans = _spans(traces, kept)
    assert _parents(spans)["own"] == "execute_tool look_up"
    assert headers["traceparent"].split("-")[2] == f"{spans['own'].context.span_id:016x}"


def test_a_request_to_the_gateway_continues_the_clients_trace(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """The gateway accepts in a thread, which has the request's span."""
    with TestClient(create_app(harness.runtime, lambda: True), base_url="http://127.0.0.1:8080") as client:
        sent = client.post("/v1/messages", json={"user_id": "ana", "text": "hello"}, headers={"traceparent": ABOVE})
    assert sent.status_code == 202, sent.text
    harness.run(UUID(sent.json()["session_id"]))
    spans = _spans(traces, kept)
    assert {f"{each.context.trace_id:032x}" for each in kept.spans} == {ABOVE.split("-")[1]}
    assert _parents(spans)[WHOLE] == "accept"


def test_the_gateway_exports_no_spans_of_requests(
    harness: Harness, traces: OtelTraces, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI traces requests by itself once there is a global provider, with paths and queries, so with users' ids."""
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces._provider)
    with TestClient(create_app(harness.runtime, lambda: True), base_url="http://127.0.0.1:8080") as client:
        sent = client.post("/v1/messages", json={"user_id": "ana", "text": "hello"}).json()
        assert client.get("/v1/sessions", params={"user_id": "ana"}).status_code == 200
        assert client.get("/v1/users/ana/export").status_code == 200
    harness.run(UUID(sent["session_id"]))
    assert set(_spans(traces, kept)) == {"accept", "queue", WHOLE, "chat offline 1"}
    assert {each.context.trace_id for each in kept.spans} == {UUID(sent["turn_id"]).int}


def test_a_celery_tools_task_has_the_span_of_its_call(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """In a header of its message, where Celery's instrumentation looks for it."""
    harness.calls = broker = Broker()
    harness.equip(celery_tool("reports.make", name="report", timeout_s=60))
    harness.script(calls(("report", {})))
    turn = harness.ask()
    [sent] = broker.sent
    trace_id, span_id = UUID(turn["turn_id"]).hex, sent.effect_id.hex[16:]
    assert sent.headers["traceparent"].rpartition("-")[0] == f"00-{trace_id}-{span_id}"
    assert set(_spans(traces, kept)) == {"accept"}, "the turn is not settled"


@pytest.mark.parametrize("accept_is_traced", [True, False])
def test_an_agent_that_is_asked_is_in_the_callers_trace(
    harness: Harness, traces: OtelTraces, kept: Kept, *, accept_is_traced: bool
) -> None:
    """Its turn is below the call, whose span is exported by another process and later. Both have the same id."""
    harness.calls = Broker()
    research = agent_tool(Agent("searcher", "You search."), name="research", timeout_s=600)
    harness.agents = Agents([Agent("writer", "You write.", [research])])
    harness.script(calls(("research", {"task": "When?"})), says("753 BC."), says("It is old."))
    harness.traces = traces if accept_is_traced else OFF
    sent = harness.send()
    harness.traces = traces
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    harness.run(UUID(turn["children"][0]["turn_id"]))  # also its session's id
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"
    traces.close()
    names = {each.context.span_id: each.name for each in kept.spans}
    assert len(names) == len(kept.spans), "spans share an id"
    assert {each.context.trace_id for each in kept.spans} == {UUID(turn["turn_id"]).int}
    above = {each.name: names[each.parent.span_id] for each in kept.spans if each.parent is not None}
    assert above["invoke_agent searcher"] == "execute_tool research"
    assert above["execute_tool research"] == "invoke_agent writer"


def test_a_failed_turn_and_a_failed_call_are_errors(harness: Harness, traces: OtelTraces, kept: Kept) -> None:
    """With the turn's error code; the message may quote a user, and is not exported."""

    @tool(effect="pure")
    def broken() -> str:
        """Fail."""
        raise RuntimeError("secret")

    harness.equip(broken, max_steps=1)
    harness.script(calls(("broken", {})))
    assert harness.ask()["status"] == "failed"
    spans = _spans(traces, kept)
    assert {name for name, each in spans.items() if each.status.status_code is StatusCode.ERROR} == {
        WHOLE,
        "execute_tool broken",
    }
    assert _attributes(spans[WHOLE])["error.type"] == "BUDGET_EXHAUSTED"
    assert "secret" not in str([each.to_json() for each in kept.spans])


def test_a_turn_whose_accept_was_not_traced_has_a_trace_of_its_own(
    harness: Harness, traces: OtelTraces, kept: Kept
) -> None:
    """For example one from `perdure send`. The turn's id is the trace's id."""
    harness.traces = OFF
    accepted = harness.send()
    harness.traces = traces
    harness.run(accepted.session_id)
    spans = _spans(traces, kept)
    assert _parents(spans) == {WHOLE: None, "queue": WHOLE, "chat offline 1": WHOLE}
    assert spans[WHOLE].context.trace_id == accepted.turn_id.int


def test_an_error_of_the_database_costs_the_trace_only(
    harness: Harness, traces: OtelTraces, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    def fail(_: UUID) -> None:
        done.set()
        raise RuntimeError("no rows")

    monkeypatch.setattr(traces, "_export", fail)
    assert _ask(harness)["status"] == "done"
    assert done.wait(10)
    assert set(_spans(traces, kept)) == {"accept"}


NAMES = {
    name: getattr(otel, name) for name in dir(otel) if name.isupper() and str(getattr(otel, name)).startswith("gen_ai.")
}


def test_the_attributes_are_those_of_the_pinned_convention() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert len(NAMES) > 15
    assert set(NAMES.values()) <= known


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_traces_are_off_unless_configured(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_on: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = configured(harness.database)
    assert made.is_on is is_on
    made.close()


def test_a_protocol_that_is_not_spoken_stops_the_process(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; accepted: http/protobuf"):
        configured(harness.database)
