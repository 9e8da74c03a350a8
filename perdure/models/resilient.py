"""Models that fail well: `breaker(retry(call))`, and when that has failed, other models' answers.

Both are models themselves, so that whoever asks one need not know. A call has
`PERDURE_MODEL_TIMEOUT_S` for all its tries, and each model that is asked instead as much again,
within what the engine gives the whole. Text that a failed try had streamed is taken back with
`ModelCall.rewind` before anything else is said.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from perdure.errors import InvalidResponse, loggable
from perdure.models.protocol import Model, ModelCall, ModelReply, ModelRequest
from perdure.models.providers.without_tools import flatten_tool_calls
from perdure.resilience.failures import Verdict, verdict
from perdure.resilience.fallback import FallbackStrategy, with_fallback
from perdure.resilience.registry import Breaker
from perdure.resilience.retry import retrying
from perdure.settings import RetrySettings

log = logging.getLogger(__name__)


def wait_within(call: ModelCall, seconds: float) -> None:
    """Let `seconds` pass, unless the call is ended meanwhile.

    Raises:
        CallAborted, DeadlineExceeded: it was.
    """
    ended = threading.Event()
    with call.aborting(ended.set):
        ended.wait(seconds)


class GuardedModel:
    """A model behind a breaker, tried again when it fails in a way that can pass."""

    def __init__(
        self,
        model: Model,
        breaker: Breaker,
        retry: RetrySettings,
        timeout_s: float,
        *,
        wait: Callable[[ModelCall, float], None] = wait_within,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`timeout_s` is for all the tries of one call; `wait` and `draw` are for tests."""
        self._model = model
        self._breaker = breaker
        self._retry = retry
        self._timeout_s = timeout_s
        self._wait = wait
        self._draw = draw

    @property
    def name(self) -> str:
        """The model's own."""
        return self._model.name

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Answer one prompt; see `Model.respond`.

        Raises:
            CircuitBreakerOpen: the breaker lets no call through.
        """
        with call.part(self._timeout_s) as part:
            return self._breaker.execute(lambda: self._try_until(request, part), part.remaining())

    def _try_until(self, request: ModelRequest, part: ModelCall) -> ModelReply:
        window = CallWindow(part, self._wait)
        return retrying(self.name, lambda: self._try(request, part), self._retry, window, self._draw)

    def _try(self, request: ModelRequest, part: ModelCall) -> ModelReply:
        try:
            return _not_empty(self._model.respond(request, part))
        except Exception as error:
            if verdict(error) is not Verdict.ABANDONED:
                part.rewind()
            raise


@dataclass(frozen=True, slots=True)
class CallWindow:
    """A call's time, as a retry sees it."""

    call: ModelCall
    wait_within: Callable[[ModelCall, float], None]

    def remaining(self) -> float:
        """Seconds that are left of the call."""
        return self.call.remaining()

    def wait(self, seconds: float) -> None:
        """Let `seconds` pass; see `wait_within`."""
        self.wait_within(self.call, seconds)


@dataclass(frozen=True, slots=True)
class FallbackRequest:
    """What a model was asked, and the call in which another answer may still be given."""

    request: ModelRequest
    call: ModelCall


ModelFallback: TypeAlias = FallbackStrategy[FallbackRequest, ModelReply]


class ResilientModel:
    """A model, and a strategy for when it fails, whoever wrote that."""

    def __init__(self, model: Model, strategy: ModelFallback) -> None:
        self._model = model
        self._strategy = _CheckedStrategy(strategy)

    @property
    def name(self) -> str:
        """The model's own."""
        return self._model.name

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Answer one prompt, or have it answered: `ModelReply.fallback` says so.

        Raises:
            Exception: the model's own, as `Model.respond` and `GuardedModel.respond` say.
        """
        asked = FallbackRequest(request, call)
        return with_fallback(self.name, lambda: self._model.respond(request, call), self._strategy, asked)


class _CheckedStrategy:
    """A strategy that finds an answer or nothing: one that ends the turn, is marked, and comes after no other words."""

    def __init__(self, strategy: ModelFallback) -> None:
        self._strategy = strategy

    def execute(self, asked: FallbackRequest, error: Exception) -> ModelReply | None:
        """What the strategy finds. Raises as `FallbackStrategy.execute`, and InvalidResponse for what is no answer."""
        found = None
        try:
            reply = self._strategy.execute(asked, error)
            found = None if reply is None else _ending(reply)
        finally:
            if found is None:
                asked.call.rewind()
        return found


class FallbackModels:
    """The strategy of `PERDURE_FALLBACK_MODELS`: one model after another, without tools."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = tuple(models)

    def execute(self, asked: FallbackRequest, error: Exception) -> ModelReply | None:  # noqa: ARG002 (any failure will do)
        """The first answer that is one, marked with the name of who gave it; None if nobody did.

        Raises:
            CallAborted: the call was ended.
        """
        request = flatten_tool_calls(asked.request)
        for model in self._models:
            try:
                return _marked(model, model.respond(request, asked.call))
            except Exception as further:
                if verdict(further) is Verdict.ABANDONED:
                    raise
                asked.call.rewind()
                log.warning("fallback model %s failed (%s)", model.name, loggable(further), exc_info=further.__cause__)
        return None


def _marked(model: Model, reply: ModelReply) -> ModelReply:
    return replace(_ending(reply), model=reply.model or model.name)


def _ending(reply: ModelReply) -> ModelReply:
    """The reply as one that ends a turn, marked: a call of a tool that was not offered is none.

    Raises:
        InvalidResponse: nothing else is in it.
    """
    return _not_empty(replace(reply, tool_calls=(), fallback=True))


def _not_empty(reply: ModelReply) -> ModelReply:
    if not reply.content.strip() and not reply.tool_calls:
        raise InvalidResponse("The model's answer was empty.")
    return reply
