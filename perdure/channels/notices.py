"""The context of CaseBank runs, which POSTs signed notices to `PERDURE_CASEBANK__NOTIFY_URL`.

The operator sets that URL, so it need not be public.
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
    """A `RunContext` that POSTs its notices, and calls `pause` with the seconds for which it waits.

    Threads may share it.
    """

    def post(url: str, body: bytes) -> None:
        settings = runtime.settings
        message_id = hashlib.sha256(body).hexdigest()[
            :_ID_DIGITS
        ]  # a repeated notice has the same text and so the same id, by which the receiver deduplicates
        try:
            UrlCarrier(settings.webhook_keys(), settings.signing_key(), ANYWHERE).carry({"url": url}, body, message_id)
        except DeliveryFailed as error:
            raise NotifyFailed(str(error)) from error

    return RunContext(runtime.database, runtime.clock, runtime.settings.casebank, post, pause)
