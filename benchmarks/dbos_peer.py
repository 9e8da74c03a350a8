"""The benchmarks' turn as a workflow of DBOS, for comparison with perdure.

The turn is built as in DBOS's documentation: a workflow that calls steps, two of which are the model and one the tool.
DBOS commits the workflow's begin, each step's result and the workflow's result. The workflow has no agent's loop and
no conversation, which a user of DBOS would add. `rate_of_threads` calls workflows in threads; `rate_of_queue` enqueues
them, and DBOS's queue runs them in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from dbos import DBOS
from sqlalchemy.engine import URL

from benchmarks.agents import ANSWER, QUESTION
from benchmarks.report import Rate
from benchmarks.setup import Setup, ledger

_QUEUE = "turns"
_WARM_UP = 32
_PRODUCERS = 16
_AT_ONCE = 50
_POLLING_S = 0.1
"""The queue's pause between two looks. DBOS's default is 1 s.

In two runs each with 0.01 s, with 16 at once, and without a limit, the queue was not clearly faster.
"""

METHOD = (
    "DBOS: one process; a workflow of three steps, without a conversation. Its queue runs at most "
    f"{_AT_ONCE} workflows at once, and looks for others every {_POLLING_S * 1000:.0f} ms; {_PRODUCERS} threads "
    "enqueue them, and the time is that from the first enqueuing to the last result."
)


def rate_of_threads(setup: Setup, turns: int, threads: int) -> Rate:
    """Measure turns per second of workflows that `threads` threads call."""
    setup.progress(f"DBOS: {turns} turns on {threads} threads")
    with ThreadPoolExecutor(threads) as pool:
        return _rate(setup, turns, lambda turns: list(pool.map(_turn, range(turns))))


def rate_of_queue(setup: Setup, turns: int) -> Rate:
    """Measure turns per second of enqueued workflows, from the first enqueuing to the last result."""
    setup.progress(f"DBOS: {turns} turns from its queue")
    with ThreadPoolExecutor(_PRODUCERS) as pool:
        return _rate(setup, turns, lambda turns: _enqueued(pool, turns))


def _rate(setup: Setup, turns: int, run: Callable[[int], Sequence[str]]) -> Rate:
    """The rate of `turns` turns after a warm-up. PostgreSQL reports a connection's counts when it closes."""
    with setup.database("bench_dbos", tables=False) as url:
        with _launched(url):
            run(_WARM_UP)
        before = ledger(url)
        with _launched(url):
            run(_WARM_UP)
            began = time.perf_counter()
            answers = run(turns)
            seconds = time.perf_counter() - began
        counted = ledger(url) - before
    assert answers == [ANSWER] * turns
    counted_turns = turns + _WARM_UP
    return Rate(turns / seconds, counted.commits / counted_turns, counted.wal_bytes / 1024 / counted_turns)


def _enqueued(pool: ThreadPoolExecutor, turns: int) -> list[str]:
    DBOS.register_queue(_QUEUE, worker_concurrency=_AT_ONCE, polling_interval_sec=_POLLING_S)
    handles = list(pool.map(lambda number: DBOS.enqueue_workflow(_QUEUE, _turn, number), range(turns)))
    return [handle.get_result(polling_interval_sec=_POLLING_S) for handle in handles]


@contextmanager
def _launched(url: URL) -> Iterator[None]:
    address = url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    DBOS(config={"name": "benchmark", "system_database_url": address, "run_admin_server": False, "log_level": "ERROR"})
    DBOS.launch()
    try:
        yield
    finally:
        DBOS.destroy()


def _answer(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": ANSWER}
    return {"role": "assistant", "call": {"name": "double", "arguments": {"number": 21}, "id": "call_1"}}


def _double(number: int) -> int:
    return number * 2


def _run(_number: int) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    while "call" in (reply := _model(messages)):
        messages += [reply, {"role": "tool", "content": str(_tool(**reply["call"]["arguments"]))}]
    answer: str = reply["content"]
    return answer


_model: Any = DBOS.step(name="peer model")(_answer)
_tool: Any = DBOS.step(name="peer tool")(_double)
_turn: Any = DBOS.workflow(name="peer turn")(_run)
