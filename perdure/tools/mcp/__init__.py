"""Tools of MCP servers. An agent's author declares a server; the process that runs the agent connects to it.

    server.py             the declaration by an agent's author
    connections.py        the connections of one process, and their thread
    server_connection.py  one server: connect, list tools, reconnect, call
    tool.py               one tool of a server
    stdio.py              transport to a child process
    http.py               transport to a URL
    filtering.py          drops unsolicited messages of a server
    results.py            renders a server's answer as text for a model
    faults.py             the errors of a call

A server is untrusted. It may be unavailable or unresponsive, exit during a call, list invalid tools or send endless
data. None of these affects the tools of other servers.
"""
