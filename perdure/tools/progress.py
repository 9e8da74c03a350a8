"""Progress of a running tool call: a short text for those who follow the turn.

A tool reports it with `ToolContext.progress`, or with `progress` where it has no context, as a tool of pydantic-ai. It
is an event of the turn's stream, and is not stored: a crash, or a turn that nobody follows, loses it. Reports are
bounded in size, and those that follow each other within one batch of the stream are one event, the newest. Reporting
never blocks a tool and never fails it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar

from perdure.text.untrusted import storable

log = logging.getLogger(__name__)

MAX_CHARS = 200
"""The longest report. The rest of a longer one is cut off."""

Report = Callable[[str], None]

reporter: ContextVar[Report | None] = ContextVar("perdure_progress", default=None)
"""Takes the reports of the tool call that runs in the present context."""


def progress(text: object) -> None:
    """Report the progress of the running tool call, such as `3 of 9`. Does nothing outside a tool call.

    Example:
        >>> @tool(effect="pure")
        ... def search(topics: list[str]) -> str:
        ...     '''Search for topics.'''
        ...     for number, topic in enumerate(topics, start=1):
        ...         progress(f"{number} of {len(topics)}")
        ...     return "nothing found"
        >>> librarian = Agent("librarian", "You search.", tools=[search])
        >>> model = Scripted(call("search", topics=["tea", "milk"]), "Nothing.")
        >>> ask(librarian, "Tea and milk?", model=model).calls[0].progress
        ('1 of 2', '2 of 2')
    """
    report(reporter.get(), text)


def report(to: Report | None, text: object) -> None:
    """Pass a report on, cut to `MAX_CHARS`. Logs an error instead of raising it."""
    if to is None:
        return
    try:
        shown = storable(str(text))
        to(shown if len(shown) <= MAX_CHARS else shown[: MAX_CHARS - 1] + "…")
    except Exception:
        log.exception("a report of progress was lost")
