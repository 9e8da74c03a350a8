"""Embedders, which make vectors of texts.

Contains the protocol, a cache, and three embedders: built-in, OpenAI and sentence-transformers. Called by memory and
the CaseBank; `resolve` makes the embedder of `PERDURE_EMBEDDER`.
"""
