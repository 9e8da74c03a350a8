"""`perdure send`, `perdure chat` and `perdure link`."""
