"""Implements `Model` for OpenAI and Anthropic, through each vendor's SDK.

The package contains the wire formats, the HTTP transport and the mapping of errors. `models.resolve` creates the
models. The OpenAI embedder uses the OpenAI client of this package.
"""
