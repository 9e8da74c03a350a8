"""The HTTP gateway: accepts messages and returns turns and transcripts.

    app.py            the application: routes, middleware, error handlers
    api/              the routes, one module per resource
    schemas/          request and response bodies as pydantic models
    body.py           reads request bodies: bounded, strict JSON
    parameters.py     path and query parameters
    dependencies.py   FastAPI dependencies: the gateway, the caller, the caller's access
    auth.py           keys and callers; throttle.py limits wrong keys
    gateway.py        the shared state of requests: the runtime, threads (threads.py), waiting for turns
    errors.py         errors as `application/problem+json`
    middleware.py     headers of every response; escaped slashes in paths
    openapi.py        /openapi.json

Only this package imports FastAPI. It imports no server: `perdure.cli.serve` serves the application, binds the address
and calls `Gateway.drain` at shutdown.
"""
