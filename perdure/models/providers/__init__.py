"""Model providers over their SDKs: OpenAI and Anthropic, their wire formats, the transport, error mapping.

Called through `models.resolve`; the OpenAI embedder shares the client.
"""
