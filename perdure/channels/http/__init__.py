"""The HTTP gateway: accepts messages, returns turns and transcripts.

    app.py            the application: routes, middleware, error handlers
    api/              the routes, one module per resource
    schemas/          request bodies and answers as pydantic models
    body.py           how a body is read: bounded, strict JSON
    parameters.py     parameters of paths and queries
    dependencies.py   FastAPI dependencies: the gateway, the caller, what the caller has access to
    auth.py           keys and callers; throttle.py limits wrong keys
    gateway.py        the shared state of requests: the runtime, threads (threads.py), waiting for turns
    errors.py         errors as `application/problem+json`
    middleware.py     headers of every answer; escaped slashes in paths
    openapi.py        /openapi.json

Only this package imports FastAPI. It imports no server: `perdure.cli.serve` serves the application, binds the address
and calls `Gateway.drain` at shutdown.
"""
