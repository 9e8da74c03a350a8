"""Turns that call the tools of a real MCP server over stdio."""

from __future__ import annotations

import base64
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from perdure import McpServer
from perdure.clock import MovedClock, SystemClock
from perdure.files.parts import MAX_FILES
from perdure.files.results import named_in
from perdure.models.providers.endpoint import Endpoint
from perdure.models.providers.model import EndpointModel
from perdure.resilience.registry import Breakers
from perdure.settings import Settings
from perdure.tools.mcp.connections import Connections
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from tests.files.contents import png
from tests.models.anthropic_server import AnthropicServer
from tests.models.openai_server import Answer, Call
from tests.tools.mcp_server import SHELVES
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

PROGRAM = Path(__file__).parents[2] / "tools" / "mcp_server.py"
PATIENCE_S = 60.0
SERVER = McpServer(
    "local",
    command=[sys.executable, str(PROGRAM), "stdio"],
    effects={"add": "pure", "key": "idempotent", "die_once": "idempotent"},
    requires_approval={"key": True, "add": lambda arguments: arguments["a"] > 100},
    connect_timeout_s=60,
)


LIBRARY = McpServer("library", command=[sys.executable, str(PROGRAM), "shelves"], effect="pure", connect_timeout_s=60)
"""A server with forty tools."""


@pytest.fixture(scope="module")
def connections() -> Iterator[Connections]:
    """The MCP connections that all tests of this module share."""
    settings = Settings.model_validate({"mcp": {"commands": sys.executable}})
    clock = MovedClock()
    breakers = Breakers(settings.breaker, clock)
    made = Connections(settings, breakers, clock)
    made.open([SERVER, LIBRARY])
    yield made
    made.close()
    breakers.close()


@pytest.fixture(autouse=True)
def equipped(harness: Harness, connections: Connections) -> None:
    """Give the default agent the MCP server's tools."""
    harness.connections = connections
    harness.equip(SERVER)


def _effects(harness: Harness) -> list[tuple[str, str, str]]:
    return [tuple(row) for row in harness.sql("SELECT tool, effect, status FROM tool_effects ORDER BY position")]


@pytest.mark.long
def test_a_turn_calls_a_tool_of_the_server(harness: Harness) -> None:
    """The first step waits for the server's tools. The error for an unknown tool lists the available tools."""
    harness.script(calls(("local:add", {"a": 2, "b": 3}), ("local:subtract", {})), says("It is 5."))
    turn = harness.ask("What is 2 + 3?")
    assert (turn["status"], turn["reply"]["text"]) == ("done", "It is 5.")
    assert {"local:add", "local:die"} <= {schema.name for schema in harness.model.requests[0].tools}
    added, refused = harness.results(turn)
    assert added == "5"
    assert refused.startswith("Error: There is no tool 'local:subtract'. Available: local:")
    assert _effects(harness) == [("local:add", "pure", "done")]


@pytest.mark.long
def test_the_model_gets_an_image_of_the_server(harness: Harness) -> None:
    """It is a file of the user, as the file of any tool, and the result names it."""
    image = base64.b64encode(png(640, 480)).decode()
    arguments = json.dumps({"image": image})
    with AnthropicServer(Answer(calls=[Call("local_screenshot", arguments, "call_0")]), Answer("Nice.")) as server:
        endpoint = Endpoint("test", server.base_url, kind="anthropic")
        model = harness.any_model = EndpointModel(endpoint, "m", MovedClock())
        turn = harness.ask("How does the page look?")
        model.close()
        [result] = server.requests[-1]["messages"][-1]["content"]
    assert turn["status"] == "done", turn
    text, shown = result["content"]
    assert text["text"].startswith("the page:\n\n[image: image/png, 640 by 480 pixels")
    assert shown["source"]["data"] == image
    [row] = harness.sql("SELECT user_id, media_type, name FROM files")
    assert tuple(row) == ("ana", "image/png", None)


@pytest.mark.long
def test_files_of_a_server_are_limited_and_named_safely(harness: Harness) -> None:
    """Twenty of 28 contents are stored. For the others, a line has the size, and the reason if there is one."""
    harness.script(calls(("local:documents", {})), says("Seen."))
    [result] = harness.results(harness.ask("What is there?"))
    lines = result.split("\n\n")
    assert len(lines) == 28
    assert "not shown (The file is empty.)]" in lines[1]
    assert "not shown (it is not in Base64)]" in lines[2]
    assert lines[-1] == "[resource note://24.txt of unknown type, about 3 bytes: not shown]"
    rows = harness.sql("SELECT file_id, media_type FROM files")
    assert {file_id for file_id, _ in named_in(result)} == {row.file_id for row in rows}
    assert [row.media_type for row in rows] == ["text/plain"] * MAX_FILES


@pytest.mark.long
def test_forty_tools_of_a_server_reach_the_model(harness: Harness) -> None:
    """They fit a quarter of a usual window."""
    harness.equip(LIBRARY)
    turn = harness.ask()
    assert [each.name for each in harness.model.requests[0].tools] == [f"library:shelf_{each}" for each in SHELVES]
    assert "tools_left_out" not in turn


@pytest.mark.long
def test_tools_of_a_server_that_do_not_fit_are_named_and_found(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """In a small window, the turn and the log name what the model does not get, and the model may search for it."""
    harness.equip(LIBRARY)
    harness.settings = harness.settings.model_copy(update={"model_window": 4_096})
    harness.script(
        calls(("search_tools", {"query": "shelf d7"})), calls(("library:shelf_d7", {"title": "Emma"})), says("done")
    )
    with caplog.at_level(logging.WARNING):
        turn = harness.ask()
    offered = [{each.name for each in request.tools} for request in harness.model.requests]
    assert "search_tools" in offered[0]
    assert ["library:shelf_d7" in each for each in offered] == [False, True, True]
    assert harness.results(turn)[1] == "Emma is not on shelf d7 (10)"
    everything = {f"library:shelf_{each}" for each in SHELVES}
    assert 0 < len(offered[0]) < len(everything)
    assert set(turn["tools_left_out"]) == everything - offered[-1]
    (record,) = [each for each in caplog.records if "do not fit" in each.getMessage()]
    assert "library:shelf_d7" in record.getMessage()


@pytest.mark.long
def test_a_call_waits_for_approval_as_declared(harness: Harness) -> None:
    """`requires_approval` applies to MCP tools. Recording a decision needs no connection to the MCP server."""
    harness.script(calls(("local:add", {"a": 101, "b": 1}), ("local:key", {})), says("done"))
    turn = harness.ask()
    assert [each["tool"] for each in turn["pending_approvals"]] == ["local:add", "local:key"]

    harness.connections, connected = None, harness.connections
    for call_id, given in (("call_0", {"arguments": {"a": 7, "b": 1}}), ("call_1", {})):
        decision = parse_decision({"call_id": call_id, "decision": "approve", **given})
        decide(harness.runtime, UUID(turn["turn_id"]), decision)
    harness.connections = connected
    harness.run(UUID(turn["session_id"]))

    added, key = harness.results(turn)
    assert added.endswith("\n8")
    [effect] = harness.sql("SELECT effect_id FROM tool_effects WHERE tool = 'local:key'")
    assert key == str(effect.effect_id)


def test_an_agent_without_connections_has_no_tools_of_servers(harness: Harness) -> None:
    """Without MCP connections, the model is offered no MCP tools, and the turn is still answered."""
    harness.connections = None
    harness.script(calls(("local:add", {"a": 1, "b": 1})), says("I cannot."))
    turn = harness.ask()
    assert turn["reply"]["text"] == "I cannot."
    assert harness.results(turn) == ["Error: There is no tool 'local:add'. Available: none."]


@pytest.mark.long
def test_a_server_that_dies_in_the_middle_of_an_unsafe_call(harness: Harness) -> None:
    """An unsafe call is not repeated. The model reads that the outcome is unknown, and the turn continues."""
    harness.script(calls(("local:die", {})), says("I cannot tell."))
    turn = harness.ask()
    assert (turn["status"], turn["reply"]["text"]) == ("done", "I cannot tell.")
    [result] = harness.results(turn)
    assert result.startswith("local:die was called, but there is no answer")
    assert result.endswith(f"\n{UNKNOWN_OUTCOME}")
    assert _effects(harness) == [("local:die", "unsafe", "unknown")]
    assert "local:die" in {schema.name for schema in harness.model.requests[1].tools}, "its tools are still offered"


@pytest.mark.exhaustive
def test_a_server_that_dies_in_the_middle_of_a_call_that_may_be_repeated(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the server is available again, the call is repeated. The model reads only the result of the repetition."""
    monkeypatch.setattr("perdure.tools.mcp.server_connection.RETURN_S", PATIENCE_S)  # long enough for a busy machine
    server = replace(SERVER, timeout_s=PATIENCE_S * 2)
    harness.equip(server)
    settings = Settings.model_validate({"mcp": {"commands": sys.executable}})
    breakers = Breakers(settings.breaker, SystemClock())
    harness.connections = Connections(settings, breakers, SystemClock())  # real time, because the pauses are short
    harness.connections.open([server])
    try:
        harness.script(calls(("local:die_once", {"mark": str(tmp_path / "mark")})), says("It is done."))
        turn = harness.ask()
    finally:
        harness.connections.close()
        breakers.close()
    assert harness.results(turn) == ["done"]
    assert _effects(harness) == [("local:die_once", "idempotent", "done")]
