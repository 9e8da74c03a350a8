"""Embedders, which make vectors of texts.

Contains the protocol, a cache, and five embedders: built-in, OpenAI, FastEmbed, sentence-transformers and WordLlama.
Called by memory and the CaseBank; `resolve` makes the embedder of `PERDURE_EMBEDDER`.
"""
