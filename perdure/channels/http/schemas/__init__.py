"""The request and response bodies of the HTTP API as pydantic models, one module per resource.

The routes in `api` declare the models; FastAPI uses them to validate requests, to serialise responses and to make the
OpenAPI document. The module `answer` contains what the other modules share. The bodies `Incoming`, `Decision` and
`Feedback` are defined in `perdure.turns`; this package adds their examples.
"""
