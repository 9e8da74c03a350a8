"""The OpenAI-compatible routes: `/v1/chat/completions`, `/v1/models`, `/v1/responses`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Body, Query, Request, Response

from perdure.access.tenants import UserKey
from perdure.channels.http.body import HistoryRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheOpenGateway, TheUsers, require_turn
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.limits.shares import CHUNKED_BYTES, MOST_UNSENT_OF_USER
from perdure.channels.http.openai import answers, chat_completions, responses, side_requests
from perdure.channels.http.openai.asked import Asked, begun, read_whole, repeat_of
from perdure.channels.http.openai.caller import (
    Place,
    is_open_webui,
    place_of,
)
from perdure.channels.http.openai.errors import BadParameter, UnknownModel, respond, settled_failure
from perdure.channels.http.openai.wire import (
    ChatRequest,
    ResponseRequest,
    exchange_of,
    has_failed,
    newest_user_message,
    require_usable,
)
from perdure.channels.http.stream import sse
from perdure.errors import NotFound
from perdure.events.event import EventId
from perdure.runtime import Runtime
from perdure.turns.calls import client
from perdure.turns.calls.client import Exchange
from perdure.turns.cancel import cancel
from perdure.turns.reading import SETTLED, TurnPlace, find_owner, owner, read_place, read_turn

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["openai"], route_class=HistoryRoute)

_CANCEL_S = 2.0
"""Seconds that a cancellation waits for its turn to settle."""

_ANY: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}, sse.MEDIA_TYPE: {}}}
_ERROR: dict[str, Any] = {
    "description": "An error in OpenAI's shape.",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


@router.get("/models", responses={200: _ANY, **_ERRORS}, response_description="The agents.")
async def models(_caller: TheCaller, gateway: TheGateway) -> Response:
    """List the agents as models."""
    return respond({"object": "list", "data": [_model(agent.name) for agent in gateway.runtime.agents]}, HTTPStatus.OK)


@router.get("/models/{name}", responses={200: _ANY, **_ERRORS}, response_description="The agent.")
async def model(name: str, _caller: TheCaller, gateway: TheGateway) -> Response:
    """Return an agent, described as an OpenAI model."""
    _require_model(gateway.runtime, name)
    return respond(_model(name), HTTPStatus.OK)


@router.post("/chat/completions", responses={200: _ANY, **_ERRORS}, response_description="The completion.")
async def completions(
    body: Annotated[ChatRequest, Body()], request: Request, gateway: TheOpenGateway, users: TheUsers
) -> Response:
    """Answer the newest user message in a turn of the durable conversation; respond with a chat completion.

    A request that brings the results of tools that the client runs goes on with their turn.
    """
    require_usable(body, ignores_unknown=is_open_webui(request, users))
    _require_model(gateway.runtime, body.model)
    place = place_of(request, body, users, is_open=gateway.is_open)
    if side_requests.is_side_request(request.headers):
        said = newest_user_message(body.messages, "messages")
        repeat = await gateway.in_thread(partial(repeat_of, request, place, body, said, body.messages))
        body.messages.clear()
        gateway.release_body(request)
        found = await gateway.side_requests.answer(users.caller, repeat.message)
        return sse.response(side_requests.as_stream(found)) if body.stream else respond(found, HTTPStatus.OK)
    asked = Asked(gateway, request, users, place, body)
    exchange, note = await asked.accept(body.messages)
    agent = _agent_name(gateway.runtime, body.model)
    if not asked.is_new:
        agent = (await gateway.in_thread(partial(_place_of, gateway.runtime, exchange)))[1].agent
    if not body.stream:
        answer = await asked.answered(exchange)
        if has_failed(answer.turn):
            await note()
            return settled_failure(answer.turn)
        completion = chat_completions.completion_of(exchange, answer.turn, agent)
        await note()  # before the response, which is sent in one write
        whole = completion.whole(answer.turn, answer.text, answer.used, answer.client_calls)
        return respond(whole, HTTPStatus.OK)
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    completion = chat_completions.completion_of(exchange, await _turn(gateway, exchange.turn_id), agent)
    parts = await asked.begun(_parts(gateway, request, exchange))
    chunks = chat_completions.stream(completion, parts, include_usage=usage, on_sent=note)
    return sse.response(asked.watched(chunks))


@router.post("/responses", responses={200: _ANY, **_ERRORS}, response_description="The response.")
async def create_response(
    body: Annotated[ResponseRequest, Body()], request: Request, gateway: TheOpenGateway, users: TheUsers
) -> Response:
    """Answer the newest user message in a turn of the durable conversation; respond with a response object.

    A request that brings the results of tools that the client runs goes on with their turn.
    """
    require_usable(body, ignores_unknown=is_open_webui(request, users))
    _require_model(gateway.runtime, body.model)
    place = await _response_place(gateway, request, body, users)
    seen = {"input": body.items(), "previous": body.previous_response_id}
    asked = Asked(gateway, request, users, place, body)
    exchange, note = await asked.accept([seen], seen)
    made = responses.Response(
        exchange,
        _agent_name(gateway.runtime, body.model),
        place.conversation,
        body.previous_response_id,
        bool(body.background),
        asked.additions,
        responses.format_of(body),
    )
    if not asked.is_new:
        made = await gateway.in_thread(partial(_found, gateway.runtime, made))
    if body.stream:
        turn = await _turn(gateway, exchange.turn_id)
        parts = _keeping(gateway, request, place.user, await asked.begun(_parts(gateway, request, exchange)))
        events = responses.stream(made, turn, parts, None, note)
        return sse.response(asked.watched(events))
    if body.background:
        turn = await _turn(gateway, exchange.turn_id)
        await note()
        return respond(made.body(turn), HTTPStatus.OK)
    answer = await asked.answered(exchange)
    await note()
    if has_failed(answer.turn):
        return settled_failure(answer.turn)
    return respond(made.body(answer.turn, answer), HTTPStatus.OK)


@router.get("/responses/{response_id}", responses={200: _ANY, **_ERRORS}, response_description="The response.")
async def read_response(
    response_id: str,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    *,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> Response:
    """Read a response, or stream it from its beginning or after the sequence number `starting_after`."""
    exchange = await _exchange_of(gateway, caller, response_id)
    made = await gateway.in_thread(partial(_response, gateway.runtime, exchange))
    if not stream:
        return respond(_whole(made, await read_whole(gateway, request, exchange)), HTTPStatus.OK)
    turn = await _turn(gateway, exchange.turn_id)
    user = await gateway.in_thread(partial(owner, gateway.runtime.database, exchange.turn_id))
    gateway.attend(request, exchange.turn_id)
    parts = await begun(gateway, request, _parts(gateway, request, exchange))
    return sse.response(responses.stream(made, turn, _keeping(gateway, request, user, parts), starting_after))


@router.post("/responses/{response_id}/cancel", responses={200: _ANY, **_ERRORS}, response_description="The response.")
async def cancel_response(response_id: str, gateway: TheGateway, caller: TheCaller, request: Request) -> Response:
    """Cancel a running response; a settled response does not change."""
    exchange = await _exchange_of(gateway, caller, response_id)
    await gateway.in_thread(partial(cancel, gateway.runtime, exchange.turn_id))
    await gateway.until_settled(exchange.turn_id, _CANCEL_S, request)
    made = await gateway.in_thread(partial(_response, gateway.runtime, exchange))
    return respond(_whole(made, await read_whole(gateway, request, exchange)), HTTPStatus.OK)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "perdure"}


def _require_model(runtime: Runtime, name: str) -> None:
    if name and name not in {agent.name for agent in runtime.agents}:
        raise UnknownModel(f"model: there is no agent {name[:100]!r}; GET /v1/models lists them.", "model")


def _agent_name(runtime: Runtime, model: str) -> str:
    return model or runtime.agents.default.name


async def _response_place(gateway: Gateway, request: Request, body: ResponseRequest, users: TheUsers) -> Place:
    """The user and the conversation; `previous_response_id` or `conversation` overrides the request's headers."""
    place = place_of(request, body, users, is_open=gateway.is_open)
    if body.previous_response_id is not None:
        if body.conversation is not None:
            raise BadParameter("Give previous_response_id or conversation, not both.", "previous_response_id")
        before = exchange_of(body.previous_response_id)
        if before is None:
            raise NotFound("previous_response_id: there is no such response.")
        found = await gateway.in_thread(partial(_conversation, gateway.runtime, place.user, before.turn_id))
        return Place(place.user, place.user_id, found.conversation)
    if body.conversation is not None:
        return Place(place.user, place.user_id, body.conversation.id)
    return place


async def _exchange_of(gateway: Gateway, caller: TheCaller, response_id: str) -> Exchange:
    exchange = exchange_of(response_id)
    if exchange is None:
        raise NotFound("There is no such response.")
    turn_id = await gateway.in_thread(partial(require_turn, gateway, caller, exchange.turn_id))
    return await gateway.in_thread(partial(_existing, gateway.runtime, exchange, turn_id))


def _existing(runtime: Runtime, exchange: Exchange, turn_id: UUID) -> Exchange:
    """The exchange in the turn `turn_id`, which its turn may have joined.

    Raises:
        NotFound: no exchange of the turn begins there.
    """
    stops = client.read_stops(runtime.database, turn_id) if exchange.after else ()
    if exchange.after and not any(stop.number == exchange.after for stop in stops):
        raise NotFound("There is no such response.")
    return client.joined(runtime.database, exchange, turn_id)


async def _turn(gateway: Gateway, turn_id: UUID) -> dict[str, Any]:
    return await gateway.in_thread(partial(read_turn, gateway.runtime.database, turn_id))


async def _keeping(
    gateway: Gateway, request: Request, user: UserKey | None, parts: AsyncIterator[answers.Part]
) -> AsyncIterator[answers.Part]:
    """`parts` for a response that keeps their text until its end, in memory that is reserved until then.

    Reserves up to half of the memory of `user`, for the text and for an event with the whole text.

    Raises:
        RateLimited: the clients of `user`, or all clients, have too many unread responses.
    """
    size = reserved = 0
    async for part in parts:
        if isinstance(part, answers.Text):
            size += 2 * len(part.text)
            while reserved < min(size, MOST_UNSENT_OF_USER // 2):
                reserved += CHUNKED_BYTES
                await gateway.reserve(request, user, CHUNKED_BYTES)
        yield part


async def _parts(gateway: Gateway, request: Request, exchange: Exchange) -> AsyncIterator[answers.Part]:
    gateway.require_room()
    database = gateway.runtime.database
    last = EventId(exchange.after) if exchange.after else None

    async def read() -> answers.Progress:
        return await gateway.in_thread(partial(answers.read_progress, database, exchange))

    async def used(progress: answers.Progress | None) -> dict[str, Any]:
        stop = None if progress is None else progress.stop
        return await gateway.in_thread(partial(client.used_in, database, exchange, stop))

    async with aclosing(gateway.events(request, exchange.turn_id, last, sse.HEARTBEAT_S)) as events:
        async for part in answers.follow(events, exchange, read, used):
            yield part


def _whole(made: responses.Response, answer: answers.CommittedAnswer) -> dict[str, Any]:
    is_said = answer.stop is not None or (answer.turn["status"] in SETTLED and not has_failed(answer.turn))
    return made.body(answer.turn, answer if is_said else None)


def _response(runtime: Runtime, exchange: Exchange) -> responses.Response:
    place = read_place(runtime.database, exchange.turn_id)
    additions = client.read_additions(runtime.database, exchange.turn_id)
    return responses.response_of(exchange, place.agent, place.conversation, additions)


def _found(runtime: Runtime, made: responses.Response) -> responses.Response:
    """`made` for a turn that another request has begun. Its agent and its conversation may be others.

    So may be what that request adds to the agent, unless this one goes on with the turn.
    """
    turn_id, place = _place_of(runtime, made.exchange)
    if made.exchange.after:
        return replace(made, agent=place.agent, conversation=place.conversation)
    additions = client.read_additions(runtime.database, turn_id)
    return responses.response_of(made.exchange, place.agent, place.conversation, additions)


def _place_of(runtime: Runtime, exchange: Exchange) -> tuple[UUID, TurnPlace]:
    """The turn of an exchange, which its message may have joined, with its agent and conversation."""
    turn_id = UUID(read_turn(runtime.database, exchange.turn_id)["turn_id"])
    return turn_id, read_place(runtime.database, turn_id)


def _conversation(runtime: Runtime, user: UserKey, turn_id: UUID) -> TurnPlace:
    """The agent and the conversation of a user's turn.

    Raises:
        NotFound: the user has no such turn.
    """
    found = find_owner(runtime.database, turn_id)
    if found is None or found[0] != user:
        raise NotFound("previous_response_id: there is no such response.")
    return read_place(runtime.database, turn_id)
