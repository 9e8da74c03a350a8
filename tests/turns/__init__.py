"""The life of a turn."""
