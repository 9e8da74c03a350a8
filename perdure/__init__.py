"""perdure: durable LLM agents on Celery, Redis and PostgreSQL.

What the author of an agent needs stands here; see `perdure.agents` and `perdure.tools`.
"""

from perdure.agents import Agent
from perdure.errors import OutcomeUnknown, ToolError
from perdure.hooks import required
from perdure.tools.mcp.server import McpServer
from perdure.tools.registry import DidNotHappen, Effect, Happened, ToolContext, Unknown, tool

__all__ = [
    "Agent",
    "DidNotHappen",
    "Effect",
    "Happened",
    "McpServer",
    "OutcomeUnknown",
    "ToolContext",
    "ToolError",
    "Unknown",
    "required",
    "tool",
]
