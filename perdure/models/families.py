"""The family of a model: the models among which a provider's opaque parts, such as signatures, are portable.

Vendors promise that for dated releases of one model only. `gpt-5` and `gpt-5-mini` are therefore two families.
"""

from __future__ import annotations

from perdure.text.patterns import compiled

_DATE = compiled(r"([-@:](20[0-9]{6}|20[0-9]{2}-[0-9]{2}-[0-9]{2}|latest|default))+$")


def family(model: str) -> str:
    """The family of the model called `model`, without the names of vendors and without a date.

    >>> family("google/gemini-3-pro"), family("claude-sonnet-5-20260115"), family("gpt-5-2025-08-07")
    ('gemini-3-pro', 'claude-sonnet-5', 'gpt-5')
    """
    name = model.casefold().rsplit("/", 1)[-1]
    found = _DATE.search(name)
    return name[: found.start()] if found and found.start() else name
