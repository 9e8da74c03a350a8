"""perdure: durable LLM agents on Celery, Redis and PostgreSQL.

This package exports the public API for authors of agents, and for applications that embed perdure or send it messages.
Each name is imported on first use, so that `perdure --help` starts fast.

The docstring of each name has an example, which begins in a module with `from perdure import *` and
`from perdure.testing import *`. There, `engine` and `async_engine` are the application's SQLAlchemy engines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.adapters.delegating import agent_tool, handoff
    from perdure.adapters.pydantic_ai.adapt import adapt
    from perdure.adapters.pydantic_ai.effects import effect, effect_id
    from perdure.agents import Agent, ErrorTexts
    from perdure.application.gateway import gateway
    from perdure.application.install import install
    from perdure.application.results import TurnResult, answer, result
    from perdure.application.sending import Sent, send, send_async
    from perdure.errors import GuardRejected, ModelRetry, OutcomeUnknown, ToolError
    from perdure.files.results import File
    from perdure.guards import Allow, Refuse, Replace, Verdict, guard
    from perdure.hooks import ApprovalWaiting, ToolCalled, ToolCalling, TurnContext, TurnEnding, TurnStarted, required
    from perdure.models.protocol import Usage
    from perdure.tools.awaited.asking import ask_user
    from perdure.tools.awaited.external import external_tool
    from perdure.tools.awaited.task import celery_tool
    from perdure.tools.awaited.timer import SleepUntil, sleep_until
    from perdure.tools.mcp.server import McpServer
    from perdure.tools.progress import progress
    from perdure.tools.registry import DidNotHappen, Effect, Happened, ToolContext, Unknown, tool

_MODULES = {
    "Agent": "perdure.agents",
    "Allow": "perdure.guards",
    "ApprovalWaiting": "perdure.hooks",
    "DidNotHappen": "perdure.tools.registry",
    "Effect": "perdure.tools.registry",
    "ErrorTexts": "perdure.agents",
    "File": "perdure.files.results",
    "GuardRejected": "perdure.errors",
    "Happened": "perdure.tools.registry",
    "ModelRetry": "perdure.errors",
    "McpServer": "perdure.tools.mcp.server",
    "OutcomeUnknown": "perdure.errors",
    "Refuse": "perdure.guards",
    "Replace": "perdure.guards",
    "SleepUntil": "perdure.tools.awaited.timer",
    "ToolCalled": "perdure.hooks",
    "ToolCalling": "perdure.hooks",
    "ToolContext": "perdure.tools.registry",
    "ToolError": "perdure.errors",
    "TurnContext": "perdure.hooks",
    "TurnResult": "perdure.application.results",
    "TurnEnding": "perdure.hooks",
    "TurnStarted": "perdure.hooks",
    "Unknown": "perdure.tools.registry",
    "Usage": "perdure.models.protocol",
    "Verdict": "perdure.guards",
    "adapt": "perdure.adapters.pydantic_ai.adapt",
    "agent_tool": "perdure.adapters.delegating",
    "answer": "perdure.application.results",
    "effect": "perdure.adapters.pydantic_ai.effects",
    "effect_id": "perdure.adapters.pydantic_ai.effects",
    "Sent": "perdure.application.sending",
    "gateway": "perdure.application.gateway",
    "guard": "perdure.guards",
    "handoff": "perdure.adapters.delegating",
    "install": "perdure.application.install",
    "progress": "perdure.tools.progress",
    "required": "perdure.hooks",
    "result": "perdure.application.results",
    "send": "perdure.application.sending",
    "send_async": "perdure.application.sending",
    "celery_tool": "perdure.tools.awaited.task",
    "ask_user": "perdure.tools.awaited.asking",
    "external_tool": "perdure.tools.awaited.external",
    "sleep_until": "perdure.tools.awaited.timer",
    "tool": "perdure.tools.registry",
}

__all__ = [
    "Agent",
    "Allow",
    "ApprovalWaiting",
    "DidNotHappen",
    "Effect",
    "ErrorTexts",
    "File",
    "GuardRejected",
    "Happened",
    "McpServer",
    "ModelRetry",
    "OutcomeUnknown",
    "Refuse",
    "Replace",
    "Sent",
    "SleepUntil",
    "ToolCalled",
    "ToolCalling",
    "ToolContext",
    "ToolError",
    "TurnContext",
    "TurnEnding",
    "TurnResult",
    "TurnStarted",
    "Unknown",
    "Usage",
    "Verdict",
    "adapt",
    "agent_tool",
    "answer",
    "ask_user",
    "celery_tool",
    "effect",
    "effect_id",
    "external_tool",
    "gateway",
    "guard",
    "handoff",
    "install",
    "progress",
    "required",
    "result",
    "send",
    "send_async",
    "sleep_until",
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
