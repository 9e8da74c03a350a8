"""The CaseBank with the parts of a process: its notices go where `PERDURE_CASEBANK__NOTIFY_URL` says, signed."""

from __future__ import annotations

import time
from collections.abc import Callable

from perdure.casebank.notify import NotifyFailed
from perdure.casebank.prune import Bank
from perdure.channels.callback import UrlCarrier
from perdure.runtime import Runtime
from perdure.turns.outbox import DeliveryFailed


def bank_of(runtime: Runtime, pause: Callable[[float], object] = time.sleep) -> Bank:
    """How this process plans and runs. Threads may share it. `pause` is the `Bank`'s."""

    def post(url: str, body: bytes) -> None:
        try:
            UrlCarrier(runtime.settings.signing_key()).carry({"url": url}, body)
        except DeliveryFailed as error:
            raise NotifyFailed(str(error)) from error

    return Bank(runtime.database, runtime.clock, runtime.settings.casebank, post, pause)
