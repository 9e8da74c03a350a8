"""What an agent's toolsets declare of their tools, as far as it shows without a run of the agent.

A decision about a call is checked in a process that does not run the agent. Toolsets that make their tools in a run,
such as dynamic ones and those of MCP servers, declare none here. A wrapper may change what its tools declare, so the
run checks the call again with its own definition; see `ledger.Calls.decide`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_ai import AbstractToolset, CombinedToolset, ExternalToolset, PrefixedToolset, RenamedToolset
from pydantic_ai.toolsets import SetMetadataToolset, WrapperToolset

Metadata = Mapping[str, Any] | None


def tools_of(toolset: AbstractToolset[Any]) -> Iterator[tuple[str, Metadata]]:
    """Yield the name and the metadata of each tool, as the wrappers of `toolset` rename and complete them."""
    if isinstance(toolset, CombinedToolset):
        for each in toolset.toolsets:
            yield from tools_of(each)
    elif isinstance(toolset, ExternalToolset):
        yield from ((each.name, each.metadata) for each in toolset.tool_defs)
    elif isinstance(toolset, WrapperToolset):
        for name, metadata in tools_of(toolset.wrapped):
            yield _outer_name(toolset, name), _outer_metadata(toolset, metadata)
    else:
        tools = getattr(toolset, "tools", None)
        if isinstance(tools, dict):
            yield from ((name, getattr(tool, "metadata", None)) for name, tool in tools.items())


def _outer_name(toolset: WrapperToolset[Any], name: str) -> str:
    if isinstance(toolset, PrefixedToolset):
        return f"{toolset.prefix}_{name}"
    if isinstance(toolset, RenamedToolset):
        return next((new for new, original in toolset.name_map.items() if original == name), name)
    return name


def _outer_metadata(toolset: WrapperToolset[Any], metadata: Metadata) -> Metadata:
    return {**(metadata or {}), **toolset.metadata} if isinstance(toolset, SetMetadataToolset) else metadata
