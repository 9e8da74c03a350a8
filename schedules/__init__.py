"""What beat fires, and when: the entries, in the zone of `PERDURE_TIMEZONE`.

An entry belongs here with the task that does its work. The turn itself needs none: what must
happen for a message to be answered is swept for by every worker, and waits for no beat.
"""

from __future__ import annotations

from typing import Any


def entries() -> dict[str, dict[str, Any]]:
    """Celery's `beat_schedule`."""
    return {}
