"""`search_tools`: a built-in tool that finds further tools of an agent that has more than fit a prompt.

The model calls it with words for what it needs. The tools that it finds are in the turn's next prompts. Which tools a
turn has found follows from its transcript: each search is repeated with the arguments that the model wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from perdure.errors import ToolError
from perdure.models.protocol import Message, ToolSchema
from perdure.text.linear import words
from perdure.text.untrusted import cut
from perdure.tools.registry import Tool, tool

MOST_FOUND = 8
"""The most tools that one search finds."""

_QUERY_CHARS = 200
_DESCRIPTION_CHARS = 300
_NAMES_CHARS = 4_000
_SHORTEST_STEM = 4
_IN_NAME = 2
_SIMILAR = 0.8


@tool(effect="pure")
def search_tools(query: str) -> Any:
    """Find more of your tools by what they do.

    You have more tools than you see. Search before you say that you cannot do something. You can call the tools that
    the search finds from your next step on.

    Args:
        query: Words for what the tool should do, or parts of its name, such as "create issue".
    """
    return _results(query, ())  # an agent's tool searches its tools: `over`


NAME = search_tools.name


def over(schemas: Callable[[], Sequence[ToolSchema]]) -> Tool:
    """The tool `search_tools` over the tools that `schemas` returns when it is called."""
    return replace(search_tools, function=lambda query: _results(query, schemas()))


def _results(query: str, tools: Sequence[ToolSchema]) -> Any:
    if found := find(query, tools):
        return [{"name": each.name, "description": cut(each.description, _DESCRIPTION_CHARS)} for each in found]
    names = cut(", ".join(each.name for each in tools), _NAMES_CHARS)
    return f"No tool matches. Search with other words. The names of all tools: {names}"


def find(query: str, tools: Sequence[ToolSchema]) -> list[ToolSchema]:
    """The tools whose names or descriptions have words of the query, the best first; at most `MOST_FOUND`.

    A word that few tools have counts for more, and a word of a name for twice as much. A word that another one begins
    with, such as `issue` and `issues`, counts for less than the same word.
    """
    known = [(_words(each.name), _words(each.description)) for each in tools]
    scores = [0.0] * len(tools)
    for wanted in sorted(_words(query[:_QUERY_CHARS])):
        matches = [max(_IN_NAME * _match(name, wanted), _match(described, wanted)) for name, described in known]
        rarity = math.log(1 + len(tools) / max(1, sum(each > 0 for each in matches)))
        scores = [score + rarity * each for score, each in zip(scores, matches, strict=True)]
    best = sorted(range(len(tools)), key=lambda at: -scores[at])
    return [tools[at] for at in best[:MOST_FOUND] if scores[at] > 0]


def found_in(messages: Iterable[Message], tools: Sequence[ToolSchema]) -> list[ToolSchema]:
    """The tools that the searches in a turn's `messages` find, the newest search first."""
    found: dict[str, ToolSchema] = {}
    for message in reversed([*messages]):
        for call in message.tool_calls:
            if call.name == NAME:
                try:
                    query = search_tools.parse(call.arguments)["query"]
                except ToolError:  # the call was refused with this message
                    continue
                for each in find(query, tools):
                    found.setdefault(each.name, each)
    return [*found.values()]


def _words(text: str) -> set[str]:
    return {each.casefold() for each in words(text.replace("_", " "))}


def _match(known: set[str], wanted: str) -> float:
    if wanted in known:
        return 1
    similar = any(
        min(len(each), len(wanted)) >= _SHORTEST_STEM and (each.startswith(wanted) or wanted.startswith(each))
        for each in known
    )
    return _SIMILAR if similar else 0
