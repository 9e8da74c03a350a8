"""`/metrics`: the condition of the installation in Prometheus's text format, for administrators.

All gateways serve the same values, since they read the same servers. A scrape reads the servers only if the last
readings are older than `PERDURE_METRICS__EVERY_S`, and concurrent scrapes share one reading.
"""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, Request, Response

from perdure.channels.http.api.health import Lookup
from perdure.channels.http.dependencies import TheAdministrator
from perdure.channels.http.schemas.answer import WITH_KEY, problems
from perdure.errors import Unavailable
from perdure.observe.exposition import MEDIA_TYPE, Exposition
from perdure.observe.readings import Latest
from perdure.runtime import Runtime

router = APIRouter(tags=["health"], responses=problems(*WITH_KEY))

_TIMEOUT_S = 10.0
"""Prometheus's own time limit."""

_EXAMPLE = 'perdure_sessions_due{priority="5"} 3.0\n'


def lookup(runtime: Runtime, latest: Latest) -> Lookup[bytes]:
    """The text of the metrics."""
    made = cache(lambda: _exposition(runtime, latest))
    return Lookup(lambda: made().text(), _TIMEOUT_S)


def _exposition(runtime: Runtime, latest: Latest) -> Exposition:
    return Exposition(latest, {agent.name for agent in runtime.agents}, runtime.called_models())


@router.get(
    "/metrics",
    response_class=Response,
    response_description="The metrics.",
    responses={200: {"content": {MEDIA_TYPE.partition(";")[0]: {"schema": {"type": "string"}, "example": _EXAMPLE}}}},
)
async def read(request: Request, _admin: TheAdministrator) -> Response:
    """The condition of the installation in Prometheus's text format.

    The metrics of workers are served by the workers themselves, on the port `PERDURE_METRICS__WORKER_PORT`.
    """
    metrics: Lookup[bytes] = request.app.state.metrics
    try:
        return Response(await metrics.result(), media_type=MEDIA_TYPE)
    except TimeoutError:
        raise Unavailable("The servers do not answer in time.", retry_after_s=_TIMEOUT_S) from None
