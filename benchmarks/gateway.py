"""Requests per second of the gateway on keep-alive connections, compared with bare FastAPI routes.

The benchmark compares three sides: the gateway and two variants of the bare routes (`benchmarks.bare`). In each round,
one client process sends requests to one side after another.

The gateway is the real process. It accepts messages and reads turns. To accept a message, the gateway commits it and
publishes a wake-up through Redis. No worker runs.

The bare routes validate the same bodies as the gateway, with the same Pydantic model. One variant runs one statement
per request on the same PostgreSQL server. The other variant uses no database.

The rate is measured in a closed loop. The latencies of a closed loop follow from its rate (connections / rate, Little's
law). The latencies are therefore measured in an open loop at half of the gateway's rate.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles
from typing import Any, Protocol

import httpx2
from sqlalchemy import text
from sqlalchemy.engine import URL

from benchmarks import bare
from benchmarks.agents import QUESTION
from benchmarks.report import Section
from benchmarks.setup import BenchmarkFailed, Setup, connected, until

NAME = "gateway"

_CONNECTIONS = 4
_OPEN_CONNECTIONS = 16
_LOAD = 0.5
_USERS = 200
_ROUNDS = 5
_ROUND_S = 3.0
_START_S = 60.0
_PERCENT = 100

_GATEWAY, _COMMITTED, _VALIDATED = "gateway", "bare, a statement each", "bare, no database"
_PREFIXES = {_GATEWAY: "/v1", _COMMITTED: "/committed", _VALIDATED: "/validated"}


class _Client(Protocol):
    def __call__(self, **order: Any) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one side in one round: requests per second, and milliseconds per request."""

    per_s: float
    p50_ms: float
    p99_ms: float


Rounds = dict[str, list[Round]]


class Loop(StrEnum):
    """How the requests of a round are sent."""

    CLOSED = "closed loop"
    EVEN = "open loop, equal gaps"
    RANDOM = "open loop, random gaps"


Loops = dict[Loop, Rounds]


def measure(setup: Setup) -> Section:
    """Measure accepting a message and reading a turn on all three sides; returns the section."""
    with setup.database("bench_gateway") as url, _servers(setup, url) as ports, _client(setup, url) as client:
        read = _warmed_up(client, ports)
        accepting = _loops(setup, client, {side: _accept(ports, side) for side in _PREFIXES})
        reading = _loops(setup, client, {side: _read(ports, side, read[side]) for side in _PREFIXES})
    return Section(
        name=NAME,
        title="The gateway's requests per second, on keep-alive connections",
        method=(
            f"{_round_count(setup)} rounds of {_ROUND_S:g} s, in which the sides alternate; one client process. Rate: "
            f"closed loop on {_CONNECTIONS} connections, each with one request at a time. Latencies: open loop on "
            f"{_OPEN_CONNECTIONS} connections at {_LOAD:g} of the gateway's rate, from the time at which a request is "
            "due; with equal gaps, and with random ones (a Poisson process), which are the same for each side. "
            f"Messages are from {_USERS} users with sessions; each is committed, and a wake-up is published to Redis "
            "(no worker runs). The bare routes validate the same body with the same model and answer with the same "
            "members, on uvicorn's defaults without an access log. Figures are medians of the rounds; the last column "
            "is the median of the rounds' ratios of the gateway's rate to the side's."
        ),
        columns=["", "per second", "p50 ms", "p99 ms", "p99 ms, random", "p99 ms, closed loop", "gateway / this"],
        rows=[
            *_rows("POST /v1/messages", accepting),
            *_rows("GET /v1/turns/{id}", reading),
        ],
        figures={**_figures("accept", accepting), **_figures("read", reading)},
    )


@contextmanager
def _servers(setup: Setup, url: URL) -> Iterator[dict[str, int]]:
    """Run the processes of all sides; yields the port of each side."""
    setup.progress("starting the gateway and the bare routes")
    with connected(url) as connection:
        connection.execute(text(bare.TABLE))
    gateway, other = _free_port(), _free_port()
    environment = setup.environment(url)
    with (
        setup.process("perdure.cli", "gateway", "--port", str(gateway), environment=environment),
        setup.process("benchmarks.bare", str(other), environment=environment),
    ):
        until(lambda: _answers(gateway, "/healthz") and _answers(other, "/openapi.json"), _START_S)
        yield {_GATEWAY: gateway, _COMMITTED: other, _VALIDATED: other}


@contextmanager
def _client(setup: Setup, url: URL) -> Iterator[_Client]:
    """Yield a function that sends an order to the client process and returns the result."""
    with ExitStack() as stack:
        process = stack.enter_context(
            setup.process(
                "benchmarks.requester",
                environment=setup.environment(url),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )

        def carry_out(**order: Any) -> dict[str, Any]:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise BenchmarkFailed("the client process has ended; see its log")
            carried_out: dict[str, Any] = json.loads(answer)
            return carried_out

        yield carry_out
        process.stdin.close()
        process.wait(_START_S)
        process.stdout.close()


def _accept(ports: dict[str, int], side: str) -> dict[str, Any]:
    bodies = [{"user_id": f"user-{number}", "text": QUESTION} for number in range(_USERS)]
    return {
        "port": ports[side],
        "method": "POST",
        "paths": [f"{_PREFIXES[side]}/messages"],
        "bodies": bodies,
        "status": 202,
        "connections": _CONNECTIONS,
        "seconds": _ROUND_S,
    }


def _read(ports: dict[str, int], side: str, turn_id: str) -> dict[str, Any]:
    path = f"{_PREFIXES[side]}/turns/{turn_id}"
    return {**_accept(ports, side), "method": "GET", "paths": [path], "bodies": [], "status": 200}


def _warmed_up(client: _Client, ports: dict[str, int]) -> dict[str, str]:
    """Create a session for each user by sending messages. Returns the id of the last turn for each side."""
    return {side: client(**_accept(ports, side))["last"]["turn_id"] for side in _PREFIXES}


def _loops(setup: Setup, client: _Client, orders: dict[str, dict[str, Any]]) -> Loops:
    closed = _rounds(setup, client, orders, Loop.CLOSED)
    load = {"per_s": _LOAD * median(each.per_s for each in closed[_GATEWAY]), "connections": _OPEN_CONNECTIONS}
    even = {side: {**order, **load} for side, order in orders.items()}
    at_random = {side: {**order, "random": True} for side, order in even.items()}
    return {
        Loop.CLOSED: closed,
        Loop.EVEN: _rounds(setup, client, even, Loop.EVEN),
        Loop.RANDOM: _rounds(setup, client, at_random, Loop.RANDOM),
    }


def _rounds(setup: Setup, client: _Client, orders: dict[str, dict[str, Any]], loop: Loop) -> Rounds:
    found: Rounds = {side: [] for side in orders}
    for number in range(_round_count(setup)):
        for side, order in orders.items():
            setup.progress(f"{order['method']}, {side}, {loop}, round {number + 1}")
            found[side].append(_round(client(**order)))
    return found


def _round(answer: dict[str, Any]) -> Round:
    latencies = answer["latencies"]
    percentiles = quantiles(latencies, n=_PERCENT)
    return Round(len(latencies) / answer["seconds"], percentiles[49], percentiles[98])


def _round_count(setup: Setup) -> int:
    return max(setup.scaled(_ROUNDS), 2)


def _ratio(rounds: Rounds, side: str) -> float:
    pairs = zip(rounds[_GATEWAY], rounds[side], strict=True)
    return median(gateway.per_s / other.per_s for gateway, other in pairs)


def _rows(route: str, loops: Loops) -> list[list[str]]:
    closed = loops[Loop.CLOSED]
    return [
        [
            f"{route}, {side}",
            f"{median(each.per_s for each in closed[side]):,.0f}",
            f"{median(each.p50_ms for each in loops[Loop.EVEN][side]):.1f}",
            *(f"{_p99_ms(loops[loop][side]):.1f}" for loop in (Loop.EVEN, Loop.RANDOM, Loop.CLOSED)),
            "" if side == _GATEWAY else f"{_ratio(closed, side):.2f} x",
        ]
        for side in closed
    ]


def _p99_ms(rounds: list[Round]) -> float:
    return median(each.p99_ms for each in rounds)


def _figures(name: str, loops: Loops) -> dict[str, float]:
    closed = loops[Loop.CLOSED]
    return {
        f"{name}_per_s": median(each.per_s for each in closed[_GATEWAY]),
        f"{name}_p50_ms": median(each.p50_ms for each in loops[Loop.EVEN][_GATEWAY]),
        f"{name}_p99_ms": _p99_ms(loops[Loop.EVEN][_GATEWAY]),
        f"{name}_random_p99_ms": _p99_ms(loops[Loop.RANDOM][_GATEWAY]),
        f"{name}_closed_p99_ms": _p99_ms(closed[_GATEWAY]),
        f"{name}_of_bare_with_a_statement": _ratio(closed, _COMMITTED),
        f"{name}_of_bare_without_database": _ratio(closed, _VALIDATED),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _answers(port: int, path: str) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}{path}").is_success
    except httpx2.TransportError:
        return False
