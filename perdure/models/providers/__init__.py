"""Model providers, which call OpenAI and Anthropic through their SDKs.

Contains the wire formats, the HTTP transport and the mapping of errors. Called through `models.resolve`; the OpenAI
embedder shares the OpenAI client.
"""
