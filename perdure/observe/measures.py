"""What a worker counts and times. A port of the worker serves it as metrics (`PERDURE_METRICS__WORKER_PORT`).

    measures = Measures()
    with measures.timed("model", clock):
        reply = model.respond(request, call)
    measures.settled("assistant", "done", None)

A child process that runs a turn alone keeps a `journal` of its measurements, which its worker adds to its own. So what
a child has done counts, unless the child is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from perdure.clock import Clock
from perdure.errors import Abandoned, PerdureError, TurnCancelled
from perdure.models.prices import cost
from perdure.models.protocol import Usage
from perdure.settings import Settings

Stage = Literal["claim", "model", "tools", "settle", "delivery"]
"""What is timed: from accept to claim, a model call, the calls of a reply, the commit that settles a turn, and from the
settled turn to its delivered reply."""

STAGES: tuple[Stage, ...] = ("claim", "model", "tools", "settle", "delivery")

_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 3_600)

REASONS = ("shutdown", "approval", "calls", "model", "unequipped", "failed_attempt", "snapshot")
"""Why a turn is left to a later worker."""

ANSWERED, ABORTED = "answered", "aborted"
"""The outcomes of model calls that are no error. A call is aborted if, for example, its turn is cancelled or parked."""

OTHER = "other"
"""The label of a name that the process does not know."""

PORTS = 10
"""A worker listens on the configured port or, if another worker has it, on one of the next ones: so many in all."""

Entry = tuple[str, list[Any]]
"""A measurement: the name of a method of `Measures`, and its arguments."""


class Measures:
    """The metrics of one process. Thread-safe. `journal`: each measurement is appended to it, too."""

    def __init__(self, journal: list[Entry] | None = None) -> None:
        self._journal = journal
        registry = self._registry = CollectorRegistry()
        stages = Histogram(
            "perdure_stage_seconds", "Seconds of the stages of a turn.", ["stage"], registry=registry, buckets=_BUCKETS
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._settled = Counter(
            "perdure_turns_settled", "Turns that were settled.", ["agent", "status", "error_code"], registry=registry
        )
        self._left = Counter(
            "perdure_turns_left", "Turns that were left to a later worker.", ["reason"], registry=registry
        )
        self._repeated = Counter(
            "perdure_steps_repeated",
            "Steps that began again, because an earlier worker had not committed them.",
            registry=registry,
        )
        self._taken_over = Counter(
            "perdure_leases_taken_over", "Sessions claimed after another worker's lease had expired.", registry=registry
        )
        self._lost = Counter("perdure_leases_lost", "Sessions that another worker claimed.", registry=registry)
        self._tokens = Counter(
            "perdure_tokens", "Tokens of model calls. Input includes cached.", ["model", "kind"], registry=registry
        )
        self._cost = Counter(
            "perdure_cost_dollars", "What model calls cost, as far as prices are known.", ["model"], registry=registry
        )
        self._model_calls = Counter(
            "perdure_model_calls", "Model calls, with their retries.", ["model", "outcome"], registry=registry
        )
        self._deliveries = Counter(
            "perdure_delivery_attempts", "Attempts to deliver a reply.", ["kind", "outcome"], registry=registry
        )
        self._wakes = Counter(
            "perdure_wakeups", "Wake-ups, by whether the broker took them.", ["outcome"], registry=registry
        )
        self._duties = Counter(
            "perdure_duty_runs", "Rounds of sweeps and other duties.", ["duty", "outcome"], registry=registry
        )
        self._info = Gauge("perdure_worker_info", "The worker's release.", ["release"], registry=registry)
        for outcome in ("published", "refused"):
            self._wakes.labels(outcome)
        for kind, outcome in product(("url", "channel", "task"), ("delivered", "postponed", "failed")):
            self._deliveries.labels(kind, outcome)
        for reason in REASONS:
            self._left.labels(reason)

    def expect(self, agents: Collection[str], models: Collection[str], duties: Collection[str]) -> None:
        """Begin the series of these names at 0: Prometheus counts no increase to the first value of a series."""
        codes = error_codes()
        cancelled = TurnCancelled.code
        outcomes = [("done", ""), ("cancelled", cancelled), *(("failed", code) for code in codes - {cancelled})]
        for agent, (status, code) in product(agents, outcomes):
            self._settled.labels(agent, status, code)
        for model, outcome in product(models, (ANSWERED, ABORTED, *codes)):
            self._model_calls.labels(model, outcome)
        for model, kind in product(models, ("input", "output", "cached")):
            self._tokens.labels(model, kind)
        for duty, outcome in product(duties, ("succeeded", "failed")):
            self._duties.labels(duty, outcome)

    def stage(self, stage: Stage, seconds: float) -> None:
        """A stage took `seconds`."""
        self._note("stage", stage, seconds)
        self._stages[stage].observe(seconds)

    @contextmanager
    def timed(self, stage: Stage, clock: Clock) -> Iterator[None]:
        """Time the block as a stage."""
        began = clock.monotonic()
        try:
            yield
        finally:
            self.stage(stage, clock.monotonic() - began)

    def settled(self, agent: str, status: str, error_code: str | None) -> None:
        """A turn was settled."""
        self._note("settled", agent, status, error_code)
        self._settled.labels(agent, status, error_code or "").inc()

    def left(self, reason: str) -> None:
        """A turn was left to a later worker."""
        self._note("left", reason)
        self._left.labels(reason).inc()

    def step_repeated(self) -> None:
        """A step begins again that an earlier worker had begun."""
        self._note("step_repeated")
        self._repeated.inc()

    def lease_taken_over(self) -> None:
        self._note("lease_taken_over")
        self._taken_over.inc()

    def lease_lost(self) -> None:
        self._note("lease_lost")
        self._lost.inc()

    def model_call(self, model: str, outcome: str) -> None:
        """A model was called, with its retries: `answered`, `aborted` by the engine, or the code of the error."""
        self._note("model_call", model, outcome)
        self._model_calls.labels(model, outcome).inc()

    def used(self, model: str, tokens: dict[str, int], dollars: float | None) -> None:
        """A call of `model` used `tokens`, by kind, and cost `dollars` (`None`: unknown)."""
        self._note("used", model, tokens, dollars)
        for kind, number in tokens.items():
            self._tokens.labels(model, kind).inc(number)
        if dollars is not None:
            self._cost.labels(model).inc(dollars)

    def model_called(
        self, model: str, seconds: float, usage: Usage | None, error: BaseException | None, settings: Settings
    ) -> None:
        """A model was called: it answered, with `usage`, or `error` was raised."""
        self.stage("model", seconds)
        self.model_call(model, _outcome(error))
        if usage is not None:
            price = cost(model, usage, settings)
            tokens = {"input": usage.input_tokens, "output": usage.output_tokens, "cached": usage.cached_tokens or 0}
            self.used(model, tokens, None if price is None else float(price))

    def delivery(self, kind: str, outcome: str) -> None:
        """A delivery was attempted."""
        self._note("delivery", kind, outcome)
        self._deliveries.labels(kind, outcome).inc()

    def wake_up(self, *, published: bool) -> None:
        """A wake-up was published, or the broker refused it."""
        self._wakes.labels("published" if published else "refused").inc()

    def duty(self, name: str, outcome: str) -> None:
        """A duty ran: `succeeded` or `failed`."""
        self._duties.labels(name, outcome).inc()

    def add(self, journal: Sequence[Entry]) -> None:
        """Add the measurements of a child process."""
        for name, arguments in journal:
            getattr(self, name)(*arguments)

    def serve(self, address: str, port: int, release: str, gauges: Mapping[str, Callable[[], float]]) -> Server:
        """Serve the metrics at `address`, on `port` or one of the next ones. `gauges` are read at each request.

        Raises:
            OSError: none of the ports is free.
        """
        ProcessCollector(registry=self._registry)
        self._info.labels(release).set(1)
        for name, read in gauges.items():
            Gauge(f"perdure_{name}", f"The worker's {name.replace('_', ' ')}.", registry=self._registry).set_function(
                read
            )
        for candidate in range(port, port + PORTS):
            try:
                server, _thread = start_http_server(candidate, address, self._registry)
            except OSError:
                if candidate == port + PORTS - 1:
                    raise
            else:
                return Server(candidate, server)
        raise AssertionError  # the loop returns or raises

    def _note(self, name: str, *arguments: Any) -> None:
        if self._journal is not None:
            self._journal.append((name, list(arguments)))


def error_codes() -> frozenset[str]:
    """The codes of all errors that this process knows."""
    tree: list[type[PerdureError]] = [PerdureError]
    for error in tree:
        tree += error.__subclasses__()
    return frozenset(error.code for error in tree)


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return ANSWERED
    return ABORTED if isinstance(error, Abandoned) else getattr(error, "code", PerdureError.code)


class Server:
    """The HTTP server of a worker's metrics, on `port`."""

    def __init__(self, port: int, server: WSGIServer) -> None:
        self.port = port
        self._server = server

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
