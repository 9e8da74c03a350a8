"""Telling the administrator: of the plan before anything is removed, and of the results after.

How a notice travels is handed in (`Post`): over HTTP it is a POST, signed as every callback
is. Without a URL the run's row and a warning in the log are the notice.
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

MOST_TOLD = 100
"""Lines of each kind in a notice; all of them are in the run."""

Event = Literal["casebank.plan", "casebank.outcome"]


class NotifyFailed(Exception):
    """The notice did not arrive, as far as is known; the message says why."""


Post = Callable[[str, bytes], None]
"""Sends a body to a URL, or raises `NotifyFailed`."""


def notify(
    event: Event,
    run: dict[str, Any],
    told: dict[str, Any],
    *,
    url: str | None,
    post: Post,
    pause: Callable[[float], object] = time.sleep,
    approval_within_s: float | None = None,
) -> None:
    """Tell of a run's plan or outcome; `approval_within_s` says that the plan is void unless somebody approves it.

    Raises:
        NotifyFailed: it did not arrive at any of the attempts.
    """
    counts = f"{told['removed_cases']} removed, {told['merged_cases']} merged, {told['archived_cases']} archived"
    spared = len(told["details"]["spared"])
    what = "plans" if event == "casebank.plan" else "is over"
    log.warning("run %s of the CaseBank %s: %s, %d spared", run["run_id"], what, counts, spared)
    if url is None:
        return
    body = json.dumps({**_body(event, run, told), "approval_within_s": approval_within_s}).encode()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            post(url, body)
        except NotifyFailed as error:
            log.warning("run %s: the notice failed at attempt %d: %s", run["run_id"], attempt, error)
            if attempt == ATTEMPTS:
                raise
            pause(RETRY_S * attempt)
        else:
            return


def _body(event: Event, run: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    details: dict[str, list[Any]] = told["details"]
    return {
        "event": event,
        "run_id": run["run_id"],
        "phase": run["phase"],
        **{name: told[name] for name in ("removed_cases", "merged_cases", "archived_cases")},
        "spared_cases": len(details["spared"]),
        "details": {name: lines[:MOST_TOLD] for name, lines in details.items()},
        "complete": all(len(lines) <= MOST_TOLD for lines in details.values()),
    }
