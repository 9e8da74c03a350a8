"""Adds a circuit breaker, retries and fallbacks to a model: `fallback(breaker(retry(call)))`.

`GuardedModel` adds the breaker and the retries. `ResilientModel` adds the fallback. All attempts at one model together
have `PERDURE_MODEL_TIMEOUT_S` seconds. Each fallback model has the same number of seconds. The deadline of the whole
call limits the total time. `ModelCall.rewind` withdraws the text that a failed attempt streamed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from perdure.clock import Clock
from perdure.errors import ContextTooLong, loggable
from perdure.models.endings import checked
from perdure.models.protocol import Model, ModelCall, ModelReply, ModelRequest, Usage, read_by
from perdure.models.settings import supported_by, without_tools
from perdure.models.without_tools import flatten_tool_calls
from perdure.resilience.failures import FailureKind, allows_fallback, verdict
from perdure.resilience.fallback import FallbackStrategy, with_fallback
from perdure.resilience.registry import Breaker
from perdure.resilience.retry import retrying
from perdure.settings import RetrySettings

log = logging.getLogger(__name__)


def wait_within(call: ModelCall, seconds: float) -> None:
    """Wait for `seconds`, or until the call ends.

    Raises:
        CallAborted, DeadlineExceeded: the call ended.
    """
    ended = threading.Event()
    with call.aborting(ended.set):
        ended.wait(seconds)


class _Wrapper:
    """Has the name of a model, and supports what the model supports."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def supported_settings(self) -> frozenset[str]:
        return supported_by(self._model)

    @property
    def reads(self) -> frozenset[str]:
        return read_by(self._model)


class GuardedModel(_Wrapper):
    """Calls a model through a breaker, and retries after transient failures."""

    def __init__(
        self,
        model: Model,
        breaker: Breaker,
        retry: RetrySettings,
        timeout_s: float,
        *,
        defaults: Mapping[str, Any] | None = None,
        wait: Callable[[ModelCall, float], None] = wait_within,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """All attempts of one call together have `timeout_s` seconds, or the request's setting `timeout`.

        `defaults` are the settings of requests that have none of their own. The model gets only the settings that it
        supports: a fallback may have another protocol than the model that a setting was meant for.

        `wait` waits between two attempts. `draw` returns a random number for the jitter. Tests replace both functions.
        """
        super().__init__(model)
        self._breaker = breaker
        self._retry = retry
        self._timeout_s = timeout_s
        self._defaults = defaults or {}
        self._wait = wait
        self._draw = draw

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt; see `Model.respond`.

        Raises:
            CircuitBreakerOpen: the breaker is open.
        """
        settings = {**self._defaults, **request.settings}
        supported = self.supported_settings
        request = replace(request, settings={name: each for name, each in settings.items() if name in supported})
        with call.part(settings.get("timeout", self._timeout_s)) as part:
            return self._breaker.execute(lambda: self._try_until(request, part), part.remaining())

    def _try_until(self, request: ModelRequest, part: ModelCall) -> ModelReply:
        window = CallWindow(part, self._wait)
        return retrying(self.name, lambda: self._try(request, part), self._retry, window, self._draw)

    def _try(self, request: ModelRequest, part: ModelCall) -> ModelReply:
        try:
            return checked(self._model.respond(request, part))
        except Exception as error:
            if verdict(error) is not FailureKind.ABANDONED:
                part.rewind()
            raise


class CallObserver(Protocol):
    """Called after each call of a model: with its usage if it answered, or with the error."""

    def __call__(self, model: str, seconds: float, usage: Usage | None, error: BaseException | None) -> None: ...


class ObservedModel(_Wrapper):
    """A model, called `name`, whose calls `observe` is shown."""

    def __init__(self, model: Model, name: str, clock: Clock, observe: CallObserver) -> None:
        super().__init__(model)
        self._name = name
        self._clock = clock
        self._observe = observe

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt; see `Model.respond`."""
        began = self._clock.monotonic()
        try:
            reply = self._model.respond(request, call)
        except BaseException as error:
            self._observe(self._name, self._clock.monotonic() - began, None, error)
            raise
        self._observe(self._name, self._clock.monotonic() - began, reply.usage, None)
        return reply


@dataclass(frozen=True, slots=True)
class CallWindow:
    """The time limit of one model call; see `perdure.resilience.retry.Window`."""

    call: ModelCall
    wait_within: Callable[[ModelCall, float], None]

    def remaining(self) -> float:
        return self.call.remaining()

    def wait(self, seconds: float) -> None:
        self.wait_within(self.call, seconds)


@dataclass(frozen=True, slots=True)
class FallbackRequest:
    """A request that a model failed to answer. The fallback streams its reply to `call`."""

    request: ModelRequest
    call: ModelCall


ModelFallback: TypeAlias = FallbackStrategy[FallbackRequest, ModelReply]


class ResilientModel(_Wrapper):
    """A model with a fallback strategy."""

    def __init__(self, model: Model, strategy: ModelFallback) -> None:
        super().__init__(model)
        self._strategy = _CheckedStrategy(strategy)

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt. If the model fails, return the strategy's reply, with `ModelReply.fallback` set to true.

        Raises:
            Exception: the model's error, if the strategy has no reply.
        """
        asked = FallbackRequest(request, call)
        return with_fallback(self.name, lambda: self._model.respond(request, call), self._strategy, asked)


class _CheckedStrategy:
    """Checks a strategy's reply and sets `ModelReply.fallback`. Withdraws streamed text if there is no valid reply."""

    def __init__(self, strategy: ModelFallback) -> None:
        self._strategy = strategy

    def execute(self, asked: FallbackRequest, error: Exception) -> ModelReply | None:
        """The strategy's reply, or `None` if the strategy has no reply or waits for a shorter prompt.

        Raises:
            PerdureError: the reply is empty or filtered; see `checked`.
            Exception: the strategy failed; see `FallbackStrategy.execute`.
        """
        if isinstance(error, ContextTooLong) and asked.call.may_shorten:
            asked.call.fallback_waits = True
            asked.call.rewind()
            return None
        found = None
        try:
            reply = self._strategy.execute(asked, error)
            found = None if reply is None else _final(reply)
        finally:
            if found is None:
                asked.call.rewind()
        return found


class FallbackModels:
    """Calls the models of `PERDURE_FALLBACK_MODELS` in order, without tools, until one replies."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = tuple(models)

    def execute(self, asked: FallbackRequest, error: Exception) -> ModelReply | None:  # noqa: ARG002 (any failure will do)
        """The first valid reply, with `ModelReply.model` set; `None` if every model fails.

        Raises:
            CallAborted: the call was aborted.
            ContentFiltered: a model's content filter refuses the input.
        """
        request = replace(flatten_tool_calls(asked.request), settings=without_tools(asked.request.settings))
        for model in self._models:
            try:
                return _named(model, model.respond(request, asked.call))
            except Exception as fallback_error:
                if not allows_fallback(fallback_error):
                    raise
                asked.call.rewind()
                log.warning(
                    "fallback model %s failed (%s)",
                    model.name,
                    loggable(fallback_error),
                    exc_info=fallback_error.__cause__,
                )
        return None


def _named(model: Model, reply: ModelReply) -> ModelReply:
    return replace(_final(reply), model=reply.model or model.name)


def _final(reply: ModelReply) -> ModelReply:
    """Set `ModelReply.fallback`, and remove the reply's tool calls, because the request had no tools.

    Raises:
        PerdureError: the reply has no text, or was filtered; see `checked`.
    """
    return checked(replace(reply, tool_calls=(), fallback=True))
