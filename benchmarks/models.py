"""The CPU time of a streamed reply: by perdure's own wire, by the vendor's SDK, and by pydantic-ai.

A server in another process streams the same reply to each of them (`benchmarks.delta_server`). The CPU time is that of
the benchmark's process. The clients alternate within each round, so that other load affects all of them. perdure's
models and the synchronous SDK run in threads, as in a worker, and the others on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import median
from typing import Any

from openai import AsyncOpenAI, OpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models import ModelRequestParameters, StreamedResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from sqlalchemy.engine import make_url

from benchmarks.delta_server import APART, DELTAS, INTERVAL_S, PACKET
from benchmarks.report import Section
from benchmarks.setup import BenchmarkFailed, Setup, until
from perdure.clock import SystemClock
from perdure.models.adapted import adapted_model
from perdure.models.adapted.messages import Sender, prompt
from perdure.models.protocol import Message, Model, ModelCall, ModelRequest, Role, ToolSchema
from perdure.models.providers import chat_wire
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.models.providers.wire_names import WireNames

NAME = "models"

_ROUNDS = 3
_MANY = 100
_REPLIES = {(PACKET, 1): 40, (PACKET, _MANY): 200, (APART, 1): 10, (APART, _MANY): 200}
"""The replies in one sample, by the way in which deltas arrive and the number of concurrent replies."""
_PACES = {PACKET: "one packet", APART: f"every {INTERVAL_S * 1000:g} ms"}
_TIMEOUT_S = 60.0
_START_S = 20.0
_PAIRS = 10
_TEXT = "".join(DELTAS)

_Cell = tuple[str, int]
_Client = Callable[[int, str, int], None]
"""Streams a number of replies at a pace; the last argument is how many of them are concurrent."""


def measure(setup: Setup) -> Section:
    """Measure the CPU time of a reply for each client in each cell; returns the section."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = setup.environment(make_url(setup.servers.postgres.url))
    with setup.process("benchmarks.delta_server", str(port), environment=environment), asyncio.Runner() as runner:
        until(lambda: _listens(port), _START_S)
        url = f"http://127.0.0.1:{port}/v1"
        clients = {**_in_threads(url), **_on_an_event_loop(url, runner)}
        costs = {
            cell: _alternating(setup, clients, *cell, replies=max(setup.scaled(replies), cell[1]))
            for cell, replies in _REPLIES.items()
        }
    return Section(
        name=NAME,
        title=f"CPU per streamed reply of {len(DELTAS)} deltas, ms",
        method=(
            f"A prompt of {2 * _PAIRS + 2} messages and two tools. The server, in another process, sends the deltas in "
            f"one packet, or one every {INTERVAL_S * 1000:g} ms. 1 or {_MANY} replies are streamed at once. Medians of "
            f"{_ROUNDS} rounds in which the clients alternate; a sample is the CPU time of the benchmark's process for "
            f"{', '.join(map(str, _REPLIES.values()))} replies."
        ),
        columns=["", *(f"{_PACES[pace]}, {at_once} at once" for pace, at_once in costs)],
        rows=[[name, *(f"{cost[name]:.1f}" for cost in costs.values())] for name in clients],
        figures={
            f"{name}, {_PACES[pace]}, {at_once} at once, ms": cost[name]
            for (pace, at_once), cost in costs.items()
            for name in clients
        },
    )


def _alternating(
    setup: Setup, clients: dict[str, _Client], pace: str, at_once: int, *, replies: int
) -> dict[str, float]:
    """The median CPU milliseconds per reply of each client, after a warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in clients}
    for number, (name, client) in product(range(_ROUNDS + 1), clients.items()):
        setup.progress(f"{_PACES[pace]}, {at_once} at once, round {number} of {_ROUNDS}: {name}")
        gc.collect()
        began = time.process_time()
        client(replies, pace, at_once)
        used = time.process_time() - began
        if number:
            samples[name].append(used * 1_000 / replies)
    return {name: median(each) for name, each in samples.items()}


def _in_threads(url: str) -> dict[str, _Client]:
    request, clock, endpoint = _request(), SystemClock(), Endpoint("bench", url)
    own: dict[str, Model] = {pace: EndpointModel(endpoint, pace, clock) for pace in _PACES}
    adapted: dict[str, Model] = {
        pace: adapted_model(f"bench:{pace}", clock, "PERDURE_MODEL", endpoint, "openai-chat") for pace in _PACES
    }
    body = chat_wire.request_body("", request)
    completions: Any = OpenAI(base_url=url, api_key="none").chat.completions

    def respond(model: Model) -> str:
        texts: list[str] = []
        model.respond(request, ModelCall(clock, _TIMEOUT_S, texts.append))
        return "".join(texts)

    def create(pace: str) -> str:
        chunks = completions.create(**{**body, "model": pace})
        return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)

    return {
        "perdure's own wire": _threads(lambda pace: respond(own[pace])),
        "SDK `openai`, in threads": _threads(create),
        "perdure's adapter of pydantic-ai's model": _threads(lambda pace: respond(adapted[pace])),
    }


def _on_an_event_loop(url: str, runner: asyncio.Runner) -> dict[str, _Client]:
    request = _request()
    body = chat_wire.request_body("", request)
    completions: Any = AsyncOpenAI(base_url=url, api_key="none").chat.completions
    provider = OpenAIProvider(base_url=url, api_key="none")
    models = {pace: OpenAIChatModel(pace, provider=provider) for pace in _PACES}
    *history, question = prompt(request.messages, WireNames(each.name for each in request.tools), Sender("bench", ""))
    parameters = ModelRequestParameters(
        function_tools=[
            ToolDefinition(name=each.name, description=each.description, parameters_json_schema=dict(each.parameters))
            for each in request.tools
        ]
    )
    agent = Agent(tools=[calculator, clock])

    async def create(pace: str) -> str:
        chunks = await completions.create(**{**body, "model": pace})
        return "".join([each.choices[0].delta.content or "" async for each in chunks if each.choices])

    async def stream(pace: str) -> str:
        async with models[pace].request_stream([*history, question], None, parameters) as streamed:
            return "".join([text async for text in _texts(streamed)])

    async def run(pace: str) -> str:
        asked = request.messages[-1].content
        async with agent.run_stream(asked, model=models[pace], message_history=history) as running:
            return "".join([text async for text in running.stream_text(delta=True, debounce_by=None)])

    return {
        "SDK `openai`, on an event loop": _tasks(runner, create),
        "pydantic-ai's model": _tasks(runner, stream),
        "pydantic-ai's agent": _tasks(runner, run),
    }


def calculator(text: str) -> str:
    """Compute the value of an expression."""
    return text


def clock(text: str) -> str:
    """Tell the time in a time zone."""
    return text


def _request() -> ModelRequest:
    said = [
        Message(role, f"{role.value} {number}: " + "some words of a message in a conversation. " * 3)
        for number in range(_PAIRS)
        for role in (Role.USER, Role.ASSISTANT)
    ]
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = tuple(ToolSchema(each.__name__, each.__doc__ or "", parameters) for each in (calculator, clock))
    messages = (Message(Role.SYSTEM, "You are a helpful assistant. " * 20), *said, Message(Role.USER, "And now?"))
    return ModelRequest(messages, tools)


async def _texts(streamed: StreamedResponse) -> AsyncIterator[str]:
    async for event in streamed:
        if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
            yield event.part.content
        elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
            yield event.delta.content_delta


def _threads(reply: Callable[[str], str]) -> _Client:
    def client(replies: int, pace: str, at_once: int) -> None:
        if at_once == 1:
            _check([reply(pace) for _ in range(replies)])
            return
        with ThreadPoolExecutor(at_once) as pool:
            _check(list(pool.map(reply, [pace] * replies)))

    return client


def _tasks(runner: asyncio.Runner, reply: Callable[[str], Awaitable[str]]) -> _Client:
    async def several(count: int, pace: str) -> None:
        _check([await reply(pace) for _ in range(count)])

    async def all_of(replies: int, pace: str, at_once: int) -> None:
        await asyncio.gather(*(several(replies // at_once, pace) for _ in range(at_once)))

    return lambda replies, pace, at_once: runner.run(all_of(replies, pace, at_once))


def _check(texts: Sequence[str]) -> None:
    """Raise an error if a text is not the whole reply.

    Raises:
        BenchmarkFailed: a text is not the whole reply.
    """
    if wrong := next((text for text in texts if text != _TEXT), None):
        raise BenchmarkFailed(f"a reply is {wrong!r}")


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
