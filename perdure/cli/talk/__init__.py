"""`perdure send` and `perdure chat`."""
