"""Builds the context of runs that prune the CaseBank, and POSTs their signed notices.

The URL of the notices, `PERDURE_CASEBANK__NOTIFY_URL`, may have a private address, because only the operator sets it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from perdure.casebank.runs.notify import NotifyFailed
from perdure.casebank.runs.prune import RunContext
from perdure.channels.callback import UrlCarrier
from perdure.network.reply_urls import ANYWHERE
from perdure.runtime import Runtime
from perdure.turns.outbox import DeliveryFailed

_ID_DIGITS = 32


def bank_of(runtime: Runtime, pause: Callable[[float], object] = time.sleep) -> RunContext:
    """A `RunContext` that POSTs its notices, and calls `pause` to wait a number of seconds.

    Threads may share the context.
    """

    def post(url: str, body: bytes) -> None:
        settings = runtime.settings
        # A repeated notice has the same text and therefore the same id, so a receiver can detect the duplicate.
        message_id = hashlib.sha256(body).hexdigest()[:_ID_DIGITS]
        try:
            UrlCarrier(settings.webhook_keys(), ANYWHERE).carry({"url": url}, body, message_id)
        except DeliveryFailed as error:
            raise NotifyFailed(str(error)) from error

    return RunContext(runtime.database, runtime.clock, runtime.settings.casebank, post, pause)
