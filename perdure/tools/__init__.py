"""Tools: plain functions that a model may call, what they declare, and the built-in ones."""
