"""Notices to the administrator: the plan before cases are removed, and the outcome afterwards.

The caller passes the transport (`Post`), which signs a notice like a callback and sends it as an HTTP POST. Without a
URL, `notify` only logs a warning with the counts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

log = logging.getLogger(__name__)

ATTEMPTS = 3
RETRY_S = 2.0

MOST_DETAILS = 100
"""The maximum number of items of each kind in a notice. The stored run has all items."""

Event = Literal["casebank.plan", "casebank.outcome"]


class NotifyFailed(Exception):
    """The receiver did not confirm the notice; the message says why."""


Post = Callable[[str, bytes], None]
"""Sends a body to a URL, or raises `NotifyFailed`."""


def notify(
    event: Event,
    run: dict[str, Any],
    summary: dict[str, Any],
    *,
    url: str | None,
    post: Post,
    pause: Callable[[float], object] = time.sleep,
    approval_within_s: float | None = None,
) -> None:
    """Send a run's plan or outcome. A plan expires if it is not approved within `approval_within_s` seconds.

    Raises:
        NotifyFailed: all `ATTEMPTS` failed.
    """
    counts = (
        f"{summary['removed_cases']} removed, {summary['merged_cases']} merged, {summary['archived_cases']} archived"
    )
    spared = len(summary["details"]["spared"])
    what = "plans" if event == "casebank.plan" else "is over"
    log.warning("run %s of the CaseBank %s: %s, %d spared", run["run_id"], what, counts, spared)
    if url is None:
        return
    body = json.dumps({**_body(event, run, summary), "approval_within_s": approval_within_s}).encode()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            post(url, body)
        except NotifyFailed as error:
            log.warning("run %s of the CaseBank: the notice failed at attempt %d: %s", run["run_id"], attempt, error)
            if attempt == ATTEMPTS:
                raise
            pause(RETRY_S * attempt)
        else:
            return


def _body(event: Event, run: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    details: dict[str, list[Any]] = summary["details"]
    return {
        "event": event,
        "run_id": run["run_id"],
        "phase": run["phase"],
        **{name: summary[name] for name in ("removed_cases", "merged_cases", "archived_cases")},
        "spared_cases": len(details["spared"]),
        "details": {name: items[:MOST_DETAILS] for name, items in details.items()},
        "complete": all(len(items) <= MOST_DETAILS for items in details.values()),
    }
