"""LangGraph with its PostgreSQL checkpointer, as "Durable execution" of LangGraph's documentation describes it.

A `StateGraph` with the prebuilt `ToolNode`, a node that sends the reply, `PostgresSaver` and `durability="sync"`. The
library has no queue: a client's request starts a turn, and is repeated until it is answered. After a failure, a thread
is resumed by invoking the graph with its id and `None` as input.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from benchmarks.crashes import script


def work(database: str) -> None:
    """Answer requests until the process is killed."""
    with PostgresSaver.from_conn_string(database) as saver:
        saver.setup()
        graph = _graph().compile(checkpointer=saver)
        print(script.READY)
        while turn := script.next_turn():
            config = {"configurable": {"thread_id": turn}}
            state = graph.get_state(config)
            if not state.values:
                graph.invoke({"messages": [HumanMessage(script.text_of(turn))]}, config, durability="sync")
            elif state.next:
                graph.invoke(None, config, durability="sync")
            script.answered(turn)


def _graph() -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", _model)
    graph.add_node("tools", ToolNode([order]))
    graph.add_node("reply", _reply)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: "reply"})
    graph.add_edge("tools", "model")
    graph.add_edge("reply", END)
    return graph


def order(turn: str) -> str:
    """Order pencils."""
    return script.order(turn, f"{turn}:{script.CALL_ID}")


def _model(state: Any) -> dict[str, Any]:
    turn, last = script.turn_in(state["messages"][0].content), state["messages"][-1]
    assert turn is not None
    text = script.ask(turn, str(last.content) if isinstance(last, ToolMessage) else None)
    if text is not None:
        return {"messages": [AIMessage(text)]}
    call = {"name": script.TOOL, "args": {"turn": turn}, "id": script.CALL_ID, "type": "tool_call"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


def _reply(state: Any) -> dict[str, Any]:
    turn = script.turn_in(state["messages"][0].content)
    assert turn is not None
    script.reply(turn, state["messages"][-1].content, turn)
    return {}


if __name__ == "__main__":
    work(sys.argv[1])
