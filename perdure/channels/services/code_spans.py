"""Finds the code in Markdown, which Slack and Discord show as it is."""

from __future__ import annotations

from collections.abc import Callable

from perdure.text.patterns import compiled

_CODE = compiled("(?s)```.*?```|`[^`\n]*`")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`text`, with `change` applied to the pieces between code."""
    pieces: list[str] = []
    end = 0
    for code in _CODE.finditer(text):
        pieces += [change(text[end : code.start()]), text[code.start() : code.end()]]
        end = code.end()
    return "".join([*pieces, change(text[end:])])
