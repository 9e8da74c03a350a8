"""`POST /v1/channels/{name}`: the webhook of a chat service.

The service's signature replaces a key. The OpenAPI document omits the route, because each service defines the
format of its requests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.background import BackgroundTask

from perdure.channels.http.body import read_body
from perdure.channels.http.dependencies import TheGateway
from perdure.channels.services.ingress import Answer, Ingress
from perdure.channels.services.protocol import Channel
from perdure.errors import Unauthorized

router = APIRouter(prefix="/channels", include_in_schema=False)

Chats = dict[str, tuple[Channel, Ingress]]


@router.post("/{name}")
async def receive(name: str, request: Request, gateway: TheGateway) -> Response:
    """Verify the signature of a service's webhook request, and handle the request's updates.

    A request to an unknown channel gets 401, like a request with a wrong signature. The response is sent after the
    updates are committed. A service that gets no response sends the request again. Answers, for example to a command,
    are sent after the response: services wait for the response for three seconds, and Discord refuses earlier answers.
    """
    chats: Chats = request.app.state.chats
    if name not in chats:
        raise Unauthorized("There is no such channel, or the request is not signed by its service.")
    channel, ingress = chats[name]
    body = await read_body(request)
    headers = {each.lower(): value for each, value in request.headers.items()}
    channel.verify(headers, body)
    gateway.admit()
    content, answers = await gateway.in_thread(partial(_handle, channel, ingress, headers, body))
    after = BackgroundTask(gateway.in_thread, partial(ingress.send, answers)) if answers else None
    return Response(background=after) if content is None else JSONResponse(content, background=after)


def _handle(channel: Channel, ingress: Ingress, headers: dict[str, str], body: bytes) -> tuple[Any, list[Answer]]:
    received = channel.receive(headers, body)
    return received.answer, [answer for update in received.updates for answer in ingress.handle(update)]
