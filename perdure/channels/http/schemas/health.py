"""The response bodies of `/healthz` and `/readyz`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perdure.channels.http.schemas.answer import Answer, Instant, examples


class KilledWorker(Answer):
    """A worker that was killed by its watchdog because none of its threads ran for `silent_s` seconds."""

    worker: str
    pid: int
    silent_s: float
    killed_at: Instant


class Health(Answer):
    """The gateway is alive or ready. `killed_workers` is absent if no worker was killed within the last hour."""

    model_config = examples({"status": "ready"})

    status: Literal["alive", "ready"]
    killed_workers: list[KilledWorker] = Field(default=[])
