"""Masks the arguments of tasks, except ids, in Celery's events, Flower and `celery inspect`.

Celery copies the `argsrepr` and `kwargsrepr` of a message into events, which Flower stores. perdure's publishers set
both options with `described`. For messages of other publishers, the worker masks the arguments
(`perdure.tasks.request`).
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from perdure.text.patterns import compiled

HIDDEN = "(hidden)"

_SHOWN = ("session_id", "turn_id", "delivery_id")

_DESCRIBED = compiled(rf"\(\)|\{{\}}|\(hidden\)|\{{(('({'|'.join(_SHOWN)})': '[0-9a-f-]{{36}}'|\(hidden\))(, )?)+\}}")


def described(positional: object, named: object) -> dict[str, str]:
    """The options `argsrepr` and `kwargsrepr` of Celery's `apply_async`. They show only the ids among `named`."""
    return {"argsrepr": HIDDEN if positional else "()", "kwargsrepr": _named(named)}


def hidden(text: str) -> str:
    """`text` (an event's representation of arguments) if it has the form that `described` returns; else `HIDDEN`."""
    return text if _DESCRIBED.fullmatch(text) else HIDDEN


def _named(arguments: object) -> str:
    """The ids among the keyword arguments, followed by `HIDDEN` if there are other arguments."""
    if not arguments:
        return "{}"
    if not isinstance(arguments, Mapping):
        return HIDDEN
    ids = [name for name in _SHOWN if _is_id(arguments.get(name))]
    parts = [f"{name!r}: {str(arguments[name])!r}" for name in ids]
    return "{" + ", ".join([*parts, *([HIDDEN] if len(ids) < len(arguments) else [])]) + "}"


def _is_id(value: object) -> bool:
    try:
        return str(UUID(str(value))) == str(value)
    except ValueError:
        return False
