"""Embedders, which make vectors of texts.

Contains the protocol, a cache, and six embedders: two built-in ones, OpenAI, FastEmbed, sentence-transformers and
WordLlama. Called by memory and the CaseBank; `resolve` makes the embedder of `PERDURE_EMBEDDER`.
"""
