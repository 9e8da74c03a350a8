"""`/v1/deliveries`: the deliveries of replies, for administrators."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query, Request

from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheAdministrator, TheGateway
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.operating import Delivery, ResendFailed, Resent
from perdure.turns import outbox

router = APIRouter(prefix="/deliveries", tags=["operating"], route_class=StrictRoute, responses=problems(*WITH_KEY))

_DEFAULT_LIMIT = 100

Status = Annotated[Literal["pending", "delivered", "failed"] | None, Query(description="Only of this status.")]
Limit = Annotated[int, Query(ge=1, le=1_000, description="At most this many deliveries.")]


@router.get("", response_description="The deliveries.", responses=problems(400))
async def list_(
    gateway: TheGateway, _admin: TheAdministrator, status: Status = None, limit: Limit = _DEFAULT_LIMIT
) -> list[Delivery]:
    """List deliveries, the newest first.

    Of the pending ones, those that are due next come first; of the failed ones, those that were abandoned last.
    """
    listed = partial(outbox.list_deliveries, gateway.runtime.database, status=status, limit=limit)
    return [Delivery.model_validate(each) for each in await gateway.in_thread(listed)]


@router.post(
    "/{delivery_id}/resend",
    status_code=HTTPStatus.ACCEPTED,
    response_description="The delivery is due.",
    responses=problems(404),
    dependencies=[audited("deliveries.resend", "delivery_id")],
)
async def resend(delivery_id: parameters.IdPath, gateway: TheGateway, _admin: TheAdministrator) -> Resent:
    """Send a delivery again, with the same id and a new series of attempts."""
    await gateway.in_thread(partial(_resend, gateway, delivery_id))
    return Resent(deliveries=1, due=True)


@router.post(
    "/resend",
    status_code=HTTPStatus.ACCEPTED,
    response_description="The failed deliveries are due, or counted.",
    responses=problems(*WITH_BODY),
    dependencies=[audited("deliveries.resend")],
)
async def resend_failed(
    wanted: Annotated[ResendFailed, Body(default_factory=ResendFailed)],
    request: Request,
    gateway: TheGateway,
    _admin: TheAdministrator,
) -> Resent:
    """Send all failed deliveries again, or only count them (`dry_run`)."""
    work = partial(outbox.resend_failed, gateway.runtime.database, wanted.to, dry_run=wanted.dry_run)
    count = await gateway.in_thread(work)
    describe(request, note=f"{count} failed{' to ' + wanted.to if wanted.to else ''}{', dry run' * wanted.dry_run}")
    return Resent(deliveries=count, due=not wanted.dry_run)


def _resend(gateway: Gateway, delivery_id: str) -> None:
    wanted = parameters.parse_id(delivery_id, "delivery")
    outbox.resend(gateway.runtime.database, wanted)
    gateway.runtime.wake.delivery(wanted)
