"""The HTTP gateway: accepts messages and returns turns and transcripts.

    app.py            the application: routes, middleware, error handlers
    api/              the routes, one module per resource
    schemas/          request and response bodies as pydantic models
    body.py           reads request bodies: strict JSON of limited size
    parameters.py     path and query parameters
    dependencies.py   FastAPI dependencies: the gateway, the caller, the caller's access
    auth.py           identifies the caller by a key or a token
    gateway.py        the state that requests share, such as the pool of threads (threads.py)
    errors.py         errors as `application/problem+json`
    limits/           requests with wrong keys; what one user holds open, and the memory for responses
    middleware.py     adds headers, cuts off unread responses, handles escaped slashes in paths
    openapi.py        /openapi.json

Only this package imports FastAPI. The package imports no server: `perdure.cli.serve` serves the application, binds the
address and calls `Gateway.drain` at shutdown.
"""
