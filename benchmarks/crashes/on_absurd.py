"""An agent of pydantic-ai in a task of Absurd: the model calls, the tool and the reply are steps.

Neither documentation describes the other library, so the steps are those of "Python SDK" of Absurd's documentation. Its
documentation recommends several processes; a lease (`claim_timeout`, by default 120 s) begins again with each
checkpoint. An idempotency key is derived from the task's id, as the README of Absurd recommends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from absurd_sdk import AsyncAbsurd
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings

from benchmarks.crashes import script
from benchmarks.crashes.scripted_pydantic_ai import MODEL


class _Steps(WrapperModel):
    """A model whose replies are checkpoints."""

    def __init__(self, context: Any) -> None:
        super().__init__(MODEL)
        self._context = context

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        """The reply, from its checkpoint if there is one."""

        async def requested() -> Any:
            response = await self.wrapped.request(messages, model_settings, model_request_parameters)
            return json.loads(ModelMessagesTypeAdapter.dump_json([response]))

        (found,) = ModelMessagesTypeAdapter.validate_python(await self._context.step("model", requested))
        assert isinstance(found, ModelResponse)
        return found


async def answer(params: Any, context: Any) -> Any:
    """Run a turn."""
    turn = params["turn"]

    async def order(turn: str) -> Any:
        """Order pencils."""

        async def ordered() -> str:
            return script.order(turn, f"{context.task_id}:{script.CALL_ID}")

        return await context.step("order", ordered)

    agent = Agent(_Steps(context), name="assistant", instructions=script.INSTRUCTIONS, tools=[order])
    result = await agent.run(script.text_of(turn))

    async def replied() -> None:
        script.reply(turn, result.output, str(context.task_id))

    await context.step("reply", replied)


async def work(database: str, name: str) -> None:
    """Run tasks until the process is killed."""
    app = AsyncAbsurd(database, queue_name=script.QUEUE)
    app.register_task(script.TASK)(answer)
    print(script.READY)
    await app.start_worker(worker_id=name)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
