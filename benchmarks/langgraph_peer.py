"""The benchmarks' turn, built with LangGraph and its PostgreSQL checkpointer, for comparison with perdure.

The agent is built as in LangGraph's documentation: a `StateGraph` over messages, the prebuilt `ToolNode` and
`tools_condition`, `durability="sync"`, and a `PostgresSaver`. Each thread has its own saver with its own connection,
because a saver has one lock and a shared saver would be slower. The model is a bare node that returns an `AIMessage`.
The figures therefore exclude the cost of LangChain's layer for chat models.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from sqlalchemy.engine import URL

from benchmarks.agents import ANSWER, QUESTION
from benchmarks.report import Rate
from benchmarks.setup import Setup, ledger

_TURNS_A_CONVERSATION = 5
"""For comparison: `benchmarks.throughput` runs 3.6 turns per session of perdure (1,800 turns in 500 sessions)."""

METHOD = (
    "LangGraph: one process without a queue; StateGraph, ToolNode and PostgresSaver on psycopg 3 with durability sync; "
    f"{_TURNS_A_CONVERSATION} turns per conversation; one saver and one connection per thread."
)


def rate(setup: Setup, conversations: int, threads: int) -> Rate:
    """Measure turns per second with `conversations` conversations on `threads` threads."""
    setup.progress(f"LangGraph: {conversations * _TURNS_A_CONVERSATION} turns on {threads} threads")
    with setup.database("bench_langgraph", tables=False) as url, ThreadPoolExecutor(threads) as pool:
        with ExitStack() as agents:
            made = [agents.enter_context(agent(url)) for _ in range(threads)]
            for number, each in enumerate(made):
                turn(each, f"warm-up {number}")
            shares = [range(number, conversations, threads) for number in range(threads)]
            before, began = ledger(url), time.perf_counter()
            list(pool.map(_converse, made, shares))
            seconds = time.perf_counter() - began
        counted = ledger(url) - before
    turns = conversations * _TURNS_A_CONVERSATION
    return Rate(turns / seconds, counted.commits / turns, counted.wal_bytes / 1024 / turns)


@contextmanager
def agent(url: URL) -> Iterator[Any]:
    """Yield a compiled graph with its own connection."""
    address = url.set(drivername="postgresql").render_as_string(hide_password=False)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", _model)
    graph.add_node("tools", ToolNode([double]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    with PostgresSaver.from_conn_string(address) as saver:
        saver.setup()
        yield graph.compile(checkpointer=saver)


def turn(compiled: Any, conversation: str) -> None:
    """Run one turn."""
    final = compiled.invoke(
        {"messages": [HumanMessage(QUESTION)]},
        {"configurable": {"thread_id": conversation}},
        durability="sync",
    )
    assert final["messages"][-1].content == ANSWER


def double(number: int) -> int:
    """Double a number."""
    return number * 2


def _model(state: Any) -> dict[str, Any]:
    if isinstance(state["messages"][-1], ToolMessage):
        return {"messages": [AIMessage(ANSWER)]}
    call = {"name": "double", "args": {"number": 21}, "id": "call_1", "type": "tool_call"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


def _converse(compiled: Any, numbers: range) -> None:
    for number in numbers:
        for _ in range(_TURNS_A_CONVERSATION):
            turn(compiled, f"conversation {number}")
