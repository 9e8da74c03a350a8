"""What a worker counts and times, and that a child's measurements are its worker's, too."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure import tool
from perdure.errors import ProviderError
from perdure.models.offline import OfflineModel
from perdure.models.protocol import CallAborted, ModelCall, ModelReply, ModelRequest, Usage
from perdure.models.resilient import ObservedModel
from perdure.observe.measures import Measures
from perdure.settings import Settings
from perdure.turns.lease.claim import Ran, claim
from perdure.turns.run.loop import Runner
from tests.turns.harness import Harness
from tests.turns.scripted import calls

_COUNTED = {
    "perdure_turns_settled_total",
    "perdure_model_calls_total",
    "perdure_tokens_total",
    "perdure_duty_runs_total",
}


@tool
def look() -> str:
    """Look."""
    return "seen"


def _read(measures: Measures) -> dict[tuple[str, ...], float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = measures.serve("127.0.0.1", port, "1", {})
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    finally:
        server.close()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_turn_is_timed_in_its_stages_and_counted_with_its_outcome(harness: Harness) -> None:
    """The stages of two turns are timed. A failed turn has its code, and a turn's wait before its claim counts once."""
    harness.equip(look)
    harness.script(calls(("look", {})))
    runtime = harness.runtime
    runner = Runner(runtime, "host:1")
    session_id = harness.send().session_id
    harness.move(7)
    assert runner.run(session_id) == Ran(1)
    harness.script(ProviderError("down", transient=False))
    failed = runner.run(harness.send().session_id)
    assert isinstance(failed, Ran)
    assert failed.outcomes == ("failed PROVIDER_ERROR",)
    found = _read(runtime.measures)

    assert found["perdure_stage_seconds_count", "claim"] == 2
    assert found["perdure_stage_seconds_sum", "claim"] == pytest.approx(7, abs=2)
    assert found["perdure_stage_seconds_count", "tools"] == 1
    assert found["perdure_stage_seconds_count", "settle"] == 2
    assert found["perdure_turns_settled_total", "assistant", "", "done"] == 1
    assert found["perdure_turns_settled_total", "assistant", "PROVIDER_ERROR", "failed"] == 1
    assert found["perdure_leases_taken_over_total",] == found["perdure_steps_repeated_total",] == 0


def test_a_lease_that_is_taken_over_repeats_a_step(harness: Harness) -> None:
    """After a worker died in a step, the next claim counts a take-over and a repeated step."""
    session_id = harness.send().session_id
    claim(harness.runtime, session_id, "dead:1")
    harness.move(100)
    runtime = harness.runtime
    assert Runner(runtime, "host:1").run(session_id) == Ran(1)
    found = _read(runtime.measures)

    assert found["perdure_leases_taken_over_total",] == found["perdure_steps_repeated_total",] == 1


def test_tokens_and_money_are_counted_by_model(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's tokens count by kind, and its price if it is known."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    measures, settings = Measures(), Settings(_env_file=None)
    measures.model_called("openai:gpt-5-mini", 1.5, Usage(1_000_000, 1_000_000), None, settings)
    measures.model_called("own:model", 1, None, ProviderError("down"), settings)
    found = _read(measures)

    assert found["perdure_tokens_total", "input", "openai:gpt-5-mini"] == 1_000_000
    assert found["perdure_cost_dollars_total", "openai:gpt-5-mini"] == pytest.approx(2.25)
    assert found["perdure_model_calls_total", "own:model", "PROVIDER_ERROR"] == 1
    assert ("perdure_cost_dollars_total", "own:model") not in found


class Fails:
    """A model that raises `error`."""

    name = "fails"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        raise self.error


def test_each_call_of_a_model_is_observed(harness: Harness) -> None:
    """The observer is shown the model's configured name, and the error of a call that failed."""
    shown: list[tuple[Any, ...]] = []

    def observe(model: str, seconds: float, usage: Usage | None, error: BaseException | None) -> None:
        shown.append((model, seconds >= 0, usage is not None, error))

    model = ObservedModel(OfflineModel(), "named", harness.clock, observe)
    model.respond(ModelRequest((), ()), ModelCall(harness.clock, 1))
    error = ProviderError("down")
    with pytest.raises(ProviderError):
        ObservedModel(Fails(error), "other", harness.clock, observe).respond(
            ModelRequest((), ()), ModelCall(harness.clock, 1)
        )

    assert [(name, timed, failure) for name, timed, _, failure in shown] == [
        ("named", True, None), ("other", True, error),
    ]  # fmt: skip


def test_series_of_known_names_begin_at_zero() -> None:
    """Prometheus sees no increase in a series that is born with its first failure. An aborted call is no error."""
    measures = Measures()
    measures.expect({"assistant"}, {"offline"}, {"files"})
    before = _read(measures)
    measures.settled("assistant", "failed", "PROVIDER_ERROR")
    measures.settled("assistant", "cancelled", "TURN_CANCELLED")
    measures.model_called("offline", 1, None, CallAborted("the turn is cancelled"), Settings(_env_file=None))
    measures.duty("files", "failed")
    after = _read(measures)
    grown = {name: after[name] - before.get(name, -1) for name in after if name[0] in _COUNTED}
    assert {name: rise for name, rise in grown.items() if rise} == {
        ("perdure_turns_settled_total", "assistant", "PROVIDER_ERROR", "failed"): 1,
        ("perdure_turns_settled_total", "assistant", "TURN_CANCELLED", "cancelled"): 1,
        ("perdure_model_calls_total", "offline", "aborted"): 1,
        ("perdure_duty_runs_total", "files", "failed"): 1,
    }


@pytest.mark.long
def test_a_childs_measurements_are_added_to_its_workers() -> None:
    """The journal of a child repeats each of its measurements in the worker."""
    journal: list[Any] = []
    child, worker = Measures(journal), Measures()
    child.stage("model", 3)
    child.settled("assistant", "done", None)
    child.model_called("offline", 1, Usage(10, 2), None, Settings(_env_file=None))
    child.lease_taken_over()
    child.step_repeated()
    child.left("approval")
    worker.add(journal)
    own, added = _read(child), _read(worker)

    counted = {name for name in own if name[0].startswith("perdure_") and not name[0].endswith("_created")}
    assert {name: own[name] for name in counted} == {name: added[name] for name in counted}
    assert own["perdure_stage_seconds_sum", "model"] == 4


def test_workers_of_one_machine_share_the_range_of_ports() -> None:
    """A worker whose port is taken by another worker listens on the next one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = Measures().serve("127.0.0.1", port, "1", {})
    second = Measures().serve("127.0.0.1", port, "1", {})
    first.close()
    second.close()

    assert first.port == port
    assert port < second.port < port + 10
