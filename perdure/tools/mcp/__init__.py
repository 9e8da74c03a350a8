"""Tools of MCP servers: declared beside an agent, connected by the process that runs it.

    server.py       what an author declares
    connections.py  the connections of one process: their thread, their end
    connection.py         one server: connect, list, stay connected, ask
    tool.py         one tool of a server
    stdio.py        a server that is a child process
    http.py         a server at a URL
    inbox.py        what a server may send unasked
    results.py      what a server answers, as text for a model
    faults.py       how a call fails

A server is a stranger. It may be away, hang, die in the middle of a call, list nonsense and
send without end: none of it costs more than its own tools.
"""
