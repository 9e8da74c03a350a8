"""Files of the package `pydantic-ai-examples` 2.62.0, unchanged, under pydantic-ai's licence (LICENSE in this folder)."""
