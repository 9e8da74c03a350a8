"""The HTTP gateway: messages in, turns and transcripts out, as CONTRACT.md gives the routes.

    app.py        the application, put together
    gateway.py    what its requests share: the runtime, threads for blocking work, waiting
    threads.py    threads for blocking work
    auth.py       who calls
    requests.py   what came in, bounded and checked
    problems.py   what went wrong, as `application/problem+json`
    schema.py     what is taken and answered
    document.py   /openapi.json
    messages.py, turns.py, sessions.py, memory.py, users.py, health.py    the routes

The one place in the domain that knows FastAPI. It knows no server: who serves the
application decides on the address, and calls `Gateway.stop` when it shuts down.
"""
