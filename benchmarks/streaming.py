"""The cost of event streams: CPU time per turn, delay of the first text, and memory per open stream.

The benchmark measures the CPU time with and without a listener. A listener is a client that reads a turn's event
stream. The worker and the gateway are separate processes. The worker calls a simulated model server through the OpenAI
SDK. The model server streams each answer in pieces. The model server and all clients run in the benchmark's process.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import httpx2
import psutil
from sqlalchemy.engine import URL

from benchmarks.report import Section
from benchmarks.setup import BenchmarkFailed, Setup, connected, until
from tests.models.openai_server import Answer, OpenAIServer, Step, Wire

NAME = "streaming"

_TURNS = 200
_AT_ONCE = 20
_WARM_UP = 20
_WORDS, _PIECE, _INTERVAL_S = 60, 6, 0.01
_OPEN = 1_000
_START_S = 60.0
_SETTLE_S = 120.0
_DESCRIPTORS = 4_096
_LAST_PERCENTILE = 98


@dataclass
class _Model:
    """Answers the requests to the simulated model server, and records when each question arrived."""

    arrived_at: dict[str, float] = field(default_factory=dict)

    def answer(self, body: Wire) -> Step:
        question = str(body["messages"][-1]["content"])
        self.arrived_at[question] = time.monotonic()
        text = " ".join(f"word{number}" for number in range(_WORDS))
        return Answer(text, piece=_PIECE, interval_s=_INTERVAL_S)


@dataclass(frozen=True, slots=True)
class Cost:
    """Average CPU milliseconds per turn, in the worker and in the gateway.

    `delays_ms` has one delay for each turn with a listener: the milliseconds from the question's arrival at the model
    server to the first text at the listener.
    """

    worker_ms: float
    gateway_ms: float
    delays_ms: list[float]


@dataclass(frozen=True, slots=True)
class _Installation:
    """The processes of a worker and of a gateway. `url` is the gateway's URL."""

    url: str
    worker: psutil.Popen
    gateway: psutil.Popen


def measure(setup: Setup) -> Section:
    """Measure the cost of turns with and without a listener, and the memory of open streams."""
    turns, streams = setup.scaled(_TURNS), setup.scaled(_OPEN)
    model = _Model()
    with OpenAIServer(player=model.answer) as server, setup.database("bench_streaming") as url:
        with _installation(setup, url, server.base_url) as installation:
            setup.progress("warming up")
            _run(installation, model, "warm-up", _WARM_UP, listen=True)
            setup.progress(f"{turns} turns without a listener")
            silent = _run(installation, model, "silent", turns, listen=False)
            setup.progress(f"{turns} turns with a listener each")
            streamed = _run(installation, model, "streamed", turns, listen=True)
        setup.progress(f"{streams} open streams")
        kib = _memory(setup, url, streams)
    median_ms, p99_ms = median(streamed.delays_ms), quantiles(streamed.delays_ms, n=100)[_LAST_PERCENTILE]
    return Section(
        name=NAME,
        title=f"Event streams: {turns} turns of {_WORDS} words, with and without a listener; {streams} open streams",
        method=(
            f"One worker and one gateway; {turns} turns of different users, {_AT_ONCE} concurrently, after a warm-up "
            f"of {_WARM_UP} turns. The model's server streams {_WORDS} words in pieces of {_PIECE} characters, "
            f"{_INTERVAL_S * 1000:g} ms apart. Delay: from the arrival of the model call at the server to the client's "
            "first delta. Memory: resident size of the gateway with and without the streams, each of a waiting turn."
        ),
        columns=["", "without a listener", "with a listener"],
        rows=[
            ["worker, ms of CPU per turn", f"{silent.worker_ms:.1f}", f"{streamed.worker_ms:.1f}"],
            ["gateway, ms of CPU per turn", f"{silent.gateway_ms:.1f}", f"{streamed.gateway_ms:.1f}"],
            ["delay of the first text, ms (median, p99)", "", f"{median_ms:.0f}, {p99_ms:.0f}"],
            ["gateway, KiB per open stream", "", f"{kib:.0f}"],
        ],
        figures={
            "worker_ms_without": silent.worker_ms,
            "worker_ms_with": streamed.worker_ms,
            "gateway_ms_without": silent.gateway_ms,
            "gateway_ms_with": streamed.gateway_ms,
            "first_words_ms_p50": median_ms,
            "first_words_ms_p99": p99_ms,
            "kib_an_open_stream": kib,
            "open_streams": streams,
        },
    )


@contextmanager
def _installation(setup: Setup, url: URL, model_url: str) -> Iterator[_Installation]:
    model = {
        "PERDURE_AGENTS": "perdure.builtin",
        "PERDURE_MODEL": "openai:test",
        "OPENAI_BASE_URL": model_url,
        "OPENAI_API_KEY": "none",
    }
    environment = setup.environment(url, **model)
    celery = ("-A", "perdure", "worker", "--concurrency", str(_AT_ONCE))
    with ExitStack() as stack:
        worker = stack.enter_context(setup.process("celery", *celery, environment=environment))
        address, gateway = stack.enter_context(_gateway(setup, environment))
        yield _Installation(address, worker, gateway)


@contextmanager
def _gateway(setup: Setup, environment: dict[str, str]) -> Iterator[tuple[str, psutil.Popen]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with setup.process("perdure.cli", "gateway", "--port", str(port), environment=environment) as gateway:
        until(lambda: _lives(address), _START_S)
        yield address, gateway


def _lives(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/healthz").is_success
    except httpx2.TransportError:
        return False


def _run(installation: _Installation, model: _Model, name: str, turns: int, *, listen: bool) -> Cost:
    before = _cpu_s(installation.worker), _cpu_s(installation.gateway)
    delays = asyncio.run(_all_turns(installation.url, model, name, turns, listen=listen))
    after = _cpu_s(installation.worker), _cpu_s(installation.gateway)
    worker_ms, gateway_ms = ((late - early) * 1000 / turns for early, late in zip(before, after, strict=True))
    return Cost(worker_ms, gateway_ms, delays)


async def _all_turns(url: str, model: _Model, name: str, turns: int, *, listen: bool) -> list[float]:
    """Run `turns` turns, at most `_AT_ONCE` of them concurrently, and return `Cost.delays_ms`.

    If `listen` is true, each turn has a listener. Otherwise, the returned list is empty.
    """
    room = asyncio.Semaphore(_AT_ONCE)
    delays: list[float] = []
    async with httpx2.AsyncClient(base_url=url, timeout=_SETTLE_S) as client:

        async def one(number: int) -> None:
            async with room:
                question = f"{name} {number}"
                sent = await client.post("/v1/messages", json={"user_id": question, "text": question})
                turn_id = sent.json()["turn_id"]
                if not listen:
                    await client.get(f"/v1/turns/{turn_id}", params={"wait": _SETTLE_S})
                    return
                first = [at async for kind, at in _events(client, turn_id) if kind == "delta"][:1]
                if not first:
                    raise BenchmarkFailed(f"{question!r}: the stream had no text")
                delays.append((first[0] - model.arrived_at[question]) * 1000)

        await asyncio.gather(*(one(number) for number in range(turns)))
    return delays


async def _events(client: Any, turn_id: str) -> AsyncIterator[tuple[str, float]]:
    """Yield the kind of each event of a turn, and the event's arrival time on the monotonic clock."""
    async with client.stream("GET", f"/v1/turns/{turn_id}/events") as response:
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                yield line.removeprefix("event: "), time.monotonic()


def _memory(setup: Setup, url: URL, streams: int) -> float:
    """Measure a gateway's resident memory per open stream, in KiB.

    No worker runs, so the turns do not end and their streams stay open.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_DESCRIPTORS, most), most))
    with _gateway(setup, setup.environment(url)) as (address, gateway), connected(url):
        with httpx2.Client(base_url=address) as client:
            sent = [client.post("/v1/messages", json=_waiting(number)).json()["turn_id"] for number in range(streams)]
            read = [client.get(f"/v1/turns/{turn_id}").json() for turn_id in sent[:_WARM_UP]]
        if any(turn["status"] != "accepted" for turn in read):
            raise BenchmarkFailed("a turn does not wait: " + json.dumps(read[0]))
        return asyncio.run(_opened(address, gateway, sent))


def _waiting(number: int) -> dict[str, str]:
    return {"user_id": f"waiting {number}", "text": "hello"}


async def _opened(address: str, gateway: psutil.Popen, turn_ids: list[str]) -> float:
    limits = httpx2.Limits(max_connections=len(turn_ids))
    async with httpx2.AsyncClient(base_url=address, timeout=_SETTLE_S, limits=limits) as client:
        warm = [_events(client, turn_id) for turn_id in turn_ids[:_WARM_UP]]
        for events in warm:
            await anext(events)
        before = gateway.memory_info().rss
        others = [_events(client, turn_id) for turn_id in turn_ids[_WARM_UP:]]
        for events in others:
            await anext(events)
        grown = gateway.memory_info().rss - before
        for events in [*warm, *others]:
            await events.aclose()  # type: ignore[attr-defined]
    return grown / 1024 / len(others)


def _cpu_s(process: psutil.Popen) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)
