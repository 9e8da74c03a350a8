"""perdure: durable LLM agents on Celery, Redis and PostgreSQL.

The public API for authors of agents. Names are imported on first use, so that `perdure --help` starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.agents import Agent, ErrorTexts
    from perdure.errors import GuardRejected, OutcomeUnknown, ToolError
    from perdure.hooks import ToolCalled, ToolCalling, TurnEnding, TurnStarted, required
    from perdure.tools.mcp.server import McpServer
    from perdure.tools.registry import DidNotHappen, Effect, Happened, ToolContext, Unknown, tool
    from perdure.workers.installed.gateway import gateway
    from perdure.workers.installed.install import install

_MODULES = {
    "Agent": "perdure.agents",
    "DidNotHappen": "perdure.tools.registry",
    "Effect": "perdure.tools.registry",
    "ErrorTexts": "perdure.agents",
    "GuardRejected": "perdure.errors",
    "Happened": "perdure.tools.registry",
    "McpServer": "perdure.tools.mcp.server",
    "OutcomeUnknown": "perdure.errors",
    "ToolCalled": "perdure.hooks",
    "ToolCalling": "perdure.hooks",
    "ToolContext": "perdure.tools.registry",
    "ToolError": "perdure.errors",
    "TurnEnding": "perdure.hooks",
    "TurnStarted": "perdure.hooks",
    "Unknown": "perdure.tools.registry",
    "gateway": "perdure.workers.installed.gateway",
    "install": "perdure.workers.installed.install",
    "required": "perdure.hooks",
    "tool": "perdure.tools.registry",
}

__all__ = [
    "Agent",
    "DidNotHappen",
    "Effect",
    "ErrorTexts",
    "GuardRejected",
    "Happened",
    "McpServer",
    "OutcomeUnknown",
    "ToolCalled",
    "ToolCalling",
    "ToolContext",
    "ToolError",
    "TurnEnding",
    "TurnStarted",
    "Unknown",
    "gateway",
    "install",
    "required",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
