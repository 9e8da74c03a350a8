"""The readings as metrics for the gateway's `/metrics`. What was not read has no series, rather than the value 0.

Labels have bounded values: an agent, a model or an error code that this release or this process does not know is
`other`. No label has a user's id or text, or an address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from perdure.observe.measures import OTHER, error_codes
from perdure.observe.presence import BEAT, WORKER
from perdure.observe.readings import Amount, Counted, Readings
from perdure.resilience.circuit import CircuitState

MEDIA_TYPE = CONTENT_TYPE_LATEST

_LIVE = ("accepted", "running", "waiting_approval", "parked")
"""The statuses of turns that are not settled."""

_UNBOUNDED = "webhook:"
"""The prefix of breakers that are named by the hosts of `reply_to`."""

_AMOUNTS = {
    "queued": (
        "perdure_sessions_queued",
        "Sessions that wait for their user's running turns, or for the end of a pause",
    ),
    "approvals": ("perdure_approvals_waiting", "Tool calls that wait for a person's decision"),
    "deliveries_pending": ("perdure_deliveries_pending", "Replies that are not delivered yet"),
    "deliveries_failing": ("perdure_deliveries_failing", "Replies that are tried again, because an attempt failed"),
    "deliveries_failed": ("perdure_deliveries_failed", "Replies whose delivery was abandoned"),
    "deliveries_failed_lately": ("perdure_deliveries_failed_lately", "The same, within the last hour"),
    "unrouted": ("perdure_messages_unrouted", "Messages of applications that are not routed to a session yet"),
    "endings": ("perdure_sessions_ending", "Sessions whose end was requested"),
    "consolidations_waiting": ("perdure_consolidations_waiting", "Ended sessions whose memories are to be extracted"),
    "consolidations_failing": (
        "perdure_consolidations_failing",
        "Ended sessions whose extraction is tried again, because a run failed",
    ),
    "consolidations_given_up": ("perdure_consolidations_given_up", "Ended sessions whose extraction was abandoned"),
    "reminders_late": ("perdure_reminders_late", "Users' schedules that are more than a minute late"),
}
"""The metric of each of `Readings.amounts`: its name and its help. `NAME_oldest_seconds` has the age of the oldest."""


class Exposition:
    """The text of `/metrics`. `agents` and `models` are the names that may become labels."""

    def __init__(self, read: Callable[[], Readings], agents: Collection[str], models: Collection[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_ReadingsCollector(read, frozenset(agents), frozenset(models)))

    def text(self) -> bytes:
        """The metrics in Prometheus's text format. May block while another caller reads."""
        return generate_latest(self._registry)


class _ReadingsCollector(Collector):
    def __init__(self, read: Callable[[], Readings], agents: frozenset[str], models: frozenset[str]) -> None:
        self._read = read
        self._agents = agents
        self._models = models
        self._codes = error_codes()

    def collect(self) -> Iterator[Any]:
        """Read, and make the families of metrics."""
        read = self._read()
        yield from _work(read)
        if read.has("unsettled"):
            yield _family(
                "perdure_turns_unsettled",
                "Turns that are accepted and not settled",
                ("agent", "status"),
                _or_zero(_merged(read.unsettled, (self._agents, None)), product(self._agents, _LIVE)),
            )
        yield _family(
            "perdure_turns_failed_lately",
            "Turns accepted within the last hour that failed",
            ("agent", "error_code"),
            _merged(read.failures, (self._agents, self._codes)),
        )
        if read.has("parked"):
            yield _family(
                "perdure_sessions_parked",
                "Sessions whose turn waits for a model",
                ("model",),
                _or_zero(_merged(read.parked, (self._models,)), product(self._models)),
            )
        yield from _machinery(read)
        yield from _servers(read)
        yield _family("perdure_readings_failed", "Readings of these metrics that failed", (), {(): len(read.failed)})


def _work(read: Readings) -> Iterator[GaugeMetricFamily]:
    due: dict[tuple[str, ...], Amount] = {(str(priority),): amount for priority, amount in read.due.items()}
    yield from _amounts(
        "perdure_sessions_due", "Sessions whose turn may run and waits for a worker", ("priority",), due
    )
    for what, (name, text) in _AMOUNTS.items():
        if what in read.amounts:
            yield from _amounts(name, text, (), {(): read.amounts[what]})


def _machinery(read: Readings) -> Iterator[GaugeMetricFamily]:
    if read.has("processes"):
        yield from _processes(read)
    yield _family("perdure_sweep_late_seconds", "By how much a sweep is late", ("sweep",), _one(read.sweeps))
    yield _family("perdure_schedule_late_seconds", "By how much a slot is late", ("entry",), _one(read.schedules))
    if read.intake_closed is not None:
        yield _single("perdure_intake_closed", "1 while `perdure drain` keeps turns from starting", read.intake_closed)
    if read.has("breakers"):
        yield from _breakers(read)


def _processes(read: Readings) -> Iterator[GaugeMetricFamily]:
    alive = [each for each in read.processes if each.is_alive]
    workers = Counter((each.release,) for each in alive if each.kind == WORKER)
    yield _family("perdure_workers", "Workers that are alive", ("release",), workers or {("",): 0})
    yield _single("perdure_workers_of_turns", "Workers that are alive and run turns", len(read.workers))
    yield _single("perdure_beats", "Beats that are alive", sum(each.kind == BEAT for each in alive))
    lost: Counter[tuple[str, ...]] = Counter((each.kind,) for each in read.lost)
    yield _family(
        "perdure_processes_lost",
        "Processes that stopped reporting within the last hour: they were killed, or hang",
        ("kind",),
        _or_zero(lost, [(WORKER,), (BEAT,)]),
    )
    skew = max((abs(each.skew_s) for each in alive), default=0.0)
    yield _single("perdure_clock_skew_seconds", "The largest difference of a process's clock to PostgreSQL's", skew)


def _breakers(read: Readings) -> Iterator[GaugeMetricFamily]:
    states = Counter((each.name.partition(":")[0], each.state.value) for each in read.breakers)
    known = {kind for kind, _ in states} | {"llm"}
    every = {(kind, state.value): states[kind, state.value] for kind in known for state in CircuitState}
    yield _family("perdure_breakers", "Circuit breakers by kind and state", ("kind", "state"), every)
    open_ = {
        (each.name,): int(each.state is not CircuitState.CLOSED)
        for each in read.breakers
        if not each.name.startswith(_UNBOUNDED)
    }
    yield _family("perdure_breaker_open", "1 if the breaker is not closed", ("breaker",), open_)


def _servers(read: Readings) -> Iterator[GaugeMetricFamily]:
    if (server := read.server) is not None:
        yield _single("perdure_database_size_bytes", "The size of the database", server.size_bytes)
        yield _single(
            "perdure_database_oldest_transaction_seconds",
            "The age of the oldest open transaction that the role may see",
            server.oldest_transaction_s,
        )
        yield _single("perdure_database_connections", "Connections to PostgreSQL", server.connections)
        yield _single("perdure_database_max_connections", "PostgreSQL's max_connections", server.max_connections)
    for name, text, sizes in (
        ("perdure_disk_used_bytes", "Used bytes of a disk", {each.name: each.used_bytes for each in read.disks}),
        ("perdure_disk_size_bytes", "The size of a disk", {each.name: each.size_bytes for each in read.disks}),
    ):
        yield _family(name, text, ("disk",), {(disk,): size for disk, size in sizes.items()})
    yield _single("perdure_database_up", "1 if PostgreSQL answers and accepts writes", read.server is not None)
    if read.broker is not None:
        yield _single("perdure_broker_up", "1 if the broker can be reached", read.broker.fault is None)
    redis = [(each.name, each) for each in read.redis]
    for name, text, values in (
        ("perdure_redis_writable", "1 if Redis accepts writes", {n: int(r.fault is None) for n, r in redis}),
        ("perdure_redis_memory_bytes", "Memory that Redis uses", {n: r.memory_bytes for n, r in redis}),
        ("perdure_redis_memory_limit_bytes", "Redis's maxmemory; 0: no limit", {n: r.limit_bytes for n, r in redis}),
        ("perdure_redis_evicted_keys", "Keys that Redis evicted since it started", {n: r.evicted for n, r in redis}),
    ):
        known = {(server,): value for server, value in values.items() if value is not None}
        yield _family(name, text, ("server",), known)


def _merged(counted: Collection[Counted], known: tuple[Collection[str] | None, ...]) -> Counter[tuple[str, ...]]:
    """The numbers by labels; a label that is not among the `known` ones of its place is `OTHER`. `None`: all are."""
    found: Counter[tuple[str, ...]] = Counter()
    for each in counted:
        labels = (
            value if allowed is None or value in allowed else OTHER
            for value, allowed in zip(each.labels, known, strict=True)
        )
        found[tuple(labels)] += each.number
    return found


def _or_zero(found: Counter[tuple[str, ...]], every: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """`found`, with 0 for the other labels of `every`: a series that disappears raises no alert."""
    return {**dict.fromkeys(every, 0), **found}


def _one(values: Any) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values.items()}


def _amounts(
    name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], Amount]
) -> Iterator[GaugeMetricFamily]:
    yield _family(name, text, labels, {key: each.number for key, each in values.items()})
    oldest = {key: each.oldest_s or 0.0 for key, each in values.items()}
    yield _family(f"{name}_oldest_seconds", f"{text}: the age of the oldest", labels, oldest)


def _single(name: str, text: str, value: float) -> GaugeMetricFamily:
    return _family(name, text, (), {(): value})


def _family(name: str, text: str, labels: tuple[str, ...], values: Any) -> GaugeMetricFamily:
    made = GaugeMetricFamily(name, f"{text}.", labels=labels)
    for key, value in values.items():
        made.add_metric(key, float(value))
    return made
