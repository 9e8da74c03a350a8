"""DBOS with an agent of pydantic-ai, as "Durable Execution with DBOS" of pydantic-ai's documentation describes it.

`DBOSDurability` makes each model call a step, the tool and the reply are steps, and the run is in a workflow.
`DBOSClient` enqueues the workflows. Recovery follows "Workflow Recovery" of DBOS's documentation for a single server
without Conductor: a process that starts again with its executor id recovers the workflows that it was executing.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from dbos import DBOS
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSDurability

from benchmarks.crashes import script
from benchmarks.crashes.scripted_pydantic_ai import MODEL


def work(database: str) -> None:
    """Run workflows until the process is killed."""
    DBOS(config={"name": "crashes", "system_database_url": database, "run_admin_server": False, "log_level": "ERROR"})

    async def order(turn: str) -> str:
        return script.order(turn, DBOS.workflow_id)

    async def reply(turn: str, text: str) -> None:
        script.reply(turn, text, DBOS.workflow_id)

    agent: Any = Agent(
        MODEL,
        name="assistant",
        instructions=script.INSTRUCTIONS,
        tools=[DBOS.step(name=script.TOOL)(order)],
        capabilities=[DBOSDurability()],
    )
    send = DBOS.step(name="reply")(reply)

    async def answer(turn: str) -> None:
        result = await agent.run(script.text_of(turn))
        await send(turn, result.output)

    DBOS.workflow(name=script.TASK)(answer)
    DBOS.launch()
    DBOS.register_queue(script.QUEUE)
    print(script.READY)
    signal.pause()


if __name__ == "__main__":
    work(sys.argv[1])
