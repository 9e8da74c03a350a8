"""What a request of the OpenAI-compatible endpoints asks: a message, or results of calls that its client runs.

A request with a newer message of the user begins a turn, or answers the question of one. A request whose newest
messages are results of calls goes on with the turn that waits for them. In both cases the client gets an exchange
(`turns.calls.client`), for whose end `Asked.answered` and `answers.follow` wait.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from uuid import UUID

from fastapi import Request
from sqlalchemy import Row
from starlette.requests import ClientDisconnect

from perdure.channels.http.dependencies import Users
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.limits.shares import CHUNKED_BYTES
from perdure.channels.http.openai import answers
from perdure.channels.http.openai.added import additions_of
from perdure.channels.http.openai.caller import (
    Place,
    cancels_on_disconnect,
    idempotency_key,
    is_open_webui,
    is_temporary,
)
from perdure.channels.http.openai.errors import BadParameter
from perdure.channels.http.openai.repeats import CHANNEL, RepeatableRequest, accept_once, note_sent
from perdure.channels.http.openai.responses import noting
from perdure.channels.http.openai.results import text_of
from perdure.channels.http.openai.wire import (
    ChatRequest,
    ResponseRequest,
    Results,
    call_id,
    newest_user_message,
    results_in,
)
from perdure.errors import DeadlineExceeded
from perdure.files.store import Call
from perdure.runtime import Runtime
from perdure.settings import OnBusy
from perdure.turns.additions import NO_ADDITIONS, Additions
from perdure.turns.calls import client
from perdure.turns.calls.client import Exchange
from perdure.turns.inbox.accept import Accepted
from perdure.turns.inbox.incoming import parse_submitted
from perdure.turns.reading import SETTLED, owner, read_turn

log = logging.getLogger(__name__)

_WAIT_S = 600.0
"""Seconds that a request waits for its turn to settle; the SDK's own time limit is ten minutes."""

_MOST_CALLS = 256
"""The most calls of which a request may have results: the newest ones count."""

_LACKING = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. The "
    "following tool_call_ids did not have response messages: {ids}"
)

_LATE = "The answer is not ready yet. Send the request again: it finds the same turn."


class Asked:
    """What a request asks of an agent. `additions` are what it adds to the agent, once the request is accepted.

    `is_new`: it has begun its turn, which therefore has its agent, conversation and additions, once it is accepted.

    Raises:
        BadParameter: the request asks for what the endpoints do not have.
    """

    def __init__(
        self, gateway: Gateway, request: Request, users: Users, place: Place, body: ChatRequest | ResponseRequest
    ) -> None:
        self.additions = NO_ADDITIONS
        self.is_new = False
        self._gateway, self._request, self._users, self._place, self._body = gateway, request, users, place, body
        self._param = "messages" if isinstance(body, ChatRequest) else "input"
        self._messages = body.items()
        self._cancels = cancels_on_disconnect(request, users, gateway.runtime.settings.stream)
        if isinstance(body, ResponseRequest) and body.background:
            self._cancels = False
        self._has_left = False
        """Whether the client leaves too early if its request ends now."""

    async def accept(self, seen: list[Any], *read: dict[str, Any]) -> tuple[Exchange, Callable[[], Awaitable[None]]]:
        """Accept the message, or record the results. Returns the exchange, and what notes that its answer was sent.

        `seen` identifies the request. What was `read` of it is then forgotten: a request with files may wait for
        minutes.

        Raises:
            PerdureError: the request is refused.
        """
        gateway = self._gateway
        self.additions = await gateway.in_thread(self._additions)
        results = results_in(self._messages, self._param)
        brought = await gateway.in_thread(partial(self._bring, results))
        if brought is not None:
            self._forget(*read)
            self._attend(brought)
            return brought, _nothing
        said = newest_user_message(self._messages, self._param)
        repeat = await gateway.in_thread(partial(self._repeat, said, seen))
        accepted = await gateway.in_thread(partial(accept_once, gateway.runtime, repeat))
        self._forget(*read)
        self.is_new = not accepted.duplicate and not accepted.joined
        exchange = await gateway.in_thread(partial(_exchange, gateway.runtime, accepted))
        self._attend(exchange)
        note = partial(note_sent, gateway.runtime.database, repeat.without_parts(), exchange.turn_id)
        return exchange, partial(gateway.in_thread, note)

    async def answered(self, exchange: Exchange) -> answers.CommittedAnswer:
        """Wait until the answer is complete, for `_WAIT_S` seconds at most.

        Raises:
            DeadlineExceeded: it is not complete in time.
            ClientDisconnect: the client has left.
        """
        gateway = self._gateway
        progress = await gateway.in_thread(partial(answers.read_progress, gateway.runtime.database, exchange))
        if progress.stop is None and progress.turn["status"] not in SETTLED:
            try:
                await gateway.until_settled(exchange.turn_id, _WAIT_S, self._request, or_asks=True)
            except ClientDisconnect:
                self._has_left = True
                raise
        answer = await read_whole(gateway, self._request, exchange)
        if not answer.is_over:
            raise DeadlineExceeded(_LATE)
        return answer

    async def begun(self, parts: AsyncIterator[answers.Part]) -> AsyncIterator[answers.Part]:
        """As `begun`, which follows, for the parts of the answer."""
        try:
            return await begun(self._gateway, self._request, parts)
        except ClientDisconnect:
            self._has_left = True
            raise

    def watched(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """`chunks`, the stream of the answer. Before their end, the client leaves too early, even before the first."""
        self._has_left = True

        async def passed_on() -> AsyncIterator[bytes]:
            async for each in chunks:
                yield each
            self._has_left = False

        return passed_on()

    def _attend(self, exchange: Exchange) -> None:
        """If the client leaves before its answer ends, the turn is cancelled if the client or a setting says so."""
        self._gateway.attend(self._request, exchange.turn_id, lambda: self._cancels and self._has_left)

    def _additions(self) -> Additions:
        is_webui = is_open_webui(self._request, self._users)
        if is_webui and self._body.tools:
            _note_ignored_tools()
        runtime, caller = self._gateway.runtime, self._users.caller
        found = additions_of(self._body, runtime, caller, takes_tools=not is_webui)
        return replace(found, remember=False) if is_webui and is_temporary(self._request) else found

    def _bring(self, results: Results) -> Exchange | None:
        """Record the results that the request has. Returns their exchange if it has no newer message of the user.

        A call in its history that has no result, and that a newer message follows, has failed.

        Raises:
            BadParameter: a newest result is of no call of the user, or of a call of another turn that still waits; or
                another call of the same message lacks a result.
        """
        runtime = self._gateway.runtime
        ids = list(dict.fromkeys((*results.asked, *results.contents)))[-_MOST_CALLS:]
        found = client.find_calls(runtime.database, self._place.user, ids)
        if not results.newest:
            left = [row for row in found.values() if row.is_open]
            for turn_id in dict.fromkeys(row.turn_id for row in left):
                rest = replace(self.additions, tools=(), names=())
                calls = [row for row in left if row.turn_id == turn_id]
                client.bring(runtime, calls, self._texts(calls, results), rest)
            return None
        unknown = next((each for each in results.newest if each not in found), None)
        if unknown is not None:
            where = results.where[unknown]
            raise BadParameter(f"{where}: there is no such call.", where)
        last = found[results.newest[-1]]
        for row in (found[each] for each in results.newest):
            if row.is_open and row.turn_id != last.turn_id:
                where = results.where[row.effect_id]
                raise BadParameter(f"{where}: is a call of another turn, which needs a request of its own.", where)
        [stop] = [each for each in client.read_stops(runtime.database, last.turn_id) if each.number == last.number]
        lacking = [call_id(each.effect_id) for each in stop.calls if each.effect_id not in results.contents]
        if lacking and stop.is_open:
            raise BadParameter(_LACKING.format(ids=", ".join(lacking)), self._param)
        calls = [found[each.effect_id] for each in stop.calls if each.effect_id in found]
        client.bring(runtime, calls, self._texts(calls, results), self._noted(last.number))
        return Exchange(last.turn_id, last.number)

    def _texts(self, calls: Sequence[Row[Any]], results: Results) -> dict[UUID, str]:
        """The results of those of `calls`, all of one turn, that have none yet. Their files are stored."""
        runtime, found = self._gateway.runtime, dict[UUID, str]()
        brought = [row for row in calls if row.is_open and row.effect_id in results.contents]
        if brought:
            session_id = UUID(read_turn(runtime.database, brought[0].turn_id)["session_id"])
            for row in brought:
                call = Call(row.effect_id, session_id)
                found[row.effect_id] = text_of(runtime.files, self._place.user, call, results.contents[row.effect_id])
        return found

    def _forget(self, *read: dict[str, Any]) -> None:
        for each in read:
            each.clear()
        self._messages.clear()
        self._gateway.release_body(self._request)

    def _repeat(self, said: dict[str, Any], seen: list[Any]) -> RepeatableRequest:
        repeat = repeat_of(self._request, self._place, self._body, said, seen, self.additions)
        return replace(repeat, additions=self._noted(0))

    def _noted(self, after: int) -> Additions:
        """The additions as they are stored, for the exchange that begins at `after`."""
        body = self._body
        return noting(self.additions, after, body) if isinstance(body, ResponseRequest) else self.additions


def repeat_of(  # noqa: PLR0917 (the parts of a request)
    request: Request,
    place: Place,
    body: ChatRequest | ResponseRequest,
    said: dict[str, Any],
    messages: list[Any],
    additions: Additions = NO_ADDITIONS,
) -> RepeatableRequest:
    """The request with the message `said`, of which `messages` identify a repeated one."""
    given: dict[str, Any] = {"user_id": place.user_id, **said, "channel": CHANNEL, "metadata": body.metadata}
    given["conversation"] = place.conversation
    agent = {"agent": body.model} if body.model else {}
    message = parse_submitted({**{name: each for name, each in given.items() if each is not None}, **agent})
    retried = request.headers.get("x-stainless-retry-count", "0")
    key = idempotency_key(request)
    return RepeatableRequest.of(
        message.of(place.user), messages, key, is_retry=retried not in {"", "0"}, additions=additions
    )


async def begun(gateway: Gateway, request: Request, parts: AsyncIterator[answers.Part]) -> AsyncIterator[answers.Part]:
    """Fetch the first part, so that an error before it determines the HTTP status; returns all parts.

    Raises:
        ClientDisconnect: the client has closed the connection.
    """
    first = await gateway.unless_left(request, anext(parts, None))

    async def with_first() -> AsyncIterator[answers.Part]:
        if first is not None:
            yield first
            async for part in parts:
                yield part

    return with_first()


async def read_whole(gateway: Gateway, request: Request, exchange: Exchange) -> answers.CommittedAnswer:
    """Read a turn and the answer, into memory that is reserved until the response has been sent."""
    database = gateway.runtime.database
    user = await gateway.in_thread(partial(owner, database, exchange.turn_id))
    size = await gateway.in_thread(partial(answers.answer_bytes, database, exchange))
    await gateway.reserve(request, user, max(size, CHUNKED_BYTES))
    return await gateway.in_thread(partial(answers.read_answer, database, exchange))


def _exchange(runtime: Runtime, accepted: Accepted) -> Exchange:
    """The exchange that the message begins: with its turn, or where the turn asked the question that it answers."""
    turn_id = UUID(read_turn(runtime.database, accepted.turn_id)["turn_id"]) if accepted.joined else accepted.turn_id
    asked = client.read_stops(runtime.database, turn_id) if accepted.joined else ()
    after = max((each.number for each in asked if each.question is not None), default=0)
    return Exchange(turn_id, after, may_join=not accepted.joined and runtime.settings.turn.on_busy is OnBusy.STEER)


@cache
def _note_ignored_tools() -> None:
    """Log once in each process."""
    log.warning("Open WebUI sends tools of its own with each message; agents have their own, so these are ignored")


async def _nothing() -> None:
    """Results are recognised by themselves: nothing needs to be noted."""
