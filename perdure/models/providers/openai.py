"""`openai:NAME`: Chat Completions of OpenAI or a compatible server, through the official SDK.

This module uses the SDK's documented `client.post` instead of the SDK's pydantic models, for requests and for events.
With ten turns of context, the pydantic models would take a quarter of a call's CPU time. The SDK's retries are off,
because `GuardedModel` retries. Only this module maps the SDK's errors to `perdure.errors`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import openai
from openai import RequestOptions

from perdure.clock import Clock
from perdure.errors import InvalidResponse, PerdureError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.models.providers.chat_wire import ReplyAssembler, names_of, request_body
from perdure.models.providers.endpoint import OPENAI, endpoint_of
from perdure.models.providers.errors import Exchange, ProviderFailure, connection_error, error_of
from perdure.models.providers.transport import CONNECT_TIMEOUT_S, bind_call


class OpenAIModel:
    """One model of one server. Threads may share it."""

    def __init__(self, model: str, clock: Clock, variable: str = "PERDURE_MODEL") -> None:
        """Read the server's address and key from the environment, as the SDK does.

        `variable` is the setting whose value names the model. Error messages contain `variable`.

        Raises:
            SettingsError: `OPENAI_API_KEY` is missing, or `OPENAI_BASE_URL` is not a URL.
        """
        self._model = model
        self._clock = clock
        self._client = client(variable, self.name)
        self._close = weakref.finalize(self, self._client.close)

    @property
    def name(self) -> str:
        """The name as in `PERDURE_MODEL`."""
        return f"openai:{self._model}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Stream one reply. Raises the errors of `Model.respond`."""
        assembler = ReplyAssembler(names_of(request))
        with calling(self.name, call, self._clock) as exchange:
            with self._open(request, call) as stream:
                exchange.request_id = stream.response.headers.get("x-request-id")
                for chunk in stream:
                    call.delta(assembler.feed(chunk))
            rest, reply = assembler.finish()
            call.delta(rest)
            exchange.log_success()
            return reply

    def close(self) -> None:
        """Close the connections. Garbage collection of the model closes them as well."""
        self._close()

    def _open(self, request: ModelRequest, call: ModelCall) -> openai.Stream[object]:
        return self._client.post(
            "/chat/completions",
            body=request_body(self._model, request),
            cast_to=object,
            stream=True,
            stream_cls=openai.Stream[object],
            options=options_of(call),
        )


def client(setting: str, name: str) -> openai.OpenAI:
    """The SDK's client for the model or embedder `name`. `setting` is the setting whose value is `name`.

    Raises:
        SettingsError: `OPENAI_API_KEY` is missing, or `OPENAI_BASE_URL` is not a URL.
    """
    endpoint = endpoint_of(OPENAI, setting, name)
    return openai.OpenAI(
        api_key=endpoint.key, base_url=endpoint.base_url, max_retries=0, http_client=endpoint.http_client()
    )


def options_of(call: ModelCall) -> RequestOptions:
    """The options of one request, whose timeout is the remaining time of `call`."""
    left = call.remaining()
    return {
        "timeout": httpx2.Timeout(left, connect=min(left, CONNECT_TIMEOUT_S)),
        "security": {"bearer_auth": True},
    }


@contextmanager
def calling(name: str, call: ModelCall, clock: Clock) -> Iterator[Exchange]:
    """Within the block, bind the SDK's requests to `call` and map the SDK's errors to `perdure.errors`."""
    exchange = Exchange(name)
    with bind_call(call) as call_socket, call.aborting(call_socket.hang_up):
        try:
            yield exchange
        except openai.APIError as error:
            call.check()  # raises if the engine aborted the call
            raise _mapped(error, exchange, clock) from error
        except InvalidResponse as error:
            exchange.log_failure(error)
            raise
        except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, or too deep nesting
            unreadable = InvalidResponse("The model's server sent something that cannot be read.")
            raise exchange.log_failure(unreadable) from error


def _mapped(error: openai.APIError, exchange: Exchange, clock: Clock) -> PerdureError:
    if isinstance(error, openai.APIConnectionError):
        return exchange.log_failure(connection_error(error.__cause__))
    failure = ProviderFailure(None, error.code, error.message, {})
    if isinstance(error, openai.APIStatusError):
        exchange.request_id = error.request_id
        failure = ProviderFailure(error.status_code, error.code, error.message, error.response.headers)
    return exchange.log_failure(error_of(failure, clock), failure.status, failure.code)
