"""Tools: functions that a model may call.

`registry` makes a `Tool` of a function; `mcp/` has the tools of MCP servers, `awaited/` those that a turn waits for
without a worker; `sources` has their common protocol. `builtin`, `fetching`, `memory` and `reminders` have the built-in
tools. `variables` holds a session's working variables, `guarded` calls a tool through its breaker, `leaks` counts
threads that exceeded their time limit. `turns.calls` runs the tools.
"""
