"""The request and response bodies of the HTTP API as pydantic models, one module per resource.

The routes in `api` declare the models; FastAPI uses them to validate requests, to serialise responses and to make the
OpenAPI document. `answer` contains shared parts. The bodies `Incoming`, `Decision` and `Feedback` are defined in the
domain; this package adds their examples.
"""
