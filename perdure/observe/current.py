"""Which session and turn this thread works for, for the lines of the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from uuid import UUID

_ids: ContextVar[dict[str, str]] = ContextVar("perdure_ids", default={})  # noqa: B039 (it is never changed)


def ids() -> dict[str, str]:
    """The ids of this thread's work, by name, such as `turn_id`."""
    return _ids.get()


@contextmanager
def working_on(**given: UUID) -> Iterator[None]:
    """Add ids for the duration of the block."""
    token = _ids.set({**_ids.get(), **{name: str(value) for name, value in given.items()}})
    try:
        yield
    finally:
        _ids.reset(token)
