"""Recall: the search over a user's messages and memories. Called by prompts, tools, routes and commands.

`search` finds and ranks messages and memories. `time_spans` finds the times that a question names. `past` reads what
memory has for a prompt besides the search.
"""
