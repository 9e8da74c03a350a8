"""A call that the client of an OpenAI-compatible request runs survives the kills of the worker and the gateway."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.conftest import Perdure
from tests.processes.faults import Place, wait_until
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import OF_CLIENT, ModelServer, answer_to
from tests.processes.nodes import RedisContainer

PATIENCE_S = 60.0
TOOL: Any = {"type": "function", "function": {"name": OF_CLIENT, "parameters": {"type": "object", "properties": {}}}}

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.mark.exhaustive
def test_results_are_used_once_over_every_kill(
    database_url: str, redis_server: RedisContainer, model_server: ModelServer, tmp_path: Path
) -> None:
    """The worker is killed when the turn waits; the gateway while the client runs the tool, and around the result."""
    installation = Installation(database_url, redis_server, model_server, tmp_path)
    gateway = GatewayProcess(Perdure(installation.environment, tmp_path))
    text = f"{OF_CLIENT}: a"
    messages: list[Any] = [{"role": "user", "content": text}]
    try:
        worker = installation.worker()
        worker.ready()
        gateway.start()
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)

        def ask() -> Any:
            made = client.chat.completions.create(model="tester", messages=messages, tools=[TOOL])
            return made.choices[0].message

        installation.faults.arm(Place("after", "turns.wait_calls"), signal.SIGKILL)
        asked = ask()
        wait_until(installation.faults.fired, "the worker is killed", PATIENCE_S)
        worker.container.wait()
        gateway.kill()
        gateway.start()
        assert ask().tool_calls == asked.tool_calls, "a client that was killed, too, gets the same calls"
        [call] = asked.tool_calls
        messages += [asked.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": ""}]
        for moment in ("before", "after"):
            installation.faults.arm(Place(moment, "turns.finish_task"), signal.SIGKILL)
            messages[-1]["content"] = moment
            with pytest.raises(openai.APIConnectionError):
                ask()
            wait_until(installation.faults.fired, "the gateway is killed", PATIENCE_S)
            gateway.kill()
            gateway.start()
        messages[-1]["content"] = "repeated"
        worker.container.start()
        assert [ask().content for _ in range(2)] == [answer_to(text, "after")] * 2
        [turn] = installation.query("SELECT status, attempts, steps FROM turns")
        assert tuple(turn) == ("done", 1, 2)
        installation.check()
    finally:
        gateway.kill()
        installation.close()
