"""`POST /v1/messages`: accepts a message."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from fastapi import APIRouter, Response

from perdure.channels.http.body import FileRoute
from perdure.channels.http.dependencies import TheOpenGateway, TheUsers
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.turns import Accepted, IncomingBody
from perdure.turns.inbox import accept as accepting

router = APIRouter(tags=["messages"], route_class=FileRoute)


@router.post(
    "/messages",
    status_code=HTTPStatus.ACCEPTED,
    response_description="Accepted: the message gets a reply.",
    responses={
        200: {"model": Accepted, "description": "The message was accepted before."},
        **problems(*WITH_KEY, *WITH_BODY, 404, 409),
    },
)
async def accept(message: IncomingBody, gateway: TheOpenGateway, users: TheUsers, response: Response) -> Accepted:
    """Accept a message. The message is committed before the response, so it gets a reply even if a process crashes.

    If a message with the same `(user_id, channel, message_id)` was accepted before, the status is 200 and the ids are
    those of the first message.
    """
    accepted = await gateway.in_thread(partial(accepting.accept, gateway.runtime, users.address(message)))
    if accepted.duplicate:
        response.status_code = HTTPStatus.OK
    return Accepted.model_validate(accepted, from_attributes=True)
