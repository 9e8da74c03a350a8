"""What `perdure chat` shows while a turn runs."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.status import Status

from perdure.cli.talk.prompt import _LiveReply
from perdure.events.event import Event, EventId, EventKind


def test_progress_takes_the_place_of_the_status() -> None:
    """The tool's report is shown without control characters until the call has its result."""
    status = Status("thinking", console=Console(file=StringIO()))
    reply = _LiveReply(lambda _: None, status)
    seen = []
    for kind, data in (
        (EventKind.PROGRESS, {"call_id": "c", "tool": "search", "text": "3 of 9\x1b[31m"}),
        (EventKind.TOOL_RESULT, {"id": "c", "content": "found"}),
    ):
        reply.show(Event(EventId(1), kind, data))
        seen.append(str(status.status))
    assert seen[0].startswith("search: 3 of 9")
    assert "\x1b" not in seen[0]
    assert seen[1] == "thinking"
