"""Side requests: a chat front end requests a title, tags or follow-up questions for a conversation.

The summary model answers side requests without a turn, and they are not stored in the conversation. They are recognised
by the header `X-OpenWebUI-Task` or `X-Perdure-Task`, or by a text that begins with `### Task:`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from perdure.channels.http.openai.chat import Completion, encode
from perdure.errors import RateLimited
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.runtime import Runtime

MOST = 4
"""The most side requests that one gateway runs concurrently."""

_HEADERS = ("x-openwebui-task", "x-perdure-task")
_FIRST_LINE = "### Task:"
_RETRY_AFTER_S = 5.0
_TOO_MANY = f"This gateway answers at most {MOST} requests for titles and tags at once. Try again later."


def is_side_request(headers: Mapping[str, str], text: str) -> bool:
    """Whether a request is a side request, by its headers or its text."""
    return any(headers.get(name) for name in _HEADERS) or text.lstrip().startswith(_FIRST_LINE)


class SideRequests:
    """Answers side requests in separate threads, because a model's answer takes seconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._running = 0
        self._threads = ThreadPoolExecutor(MOST, "side-request")

    async def answer(self, spoken: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """The completion for a side request; `spoken` has the role and the text of each message.

        Raises:
            RateLimited: `MOST` side requests are running.
            PerdureError: the model fails.
        """
        if self._running >= MOST:
            raise RateLimited(_TOO_MANY, retry_after_s=_RETRY_AFTER_S)
        self._running += 1
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, spoken)
        finally:
            self._running -= 1
        turn = {"usage": reply.usage.record()}
        now = int(self._runtime.clock.now().timestamp())
        return Completion(uuid4().hex, reply.model, now).whole(turn, reply.content)

    def close(self) -> None:
        """End the threads; running calls are abandoned."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, spoken: Sequence[tuple[str, str]]) -> ModelReply:
        settings = self._runtime.settings
        model = self._runtime.models(settings.summary_model or settings.model)
        call = ModelCall(self._runtime.clock, settings.model_timeout_s)
        messages = tuple(Message(Role.SYSTEM if role == "developer" else Role(role), text) for role, text in spoken)
        return model.respond(ModelRequest(messages), call)


async def as_stream(completion: dict[str, Any]) -> AsyncIterator[bytes]:
    """A completion as a stream with the whole text in one chunk."""
    [choice] = completion["choices"]
    head = {**completion, "object": "chat.completion.chunk"}
    del head["usage"]
    delta = {"role": "assistant", "content": choice["message"]["content"]}
    yield encode({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield encode({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield b"data: [DONE]\n\n"
