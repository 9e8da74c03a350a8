"""Tools: functions that a model may call.

    registry    makes a `Tool` from a function
    mcp/        tools of MCP servers
    awaited/    tools that make a turn wait; the wait occupies no worker
    sources     the protocol of all tools
    builtin, fetching, memory, reminders    the built-in tools
    variables   a session's working variables
    guarded     calls a tool through its breaker
    event_loop  runs `async def` tools
    docstring   splits a tool's docstring
    leaks       counts threads that exceeded their time limit

`perdure.turns.calls` runs the tools.
"""
