"""Recall: the search over a user's messages and memories. Called by prompts, tools, routes and commands."""
