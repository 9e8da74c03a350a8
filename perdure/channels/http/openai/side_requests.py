"""Side requests: a chat front end requests a title, tags or follow-up questions for a conversation.

The summary model answers side requests without a turn, and they are not stored in the conversation. They are recognised
by the header `X-OpenWebUI-Task` or `X-Perdure-Task` only, since any message may begin with the text of such a request.

A side request is for a front end that the operator trusts: the caller needs a service key, and the operator may forbid
side requests (`PERDURE_GUARD__SIDE_REQUESTS`). The model gets the newest user message only, under the limits of a
message. The request counts as one of the user's messages, and its usage is recorded in `metered_requests`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from perdure.channels.http.auth import Caller, KeyKind
from perdure.channels.http.openai.chat_completions import Completion, encode
from perdure.database.engine import as_json
from perdure.errors import Forbidden, RateLimited
from perdure.models.endings import recorded
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.runtime import Runtime
from perdure.text.tokens import estimate_tokens
from perdure.turns.inbox import queries, rate_limit
from perdure.turns.inbox.accept import check
from perdure.turns.inbox.incoming import Incoming

MOST = 4
"""The most side requests that one gateway runs concurrently."""

_HEADERS = ("x-openwebui-task", "x-perdure-task")
_UNFILLED = "{{"
"""The beginning of a template that a front end has sent without filling it in."""
_RETRY_AFTER_S = 5.0
_TOO_MANY = f"This gateway answers at most {MOST} requests for titles and tags at once. Try again later."
_OFF = "Requests for titles and tags are switched off (PERDURE_GUARD__SIDE_REQUESTS)."
_SERVICES_ONLY = "Requests for titles and tags require a service key, not a user token."


def is_side_request(headers: Mapping[str, str]) -> bool:
    return any((task := headers.get(name)) and not task.startswith(_UNFILLED) for name in _HEADERS)


class SideRequests:
    """Answers side requests in separate threads, because a model's answer takes seconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._running = 0
        self._threads = ThreadPoolExecutor(MOST, "side-request")

    async def answer(self, caller: Caller, message: Incoming) -> dict[str, Any]:
        """The completion for the side request `message`.

        Raises:
            Forbidden: the caller has a user token, or the operator forbids side requests.
            RateLimited: `MOST` side requests are running, or a rate limit of the user is reached.
            PerdureError: the message is too long, or the model fails.
        """
        if caller.kind is KeyKind.USER:
            raise Forbidden(_SERVICES_ONLY)
        if not self._runtime.settings.guard.side_requests:
            raise Forbidden(_OFF)
        if self._running >= MOST:
            raise RateLimited(_TOO_MANY, retry_after_s=_RETRY_AFTER_S)
        self._running += 1
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, message)
        finally:
            self._running -= 1
        estimated = {
            "input_tokens": estimate_tokens(message.text),
            "output_tokens": estimate_tokens(reply.content),
            "estimated": True,
        }
        usage = estimated if reply.usage is None else reply.usage.to_dict()
        now = int(self._runtime.clock.now().timestamp())
        turn = {"reply": {"stop_reason": recorded(reply)}}
        return Completion(uuid4().hex, reply.model, now).whole(turn, reply.content, usage)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, message: Incoming) -> ModelReply:
        runtime, settings = self._runtime, self._runtime.settings
        check(runtime, message)
        with runtime.database.transaction("turns.meter") as transaction:
            user = message.user
            request_id = rate_limit.meter(transaction, runtime.clock, settings.guard, user, "side_request")
        model = runtime.models(settings.summary_model or settings.model)
        call = ModelCall(runtime.clock, settings.model_timeout_s)
        reply = model.respond(ModelRequest((Message(Role.USER, message.text),)), call)
        used = {"request_id": request_id, "model": reply.model, "usage": reply.usage and as_json(reply.usage.to_dict())}
        runtime.database.run(queries.METER_USAGE, used)
        return reply


async def as_stream(completion: dict[str, Any]) -> AsyncIterator[bytes]:
    """A completion as a stream with the whole text in one chunk."""
    [choice] = completion["choices"]
    head = {**completion, "object": "chat.completion.chunk"}
    del head["usage"]
    delta = {"role": "assistant", "content": choice["message"]["content"]}
    yield encode({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield encode({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    yield b"data: [DONE]\n\n"
