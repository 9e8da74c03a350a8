"""Tools: functions that a model may call.

`registry` makes a `Tool` of a function; `mcp/` has the tools of MCP servers; `sources` has the protocol of both.
`builtin`, `fetching` and `memory` are built in. `variables` holds a session's working variables, `guarded` calls a tool
through its breaker, `leaks` counts threads that ran past their time limit. `turns.calls` runs the tools.
"""
