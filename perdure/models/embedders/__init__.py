"""Embedders make vectors of texts: the protocol, the built-in, OpenAI and sentence-transformers embedders, the cache.

Called by memory and the CaseBank; `resolve` makes the embedder of `PERDURE_EMBEDDER`.
"""
