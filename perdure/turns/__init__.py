"""Turns: accept → claim → step → settle → deliver."""
