"""The OpenAI-compatible routes: `/v1/chat/completions`, `/v1/models`, `/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Body, Query, Request, Response

from perdure.access.tenants import UserKey
from perdure.channels.http.body import FileRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheOpenGateway, TheUsers, require_turn
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.limits.shares import CHUNKED_BYTES, MOST_UNSENT_OF_USER
from perdure.channels.http.openai import answers, chat_completions, responses, side_requests
from perdure.channels.http.openai.caller import Place, idempotency_key, place_of
from perdure.channels.http.openai.errors import BadParameter, UnknownModel, respond, settled_failure
from perdure.channels.http.openai.repeats import CHANNEL, accept_once, note_sent
from perdure.channels.http.openai.repeats import RepeatableRequest as Repeat
from perdure.channels.http.openai.wire import (
    ChatRequest,
    ResponseRequest,
    newest_user_message,
    require_usable,
    turn_of,
)
from perdure.channels.http.stream import sse
from perdure.errors import DeadlineExceeded, NotFound
from perdure.runtime import Runtime
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted
from perdure.turns.inbox.incoming import parse_submitted
from perdure.turns.reading import SETTLED, TurnPlace, find_owner, owner, read_place, read_turn

router = APIRouter(prefix="/v1", tags=["openai"], route_class=FileRoute)

_WAIT_S = 600.0
"""Seconds that a request waits for its turn to settle; the SDK's own time limit is ten minutes."""

_CANCEL_S = 2.0
"""Seconds that a cancellation waits for its turn to settle."""

_ANY: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}, sse.MEDIA_TYPE: {}}}
_ERROR: dict[str, Any] = {
    "description": "An error in OpenAI's shape.",
    "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}
_LATE = "The answer is not ready yet. Send the request again: it finds the same turn."


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
    """Answer the newest user message in a turn of the durable conversation; respond with a chat completion."""
    require_usable(body)
    _require_model(gateway.runtime, body.model)
    said = newest_user_message(body.messages, "messages")
    place = place_of(request, body, users)
    repeat = await gateway.in_thread(partial(_repeat, request, place, body, said, body.messages))
    if side_requests.is_side_request(request.headers):
        found = await gateway.side_requests.answer(users.caller, repeat.message)
        return sse.response(side_requests.as_stream(found)) if body.stream else respond(found, HTTPStatus.OK)
    accepted, repeat = await _accepted(gateway, request, repeat, said, body.messages)
    note = partial(gateway.in_thread, partial(note_sent, gateway.runtime.database, repeat, accepted.turn_id))
    if not body.stream:
        settled = await _settled(gateway, request, accepted.turn_id)
        if settled.turn["error"] is not None:
            await note()
            return settled_failure(settled.turn)
        completion = chat_completions.completion_of(settled.turn, _agent_name(gateway.runtime, body.model))
        await note()  # before the response, which is sent in one write
        return respond(completion.whole(settled.turn, settled.text), HTTPStatus.OK)
    turn = await _turn(gateway, accepted.turn_id)
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    completion = chat_completions.completion_of(turn, _agent_name(gateway.runtime, body.model))
    parts = await _begun(_parts(gateway, request, accepted.turn_id))
    return sse.response(chat_completions.stream(completion, parts, include_usage=usage, on_sent=note))


@router.post("/responses", responses={200: _ANY, **_ERRORS}, response_description="The response.")
async def create_response(
    body: Annotated[ResponseRequest, Body()], request: Request, gateway: TheOpenGateway, users: TheUsers
) -> Response:
    """Answer the newest user message in a turn of the durable conversation; respond with a response object."""
    require_usable(body)
    _require_model(gateway.runtime, body.model)
    items = body.items()
    said = newest_user_message(items, "input")
    place = await _response_place(gateway, request, body, users)
    seen = {"input": items, "previous": body.previous_response_id}
    repeat = await gateway.in_thread(partial(_repeat, request, place, body, said, [seen]))
    accepted, repeat = await _accepted(gateway, request, repeat, said, items, seen)
    note = partial(gateway.in_thread, partial(note_sent, gateway.runtime.database, repeat, accepted.turn_id))
    made = responses.Response(
        _agent_name(gateway.runtime, body.model), place.conversation, body.previous_response_id, bool(body.background)
    )
    if body.stream:
        turn = await _turn(gateway, accepted.turn_id)
        parts = await _begun(_parts(gateway, request, accepted.turn_id))
        return sse.response(responses.stream(made, turn, _keeping(gateway, request, place.user, parts), None, note))
    if body.background:
        turn = await _turn(gateway, accepted.turn_id)
        await note()
        return respond(made.body(turn), HTTPStatus.OK)
    settled = await _settled(gateway, request, accepted.turn_id)
    await note()
    if settled.turn["error"] is not None:
        return settled_failure(settled.turn)
    return respond(_whole(made, settled), HTTPStatus.OK)


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
    turn_id = await _turn_id(gateway, caller, response_id)
    made = await gateway.in_thread(partial(_response, gateway.runtime, turn_id))
    if not stream:
        return respond(_whole(made, await _answer(gateway, request, turn_id)), HTTPStatus.OK)
    turn = await _turn(gateway, turn_id)
    user = await gateway.in_thread(partial(owner, gateway.runtime.database, turn_id))
    parts = await _begun(_parts(gateway, request, turn_id))
    return sse.response(responses.stream(made, turn, _keeping(gateway, request, user, parts), starting_after))


@router.post("/responses/{response_id}/cancel", responses={200: _ANY, **_ERRORS}, response_description="The response.")
async def cancel_response(response_id: str, gateway: TheGateway, caller: TheCaller, request: Request) -> Response:
    """Cancel a running response; a settled response does not change."""
    turn_id = await _turn_id(gateway, caller, response_id)
    await gateway.in_thread(partial(cancel, gateway.runtime, turn_id))
    await gateway.until_settled(turn_id, _CANCEL_S, request)
    made = await gateway.in_thread(partial(_response, gateway.runtime, turn_id))
    return respond(_whole(made, await _answer(gateway, request, turn_id)), HTTPStatus.OK)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "perdure"}


def _require_model(runtime: Runtime, name: str) -> None:
    if name and name not in {agent.name for agent in runtime.agents}:
        raise UnknownModel(f"model: there is no agent {name[:100]!r}; GET /v1/models lists them.", "model")


def _repeat(
    request: Request,
    place: Place,
    body: ChatRequest | ResponseRequest,
    said: dict[str, Any],
    messages: list[Any],
) -> Repeat:
    given: dict[str, Any] = {"user_id": place.user_id, **said, "channel": CHANNEL, "metadata": body.metadata}
    given["conversation"] = place.conversation
    agent = {"agent": body.model} if body.model else {}
    message = parse_submitted({**{name: each for name, each in given.items() if each is not None}, **agent})
    retried = request.headers.get("x-stainless-retry-count", "0")
    key = idempotency_key(request)
    return Repeat.of(message.of(place.user), messages, key, is_retry=retried not in {"", "0"})


async def _accepted(
    gateway: Gateway, request: Request, repeat: Repeat, *read: list[Any] | dict[str, Any]
) -> tuple[Accepted, Repeat]:
    """Accept a request's message, then forget what was `read` of it: a request with files may wait for minutes."""
    accepted = await gateway.in_thread(partial(accept_once, gateway.runtime, repeat))
    for each in read:
        each.clear()
    gateway.release_body(request)
    return accepted, repeat.without_parts()


def _agent_name(runtime: Runtime, model: str) -> str:
    return model or runtime.agents.default.name


async def _response_place(gateway: Gateway, request: Request, body: ResponseRequest, users: TheUsers) -> Place:
    """The user and the conversation; `previous_response_id` or `conversation` overrides the request's headers."""
    place = place_of(request, body, users)
    if body.previous_response_id is not None:
        if body.conversation is not None:
            raise BadParameter("Give previous_response_id or conversation, not both.", "previous_response_id")
        turn_id = turn_of(body.previous_response_id)
        if turn_id is None:
            raise NotFound("previous_response_id: there is no such response.")
        found = await gateway.in_thread(partial(_conversation, gateway.runtime, place.user, turn_id))
        return Place(place.user, place.user_id, found.conversation)
    if body.conversation is not None:
        return Place(place.user, place.user_id, body.conversation.id)
    return place


async def _turn_id(gateway: Gateway, caller: TheCaller, response_id: str) -> UUID:
    turn_id = turn_of(response_id)
    if turn_id is None:
        raise NotFound("There is no such response.")
    return await gateway.in_thread(partial(require_turn, gateway, caller, turn_id))


async def _turn(gateway: Gateway, turn_id: UUID) -> dict[str, Any]:
    return await gateway.in_thread(partial(read_turn, gateway.runtime.database, turn_id))


async def _answer(gateway: Gateway, request: Request, turn_id: UUID) -> answers.CommittedAnswer:
    """Read a turn and its answer, into memory that is reserved until the response has been sent."""
    database = gateway.runtime.database
    user = await gateway.in_thread(partial(owner, database, turn_id))
    size = await gateway.in_thread(partial(answers.answer_bytes, database, turn_id))
    await gateway.reserve(request, user, max(size, CHUNKED_BYTES))
    return await gateway.in_thread(partial(answers.read_answer, database, turn_id))


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


async def _settled(gateway: Gateway, request: Request, turn_id: UUID) -> answers.CommittedAnswer:
    """Wait for a turn to settle, for `_WAIT_S` seconds at most; returns its answer.

    Raises:
        DeadlineExceeded: the turn is not settled in time.
    """
    if (await _turn(gateway, turn_id))["status"] not in SETTLED:
        await gateway.until_settled(turn_id, _WAIT_S, request)
    answer = await _answer(gateway, request, turn_id)
    if answer.turn["status"] not in SETTLED:
        raise DeadlineExceeded(_LATE)
    return answer


async def _parts(gateway: Gateway, request: Request, turn_id: UUID) -> AsyncIterator[answers.Part]:
    gateway.require_room()
    async with aclosing(gateway.events(request, turn_id, None, sse.HEARTBEAT_S)) as events:
        async for part in answers.follow(events):
            yield part


async def _begun(parts: AsyncIterator[answers.Part]) -> AsyncIterator[answers.Part]:
    """Fetch the first part, so that an error before it determines the HTTP status; returns all parts."""
    first = await anext(parts, None)

    async def with_first() -> AsyncIterator[answers.Part]:
        if first is not None:
            yield first
            async for part in parts:
                yield part

    return with_first()


def _whole(made: responses.Response, answer: answers.CommittedAnswer) -> dict[str, Any]:
    if answer.turn["status"] != "done":
        return made.body(answer.turn)
    return made.body(answer.turn, answer.text, answer.calls)


def _response(runtime: Runtime, turn_id: UUID) -> responses.Response:
    place = read_place(runtime.database, turn_id)
    return responses.Response(place.agent, place.conversation)


def _conversation(runtime: Runtime, user: UserKey, turn_id: UUID) -> TurnPlace:
    """The agent and the conversation of a user's turn.

    Raises:
        NotFound: the user has no such turn.
    """
    found = find_owner(runtime.database, turn_id)
    if found is None or found[0] != user:
        raise NotFound("previous_response_id: there is no such response.")
    return read_place(runtime.database, turn_id)
