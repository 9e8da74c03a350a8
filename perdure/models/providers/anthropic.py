"""`anthropic:NAME`: the Messages API through the official SDK.

Like the module `openai`, this module uses the SDK's `client.post` instead of the SDK's pydantic models, for requests
and for events. The SDK's retries are off. Only this module maps the SDK's errors to `perdure.errors`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import anthropic
import httpx2

from perdure.clock import Clock
from perdure.errors import InvalidResponse, PerdureError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.models.providers.endpoint import ANTHROPIC, endpoint_of
from perdure.models.providers.errors import Exchange, ProviderFailure, connection_error, error_of
from perdure.models.providers.messages_wire import ReplyAssembler, names_of, request_body
from perdure.models.providers.transport import CONNECT_TIMEOUT_S, bind_call

_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status for each type of error, because an error within a stream has no status."""


class AnthropicModel:
    """One model of one server. Threads may share it."""

    def __init__(self, model: str, clock: Clock, variable: str = "PERDURE_MODEL") -> None:
        """Read the server's address and key from the environment, as the SDK does.

        `variable` is the setting whose value names the model. Error messages contain `variable`.

        Raises:
            SettingsError: `ANTHROPIC_API_KEY` is missing, or `ANTHROPIC_BASE_URL` is not a URL.
        """
        self._model = model
        self._clock = clock
        endpoint = endpoint_of(ANTHROPIC, variable, self.name)
        self._client = anthropic.Anthropic(
            api_key=endpoint.key, base_url=endpoint.base_url, max_retries=0, http_client=endpoint.http_client()
        )
        self._close = weakref.finalize(self, self._client.close)

    @property
    def name(self) -> str:
        """The name as in `PERDURE_MODEL`."""
        return f"anthropic:{self._model}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Stream one reply. Raises the errors of `Model.respond`."""
        assembler = ReplyAssembler(names_of(request))
        with _calling(self.name, call, self._clock) as exchange:
            with self._open(request, call) as stream:
                exchange.request_id = stream.response.headers.get("request-id")
                for event in stream:
                    call.delta(assembler.feed(event))
                    if assembler.complete:
                        break
            rest, reply = assembler.finish()
            call.delta(rest)
            exchange.log_success()
            return reply

    def close(self) -> None:
        """Close the connections. Garbage collection of the model closes them as well."""
        self._close()

    def _open(self, request: ModelRequest, call: ModelCall) -> anthropic.Stream[object]:
        left = call.remaining()
        return self._client.post(
            "/v1/messages",
            body=request_body(self._model, request),
            cast_to=object,
            stream=True,
            stream_cls=anthropic.Stream[object],
            options={"timeout": httpx2.Timeout(left, connect=min(left, CONNECT_TIMEOUT_S))},
        )


@contextmanager
def _calling(name: str, call: ModelCall, clock: Clock) -> Iterator[Exchange]:
    """Within the block, bind the SDK's requests to `call` and map the SDK's errors to `perdure.errors`."""
    exchange = Exchange(name)
    with bind_call(call) as call_socket, call.aborting(call_socket.hang_up):
        try:
            yield exchange
        except anthropic.APIConnectionError as error:
            call.check()  # raises if the engine aborted the call
            raise exchange.log_failure(connection_error(error.__cause__)) from error
        except httpx2.TransportError as error:  # the SDK does not wrap errors within a stream
            call.check()
            raise exchange.log_failure(connection_error(error)) from error
        except anthropic.APIStatusError as error:
            raise _mapped(error, exchange, clock) from error
        except InvalidResponse as error:
            exchange.log_failure(error)
            raise
        except (anthropic.APIError, ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, or too deep nesting
            unreadable = InvalidResponse("The model's server sent something that cannot be read.")
            raise exchange.log_failure(unreadable) from error


def _mapped(error: anthropic.APIStatusError, exchange: Exchange, clock: Clock) -> PerdureError:
    exchange.request_id = error.request_id
    status: int | None = error.status_code
    if error.response.is_success:  # an error within the stream
        status = _STATUS_OF_TYPE.get(error.type or "")
    said = error.api_message if isinstance(error.api_message, str) else error.message
    failure = ProviderFailure(status, error.type, said, error.response.headers)
    return exchange.log_failure(error_of(failure, clock), failure.status, failure.code)
