"""The request bodies and the answers of the HTTP API as pydantic models, one module per resource.

Routes in `api` declare them; FastAPI checks bodies with them, serialises answers with them and makes the OpenAPI
document from them. `answer` holds what all of them share. Bodies that other channels send, too, are the domain's
(`Incoming`, `Decision`, `Feedback`); here they get their examples.
"""
