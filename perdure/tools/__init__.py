"""Tools: functions that a model may call.

`registry` makes a `Tool` of a function; `mcp/` has the tools of MCP servers; `awaited/` has the tools that a turn waits
for without a worker; `sources` has the protocol of all tools. `builtin`, `fetching`, `memory` and `reminders` have the
built-in tools. `variables` holds a session's working variables, `guarded` calls a tool through its breaker, `leaks`
counts threads that exceeded their time limit. `turns.calls` runs the tools.
"""
