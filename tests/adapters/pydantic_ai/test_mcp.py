"""MCP servers as toolsets of agents of pydantic-ai: a row for each call, and a server that dies within a call."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from pydantic_ai import Agent as PydanticAgent

from perdure import adapt
from perdure.agents import Agents
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from tests.tools import mcp_server
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

SERVER = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(mcp_server.__file__)))} stdio"


def _equip(harness: Harness, command: str = f"exec {SERVER}") -> None:
    # Every test process imports this file, and these imports take a second.
    from fastmcp.client.transports import StdioTransport  # noqa: PLC0415
    from pydantic_ai.mcp import MCPToolset  # noqa: PLC0415

    transport = StdioTransport("sh", ["-c", command], keep_alive=False)
    harness.agents = Agents([adapt(PydanticAgent(name="assistant", toolsets=[MCPToolset(transport, init_timeout=60)]))])


def _rows(harness: Harness) -> list[tuple[str, str, str]]:
    return [tuple(row) for row in harness.sql("SELECT tool, effect, status FROM tool_effects ORDER BY position")]


@pytest.mark.exhaustive
def test_each_call_has_a_row(harness: Harness) -> None:
    """The server of the toolset runs while the turn does."""
    _equip(harness)
    harness.script(calls(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})), says("done"))
    turn = harness.ask()
    assert turn["status"] == "done"
    assert _rows(harness) == [("add", "unsafe", "done")] * 2
    results = [row.content for row in harness.sql("SELECT content FROM messages WHERE role = 'tool' ORDER BY seq")]
    assert results == ["3", "7"]


@pytest.mark.long
def test_a_server_that_dies_within_a_call(harness: Harness) -> None:
    """The call is in doubt, as for an MCP server of perdure's own agents, and the turn goes on."""
    _equip(harness)
    harness.script(calls(("die", {})), says("done"))
    assert harness.ask()["status"] == "done"
    assert _rows(harness) == [("die", "unsafe", "unknown")]
    [result] = harness.sql("SELECT content FROM messages WHERE role = 'tool'")
    assert result.content.endswith(UNKNOWN_OUTCOME)


@pytest.mark.exhaustive
def test_a_server_that_cannot_be_reached(harness: Harness, tmp_path: Path) -> None:
    """The run needs its tools, so the attempt fails, and the next one finds the server."""
    _equip(harness, f"test -e {shlex.quote(str(tmp_path / 'up'))} && exec {SERVER}")
    harness.script(calls(("add", {"a": 1, "b": 2})), says("done"))
    sent = harness.send()
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["attempts"], turn["steps"]) == ("parked", 1, 0)
    (tmp_path / "up").touch()
    harness.move(60)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert _rows(harness) == [("add", "unsafe", "done")]
