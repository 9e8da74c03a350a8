"""Declarations of MCP servers, and which of a server's tools are offered to models."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import CallToolResult, ToolAnnotations
from mcp_types import Tool as Listed

from perdure import Agent, McpServer
from perdure.errors import SettingsError
from perdure.settings import Settings
from perdure.tools.mcp.server import check
from perdure.tools.mcp.tool import usable_tools
from perdure.tools.registry import Effect


def test_unfit_tools_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A server's unusable tools are left out, because a provider would refuse every prompt that contains one."""
    server = McpServer("s", url="http://localhost/mcp", effects={"good": "pure", "typo": "pure"})
    fine: dict[str, Any] = {"type": "object"}
    listed = [
        Listed(name="good", input_schema=fine, description="First."),
        Listed(name="good", input_schema=fine, description="Second."),
        Listed(name="bad name", input_schema=fine),
        Listed(name="n" * 70, input_schema=fine),
        Listed(name="array", input_schema={"type": "array"}),
        Listed(name="huge", input_schema={"type": "object", "description": "x" * 40_000}),
        Listed(name="endless", input_schema={"type": "object", "maximum": float("inf")}),
    ]

    made = usable_tools(server, listed, no_answer)

    assert [(each.name, each.description, each.effect) for each in made] == [("s:good", "First.", Effect.PURE)]
    assert caplog.text.count("is not offered to models") == 6
    assert "has no tool 'typo'" in caplog.text


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, Effect.UNSAFE),
        ({"trust_hints": True}, Effect.PURE),
        ({"effect": "idempotent"}, Effect.IDEMPOTENT),
        ({"trust_hints": True, "effects": {"t": "unsafe"}}, Effect.UNSAFE),
    ],
)
def test_a_servers_hints_count_only_if_the_author_trusts_them(declared: dict[str, Any], expected: Effect) -> None:
    """A server's hint about a tool's effect counts only with `trust_hints`.

    If perdure trusted a wrong hint, perdure could repeat a payment.
    """
    server = McpServer("s", url="http://localhost/mcp", **declared)
    listed = Listed(name="t", input_schema={"type": "object"}, annotations=ToolAnnotations(read_only_hint=True))

    (made,) = usable_tools(server, [listed], no_answer)

    assert made.effect is expected


def test_approval_is_declared_for_all_tools_or_for_single_ones(caplog: pytest.LogCaptureFixture) -> None:
    """Approval is declared for all tools or by name. An unknown name is logged, because it protects no tool."""
    listed = [Listed(name=name, input_schema={"type": "object"}) for name in ("look", "pay")]

    def waits(declared: Any) -> list[bool]:
        server = McpServer("s", url="http://localhost/mcp", requires_approval=declared)
        return [each.needs_approval({"cents": 5}) for each in usable_tools(server, listed, no_answer)]

    assert waits(False) == [False, False]
    assert waits(True) == [True, True]
    assert waits(lambda arguments: arguments["cents"] > 1) == [True, True]
    assert waits({"pay": lambda arguments: arguments["no such"]}) == [False, True]
    assert waits({"pey": True}) == [False, False]
    assert "has no tool 'pey'" in caplog.text
    with pytest.raises(SettingsError, match="requires_approval"):
        waits({"pay": "yes"})


def test_approval_is_asked_with_the_servers_keys() -> None:
    """A tool whose keys a provider refuses has others in the prompt only."""
    server = McpServer("s", url="http://localhost/mcp", requires_approval=lambda given: given["$top"] > 10)
    listed = Listed(name="t", input_schema={"type": "object", "properties": {"$top": {"type": "integer"}}})

    (made,) = usable_tools(server, [listed], no_answer)

    assert [*made.schema().parameters["properties"]] == ["_top"]
    assert [made.needs_approval(made.parse(f'{{"_top": {top}}}')) for top in (10, 11)] == [False, True]


def test_a_command_must_be_allowed() -> None:
    """The operator must allow the command of each server. The error message says which setting to change."""
    servers = [McpServer("w", command=["uvx", "weather"]), McpServer("s", url="https://s.example/mcp")]
    settings = Settings.model_validate({"mcp": {"commands": "npx, uvx"}}).mcp

    check(servers, settings)
    with pytest.raises(SettingsError, match=r"^PERDURE_MCP__COMMANDS is 'npx'.*'w' would start 'uvx'.*=npx,uvx"):
        check(servers, Settings.model_validate({"mcp": {"commands": "npx"}}).mcp)


def test_two_servers_of_one_name_are_refused() -> None:
    """Two servers with the same name are refused, because a tool's name would not identify the tool's server."""
    one, other = McpServer("w", url="http://one/mcp"), McpServer("w", url="http://other/mcp")

    with pytest.raises(SettingsError, match="named 'w'"):
        check([one, other], Settings().mcp)
    with pytest.raises(SettingsError, match="two MCP servers with the same name"):
        Agent("a", "x", tools=[one, other])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "needs either"),
        ({"command": ["x"], "url": "http://x"}, "needs either"),
        ({"command": "uvx x"}, "list of strings"),
        ({"url": "ftp://x/mcp"}, "begins with http"),
        ({"url": "http://x:none/mcp"}, "begins with http"),
        ({"url": "http://x", "effect": "mostly"}, "mostly"),
        ({"url": "http://x", "timeout_s": 0}, "seconds above 0"),
        ({"url": "http://x", "max_result_chars": 0}, "from 1 to"),
    ],
)
def test_an_invalid_declaration_stops_the_start(given: dict[str, Any], why: str) -> None:
    """An invalid declaration raises `SettingsError` when it is created, not at the first turn."""
    with pytest.raises(SettingsError, match=why):
        McpServer("s", **given)


def test_secrets_are_not_shown() -> None:
    """The `repr` of a declaration hides secrets, because a log may contain the `repr`."""
    shown = repr(McpServer("s", url="http://x/mcp", headers={"authorization": "Bearer SECRET"}, env={"K": "SECRET"}))

    assert "SECRET" not in shown


def no_answer(*_: Any) -> CallToolResult:
    """Fail, because no test of this module calls a tool."""
    raise AssertionError
