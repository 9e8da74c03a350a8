"""Recall: the search over a user's messages and memories. Called by prompts, tools, routes and commands.

`search` finds and ranks; `time_spans` reads times from a question.
"""
