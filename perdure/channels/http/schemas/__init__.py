"""The request bodies and the answers of the HTTP API as pydantic models, one module per resource.

Routes in `api` declare them; FastAPI checks bodies with them, serialises answers with them and makes the OpenAPI
document from them. `answer` has their shared parts. Bodies that other channels also send (`Incoming`, `Decision`,
`Feedback`) are defined in the domain; this package adds their examples.
"""
