"""Tests of the assembly of a process's runtime: its MCP servers, its key for quotations and its embedder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from perdure import Agent, McpServer
from perdure.assembly import assemble, check
from perdure.errors import CircuitBreakerOpen, ProviderError, SettingsError
from perdure.settings import Settings
from tests.conftest import RecordingWaker

PROGRAM = Path(__file__).parents[1] / "tools" / "mcp_server.py"
NOWHERE = "postgresql://127.0.0.1:1/none"


def _settings(monkeypatch: pytest.MonkeyPatch, directory: Path, commands: str) -> Settings:
    """Settings with one agent, which uses the test's MCP server."""
    module = ModuleType("agents_with_a_server")
    server = McpServer("local", command=[sys.executable, str(PROGRAM), "stdio"], connect_timeout_s=60)
    module.assistant = Agent("assistant", "You help.", [server])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    given = {"agents": module.__name__, "mcp": {"commands": commands}, "data_dir": directory}
    return Settings.model_validate(given)


@pytest.mark.long
def test_a_process_that_runs_turns_has_the_servers_tools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waker: RecordingWaker
) -> None:
    """Only a process that runs turns connects to the agents' MCP servers."""
    settings = _settings(monkeypatch, tmp_path, sys.executable)
    check(settings)
    assert assemble(settings, NOWHERE, waker).connections is None

    made = assemble(settings, NOWHERE, waker, turns=True)
    assert made.connections is not None
    try:
        assert "local:add" in made.agents.default.toolset(made.connections).names
    finally:
        made.connections.close()


def test_workers_quote_with_the_installations_key(tmp_path: Path, waker: RecordingWaker) -> None:
    """All processes that run turns use the same key for quotations, so a session's prompt prefix is stable."""
    settings = Settings.model_validate({"data_dir": tmp_path})
    keys = [assemble(settings, NOWHERE, waker, turns=True).quoting_key for _ in range(2)]
    assert keys == [settings.signing_key()] * 2
    assert assemble(settings, NOWHERE, waker).quoting_key == b""


def test_a_remote_embedder_is_called_through_a_breaker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waker: RecordingWaker
) -> None:
    """Calls to an unreachable remote embedder open its breaker, and further calls fail without a request."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    given = {"embedder": "openai:small", "breaker": {"failure_threshold": 2}, "retry": {"base_s": 0.001}}
    made = assemble(Settings.model_validate({**given, "data_dir": tmp_path}), NOWHERE, waker)
    assert made.breakers is not None
    for _ in range(2):
        with pytest.raises(ProviderError):
            made.embedder.embed(["hello"])
    with pytest.raises(CircuitBreakerOpen):
        made.embedder.embed(["hello"])
    assert [(each.name, each.state, each.failure_count) for each in made.breakers.list()] == [
        ("embed:openai:small", "open", 2)
    ]


def test_a_command_that_is_not_allowed_stops_every_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waker: RecordingWaker
) -> None:
    """If an MCP server's command is not allowed, no process starts, even a process that would not run the command."""
    settings = _settings(monkeypatch, tmp_path, "uvx")
    with pytest.raises(SettingsError, match="PERDURE_MCP__COMMANDS"):
        check(settings)
    for turns in (False, True):
        with pytest.raises(SettingsError, match="PERDURE_MCP__COMMANDS"):
            assemble(settings, NOWHERE, waker, turns=turns)
