"""The arguments of tasks as Flower, events and `celery inspect` show them: ids, never texts.

Celery copies what a publisher sends as `argsrepr` and `kwargsrepr` into events, which Flower keeps. Publishers of
perdure set both from here. For the tasks of other publishers the worker does (`perdure.tasks.request`).
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from perdure.text.patterns import compiled

HIDDEN = "(hidden)"

_SHOWN = ("session_id", "turn_id", "delivery_id")

_FROM_HERE = compiled(rf"\(\)|\{{\}}|\(hidden\)|\{{(('({'|'.join(_SHOWN)})': '[0-9a-f-]{{36}}'|\(hidden\))(, )?)+\}}")


def described(positional: object, named: object) -> dict[str, str]:
    """`argsrepr` and `kwargsrepr`, as Celery's `apply_async` takes them."""
    return {"argsrepr": HIDDEN if positional else "()", "kwargsrepr": _named(named)}


def hidden(text: str) -> str:
    """`text`, which some publisher or worker sent as the look of a task's arguments, if it is one from here."""
    return text if _FROM_HERE.fullmatch(text) else HIDDEN


def _named(arguments: object) -> str:
    """The ids among keyword arguments, and whether there are other arguments."""
    if not arguments:
        return "{}"
    if not isinstance(arguments, Mapping):
        return HIDDEN
    ids = [name for name in _SHOWN if _is_id(arguments.get(name))]
    parts = [f"{name!r}: {str(arguments[name])!r}" for name in ids]
    return "{" + ", ".join([*parts, *([HIDDEN] if len(ids) < len(arguments) else [])]) + "}"


def _is_id(value: object) -> bool:
    """Whether `value` is a UUID, which no text is."""
    try:
        return str(UUID(str(value))) == str(value)
    except ValueError:
        return False
