"""The price of durability for an agent of pydantic-ai: a plain run, DBOS, and perdure.

One agent with one tool runs in each system, and perdure's own agent of the same kind. The model has no latency, so the
figures contain only the costs of the agent, of the engine and of the database's client. Each turn begins a
conversation, because a plain run and DBOS store none.

DBOS is measured if it is installed. Its agent runs as pydantic-ai's documentation describes: `DBOSDurability`, the run
within a workflow, and the tool as a step.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import psutil
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from sqlalchemy.engine import URL

from benchmarks.agents import ANSWER, INSTRUCTIONS, QUESTION, assistant
from benchmarks.producer import produce
from benchmarks.report import Section
from benchmarks.setup import BenchmarkFailed, Setup, connected, ledger
from benchmarks.statements import bench
from perdure.adapters.pydantic_ai.adapt import adapt
from perdure.agents import Agents
from perdure.assembly import Addresses
from perdure.settings import Settings
from perdure.workers.publish.wake import CeleryWaker

NAME = "adapted"

_ALONE, _TOGETHER = 200, 800
_AT_ONCE = 16
_WARM_UP = 40

_TIMES = """
    SELECT avg(extract(epoch FROM settled_at - accepted_at)) AS each_s,
           extract(epoch FROM max(settled_at) - min(accepted_at)) AS all_s
    FROM (SELECT settled_at, accepted_at FROM turns ORDER BY accepted_at DESC LIMIT %s) AS newest
"""

_Run = Callable[[int, int], float]
"""Runs the given number of turns, with at most the second number of them at once; returns the seconds per turn."""


async def _answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    last = messages[-1]
    if isinstance(last, ModelRequest) and isinstance(last.parts[-1], ToolReturnPart):
        return ModelResponse(parts=[TextPart(ANSWER)])
    return ModelResponse(parts=[ToolCallPart("double", {"number": 21}, tool_call_id="call_1")])


async def double(number: int) -> int:
    """Double a number."""
    return number * 2


bare = Agent(FunctionModel(_answer), name="bare", instructions=INSTRUCTIONS, tools=[double])


@dataclass(frozen=True, slots=True)
class _Cost:
    """Figures per turn. `cpu_ms` is of the process that runs the agents."""

    ms: float
    cpu_ms: float
    transactions: float


def measure(setup: Setup) -> Section:
    """Measure each system with one turn at once, and with `_AT_ONCE`."""
    rows = {
        "plain run": _in_process(setup, lambda _: _plain()),
        **({"DBOS": _in_process(setup, _dbos)} if importlib.util.find_spec("dbos") else {}),
        "perdure, in one process": _in_process(setup, lambda url: _perdure(url, "bare")),
        "perdure's own agent, in one process": _in_process(setup, lambda url: _perdure(url, assistant.name)),
        "perdure, a worker": _worker(setup, "bare"),
        "perdure's own agent, a worker": _worker(setup, assistant.name),
    }
    return Section(
        name=NAME,
        title="A turn of an agent of pydantic-ai: a plain run, DBOS, perdure",
        method=(
            "A turn has 2 model calls without latency and 1 tool call, and begins a conversation. In one process: the "
            "plain run and DBOS on an event loop, perdure in threads, without Celery and breakers. A worker: celery -A "
            "perdure worker, with default settings; the message is accepted by another process. CPU: of the process "
            "that runs the agents. Transactions are PostgreSQL's count and include reads."
        ),
        columns=["", "ms, 1 at once", "CPU ms", f"turns/s, {_AT_ONCE} at once", "CPU ms", "transactions each"],
        rows=[
            [
                name,
                f"{alone.ms:.1f}",
                f"{alone.cpu_ms:.1f}",
                f"{1000 / together.ms:.0f}",
                f"{together.cpu_ms:.1f}",
                f"{together.transactions:.1f}",
            ]
            for name, (alone, together) in rows.items()
        ],
        figures={
            f"{name}, {at_once} at once: {unit}": value
            for name, costs in rows.items()
            for at_once, cost in zip((1, _AT_ONCE), costs, strict=True)
            for unit, value in (("ms", cost.ms), ("cpu_ms", cost.cpu_ms), ("transactions", cost.transactions))
        },
    )


def _in_process(setup: Setup, opened: Callable[[URL], Any]) -> tuple[_Cost, _Cost]:
    with setup.database("bench_adapted") as url, opened(url) as run:
        return _measured(setup, url, run, psutil.Process())


def _worker(setup: Setup, agent: str) -> tuple[_Cost, _Cost]:
    with setup.database("bench_adapted") as url:
        environment = setup.environment(url, PERDURE_AGENTS="benchmarks.adapted")
        with (
            setup.process("celery", "-A", "perdure", "worker", environment=environment) as worker,
            _sending(setup, url, agent) as run,
        ):
            return _measured(setup, url, run, worker)


def _measured(setup: Setup, url: URL, run: _Run, process: psutil.Process) -> tuple[_Cost, _Cost]:
    run(_WARM_UP, 1)
    run(_WARM_UP, _AT_ONCE)
    costs = []
    for turns, at_once in ((setup.scaled(_ALONE), 1), (setup.scaled(_TOGETHER), _AT_ONCE)):
        setup.progress(f"{turns} turns, {at_once} at once")
        committed, used = ledger(url).commits, _cpu_s(process)
        seconds = run(turns, at_once)
        used, committed = _cpu_s(process) - used, ledger(url).commits - committed
        costs.append(_Cost(seconds * 1000, used * 1000 / turns, committed / turns))
    return costs[0], costs[1]


async def _output(agent: Agent[None, str]) -> str:
    return (await agent.run(QUESTION)).output


# --- the systems --------------------------------------------------------------------------------


@contextmanager
def _plain() -> Iterator[_Run]:
    with asyncio.Runner() as runner:
        yield _tasks(runner, lambda: _output(bare))


@contextmanager
def _dbos(url: URL) -> Iterator[_Run]:
    made: Any = import_module("dbos").DBOS
    address = url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    made(config={"name": "benchmark", "system_database_url": address, "log_level": "ERROR"})
    durability = import_module("pydantic_ai.durable_exec.dbos").DBOSDurability
    durable = Agent(
        FunctionModel(_answer),
        name="bare",
        instructions=INSTRUCTIONS,
        tools=[made.step(name="double")(double)],
        capabilities=[durability()],
    )

    @made.workflow(name="turn")  # type: ignore[untyped-decorator]  # DBOS is optional
    async def turn() -> str:
        return await _output(durable)

    made.launch()
    try:
        with asyncio.Runner() as runner:
            yield _tasks(runner, turn)
    finally:
        made.destroy()


@contextmanager
def _perdure(url: URL, agent: str) -> Iterator[_Run]:
    """Turns in this process, without a worker."""
    with bench(url, Agents([assistant, adapt(bare)])) as made:
        numbers = count()

        def run(turns: int, at_once: int) -> float:
            users = [f"user {next(numbers)}" for _ in range(turns)]
            began = time.perf_counter()
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(partial(made.turn, agent=agent), users))
            return (time.perf_counter() - began) / turns

        yield run


@contextmanager
def _sending(setup: Setup, url: URL, agent: str) -> Iterator[_Run]:
    """Turns in a worker. Their times are those of the database, because this process polls."""
    settings, address = Settings(_env_file=None), url.render_as_string(hide_password=False)
    redis = setup.servers.redis.url
    waker = CeleryWaker(settings, Addresses(address, redis, redis))
    numbers = count()
    with bench(url, Agents([assistant, adapt(bare)]), waker) as made, connected(url) as connection:

        def settled() -> int:
            return int(connection.exec_driver_sql("SELECT count(settled_at) FROM turns").scalar_one())

        def run(turns: int, at_once: int) -> float:
            before = settled()
            produce(turns, at_once, lambda _: made.accept(f"user {next(numbers)}", agent), lambda: settled() - before)
            (row,) = connection.exec_driver_sql(_TIMES, (turns,)).all()
            return float(row.each_s if at_once == 1 else row.all_s / turns)

        yield run
    waker.close()


def _tasks(runner: asyncio.Runner, turn: Callable[[], Awaitable[str]]) -> _Run:
    async def several(turns: int) -> None:
        for _ in range(turns):
            if (text := await turn()) != ANSWER:
                raise BenchmarkFailed(f"an output is {text!r}")

    async def all_of(turns: int, at_once: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(several(turns // at_once) for _ in range(at_once)))
        return (time.perf_counter() - began) / (turns // at_once * at_once)

    return lambda turns, at_once: runner.run(all_of(turns, at_once))


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)
